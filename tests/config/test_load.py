"""Paths, placeholders and the round trip through TOML."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.config import Config, dump_toml, find_problems, load, machine, read

Write = Callable[..., Path]


def test_resolved_config_reads_back_equal(write_config: Write, tmp_path: Path) -> None:
    teacher = {"name": "a", "model": "m", "base_url": "http://localhost/v1"}
    file = write_config(
        teachers=[teacher], runtime__slurm__extra_args=["--x=1"], environment__url="http://h:1"
    )
    config = load(file, ["--trainer.optimizer.lr", "3e-7"])
    again = tmp_path / "config.toml"
    again.write_text(dump_toml(config))
    assert load(again) == config


def test_every_default_is_valid(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """A file with nothing but the policy; the run folder's placeholders are filled in."""
    file = tmp_path / "least.toml"
    file.write_text(f'name = "least"\n[model]\npath = "{tiny_qwen3_dir}"\n')
    config = read(file).config
    assert re.fullmatch(r"least-[0-9-]+", config.output_dir.name), config.output_dir
    assert config.output_dir.parent.name == "runs"


@given(
    st.builds(
        dict,
        lr=st.floats(min_value=1e-12, max_value=1e3),
        steps=st.integers(1, 10**9),
        name=st.text(st.characters(codec="utf-8", exclude_characters="{}"), max_size=20),
        tensorboard=st.booleans(),
        image=st.none() | st.text(max_size=10),
    )
)
def test_toml_holds_any_value(drawn: dict[str, object]) -> None:
    config = Config.model_validate(
        {
            "name": drawn["name"],
            "model": {"path": "p"},
            "runtime": {"kubernetes": {"image": drawn["image"]}},
            "trainer": {"optimizer": {"lr": drawn["lr"]}},
            "loop": {"steps": drawn["steps"]},
            "metrics": {"tensorboard": drawn["tensorboard"]},
        }
    )
    assert Config.model_validate(tomllib.loads(dump_toml(config))) == config


def test_model_path_is_looked_up_here_then_beside_the_file(
    write_config: Write, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_config(model__path="policy")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(file).model.path == model_folder
    (elsewhere / "policy").mkdir()
    assert read(file).config.model.path == elsewhere / "policy"


def test_output_dir_placeholders(write_config: Write, tmp_path: Path) -> None:
    config = load(write_config(name="night", output_dir=str(tmp_path / "{name}-{time}")))
    assert re.fullmatch(r"night-\d{8}-\d{6}", config.output_dir.name)


def test_relative_output_dir_is_below_the_current_folder(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(write_config(), ["--output_dir", "runs/x"]).output_dir == tmp_path / "runs" / "x"


@pytest.mark.parametrize("name", ["cpu", "cpu_sync", "a100x8", "h200x1", "slurm_4x8"])
def test_shipped_configs_have_at_most_problems_of_this_machine(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(checkout)
    loaded = read(f"configs/{name}.toml")
    problems = find_problems(loaded.config, loaded.origin)
    assert [str(problem) for problem in problems if not problem.machine_local] == []


def test_sync_config_differs_from_async_only_in_its_lag(checkout: Path) -> None:
    configs = [tomllib.loads((checkout / "configs" / f"{n}.toml").read_text()) for n in ("cpu", "cpu_sync")]
    assert configs[1]["loop"].pop("max_policy_lag") == 0
    assert configs[0]["loop"].pop("max_policy_lag") == 2
    assert configs[0].pop("name") != configs[1].pop("name")
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("visible", "driver", "expected"),
    [(None, 4, 4), ("", 4, 0), ("-1", 4, 0), ("2,3", 4, 2), ("0,-1,1", 4, 1), ("0,1,2", 2, 2)],
)
def test_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, driver: int, expected: int
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(machine, "_driver_gpus", lambda: driver)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.visible_gpus() == expected


def test_a_cpu_build_of_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(machine, "_driver_gpus", lambda: 8)
    assert machine.visible_gpus() == 0
