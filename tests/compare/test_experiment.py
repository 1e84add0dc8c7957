"""Experiment files: what is read, and what is refused with a way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from forge_composer.compare.experiment import Experiment, as_argument, flatten, load_experiment, resolve
from forge_composer.config import ConfigError


@pytest.fixture(autouse=True)
def in_the_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base configs and their model are named as they are from there."""
    monkeypatch.chdir(checkout)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes an experiment with the given keys changed (None: removed)."""

    def write(**changes: Any) -> Path:
        tree: dict[str, Any] = {
            "base": "configs/cpu_sync.toml",
            "seeds": [0, 1],
            "baseline": "grpo",
            "arms": [{"name": "grpo"}, {"name": "sdpo", "overrides": {"loss": {"sdpo": {"weight": 0.5}}}}],
        }
        tree = {key: value for key, value in (tree | changes).items() if value is not None}
        path = tmp_path / "e.toml"
        path.write_text(tomli_w.dumps(tree))
        return path

    return write


def arms(*overrides: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "grpo"}, *({"name": f"arm{i}", "overrides": o} for i, o in enumerate(overrides))]


def test_an_experiment_becomes_run_configs(write: Callable[..., Path], tmp_path: Path) -> None:
    changed = {"loss.sdpo.weight": 0.5, "loop": {"steps": 7}, "metrics": {"tensorboard": False}}
    experiment = load_experiment(write(arms=arms(changed)))
    configs = resolve(experiment, "e.toml", tmp_path / "runs")
    assert configs["grpo"].loss.sdpo.weight == 0
    assert configs["arm0"].loss.sdpo.weight == 0.5
    assert (configs["arm0"].loop.steps, configs["arm0"].metrics.tensorboard) == (7, False)
    arguments = experiment.arguments(experiment.arms[1], 1, tmp_path)
    assert arguments[:4] == ("--config", "configs/cpu_sync.toml", "--seed=1", f"--output_dir={tmp_path}")


def test_values_survive_the_command_line(write: Callable[..., Path], tmp_path: Path) -> None:
    teacher = {"name": "a, b", "model": "m", "base_url": "http://localhost:1/v1"}
    changed = {
        "name": "--odd = name",
        "teachers": [teacher],
        "trainer": {"optimizer": {"lr": 1e-7}},
        "runtime": {"slurm": {"extra_args": ["--a", "b c"], "partition": "none"}},
    }
    experiment = load_experiment(write(arms=arms(changed)))
    config = resolve(experiment, "e.toml", tmp_path)["arm0"]
    assert config.name == "--odd = name"
    assert config.teachers[0].name == "a, b"
    assert config.trainer.optimizer.lr == 1e-7
    assert config.runtime.slurm.extra_args == ("--a", "b c")
    assert config.runtime.slurm.partition is None


def test_nested_and_quoted_keys_are_the_same() -> None:
    nested = {"loss": {"sdpo": {"weight": 0.5}}, "seedless": True}
    assert dict(flatten(nested)) == {"loss.sdpo.weight": 0.5, "seedless": True}
    assert as_argument([1, "a"]) == '[1, "a"]'
    assert as_argument(True) == "true"


def test_the_base_may_lie_beside_the_experiment(
    write: Callable[..., Path], tmp_path: Path, checkout: Path
) -> None:
    (tmp_path / "mine.toml").write_text((checkout / "configs/cpu_sync.toml").read_text())
    assert load_experiment(write(base="mine.toml")).base == tmp_path / "mine.toml"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"seed": [1]}, ["seed = [1]", "no such field", "did you mean seeds?"]),
        ({"success": {"treshold": 0.5}}, ["success.treshold", "did you mean threshold?"]),
        (
            {"arms": [{"name": "grpo"}, {"name": "b", "override": {}}]},
            ["arms.1.override", "did you mean overrides?"],
        ),
        ({"zzz": 1}, ["zzz", "there are name, base, seeds"]),
        ({"base": None}, ["base", "required"]),
        ({"seeds": None}, ["seeds", "required"]),
        ({"seeds": []}, ["seeds = []", "nothing to run"]),
        ({"seeds": [1, 2, 1]}, ["seeds = 1", "listed twice"]),
        ({"seeds": [-1, 2]}, ["seeds = -1", "0 or more"]),
        ({"seeds": ["a"]}, ["seeds.0", "valid integer"]),
        ({"arms": [{"name": "grpo"}]}, ["1 arms: a comparison needs two"]),
        ({"arms": [{"name": "grpo"}, {"name": "grpo"}]}, ["arms = grpo", "two arms have this name"]),
        ({"arms": [{"name": "grpo"}, {"name": "../x"}]}, ["arms.1.name", "match pattern"]),
        ({"baseline": "gpro"}, ["baseline = gpro", "no such arm", "did you mean grpo?"]),
        ({"primary": "auc"}, ["primary", "'area'"]),
        ({"success": {"smoothing": 0}}, ["success.smoothing", "greater than or equal to 1"]),
        ({"arms": arms({"seed": 3})}, ["arms.1.overrides.seed = 3", "take it out of the arm"]),
        ({"arms": arms({"output-dir": "x"})}, ["arms.1.overrides.output-dir", "itself"]),
    ],
)
def test_bad_experiments(write: Callable[..., Path], changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(write(**changes))
    assert len(caught.value.problems) == 1
    for part in parts:
        assert part in str(caught.value)


def test_every_problem_is_listed(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(write(seeds=[1, 1], baseline="none"))
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"base": "configs/no.toml"}, ["configs/no.toml", "cannot be read"]),
        (
            {"arms": arms({"loss": {"sdpo": {"wieght": 1.0}}})},
            ["e.toml: arm arm0: loss.sdpo.wieght", "did you mean loss.sdpo.weight?"],
        ),
        ({"arms": arms({"trainer": {"nproc": 3}})}, ["arm arm0: trainer.nproc", "set trainer.nproc = 2"]),
        ({"arms": arms({"loop": {"steps": "many"}})}, ["arm arm0: loop.steps = many"]),
        ({"primary": "held_out", "arms": arms({"loop": {"eval_tasks": 0}})}, ["primary", "arm arm0"]),
    ],
)
def test_bad_run_configs(
    write: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    experiment = load_experiment(write(**changes))
    with pytest.raises(ConfigError) as caught:
        resolve(experiment, "e.toml", tmp_path / "runs")
    assert len(caught.value.problems) == 1  # once, although every arm starts from the base
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [("e.toml", "seeds = [", "not valid TOML"), ("e.json", "{}", "ends in .toml")],
)
def test_files_that_are_no_experiments(tmp_path: Path, name: str, text: str, part: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(part)):
        load_experiment(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_experiment(tmp_path / "none.toml")


def test_the_example_of_the_documentation_is_right(checkout: Path, tmp_path: Path) -> None:
    text = (checkout / "docs/compare.md").read_text()
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert example
    path = tmp_path / "example.toml"
    path.write_text(example[1])
    experiment = load_experiment(path)
    resolve(experiment, "example.toml", tmp_path / "runs")
    for table in (Experiment, type(experiment.success)):
        for field in table.model_fields:
            assert f"`{field}`" in text, f"docs/compare.md does not mention {field}"
