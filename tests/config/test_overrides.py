"""Overrides are typed by the schema; names that do not exist lead to those that do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.config import ConfigError, fields, load, overrides

Write = Callable[..., Path]


def value(arguments: list[str]) -> Any:
    parsed, problems = overrides.parse(arguments)
    assert problems == []
    (override,) = parsed
    return override.value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.optimizer.lr", "1e-5"], 1e-5),
        (["--trainer.optimizer.lr=1e-5"], 1e-5),
        (["--trainer.optimizer.lr", "1"], 1.0),
        (["--loop.steps", "12"], 12),
        (["--loop.max_policy_lag", "0"], 0),
        (["--metrics.tensorboard", "false"], False),
        (["--metrics.tensorboard=on"], True),
        (["--metrics.tensorboard"], True),
        (["--environment.url", "none"], None),
        (["--environment.url", "http://localhost:8000"], "http://localhost:8000"),
        (["--runtime.slurm.gpus_per_node", "8"], 8),
        (["--runtime.slurm.gpus_per_node", "None"], None),
        (["--runtime.slurm.extra_args", '["--a=1", "--b c"]'], ["--a=1", "--b c"]),
        (["--runtime.slurm.extra_args", "x, y"], ["x", "y"]),
        (["--runtime.slurm.extra_args="], []),
        (["--output_dir", "runs/x"], "runs/x"),
        (["--output-dir", "runs/x"], "runs/x"),
        (["--name", "none"], "none"),
        (["--name", "12"], "12"),
        (["--name="], ""),
        (["--weights.transport", "message"], "message"),
        (["--teachers", "[]"], []),
        (
            ["--teachers", '[{name="a", model="m", base_url="http://localhost/v1"}]'],
            [{"name": "a", "model": "m", "base_url": "http://localhost/v1"}],
        ),
    ],
)
def test_typed_by_the_schema(arguments: list[str], expected: Any) -> None:
    got = value(arguments)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("arguments", "field", "wrong", "remedy"),
    [
        (["--loop.steps", "many"], "loop.steps", "valid integer", "Optimizer steps"),
        (["--loop.steps", "1.5"], "loop.steps", "valid integer", "Optimizer steps"),
        (["--loop.steps", "none"], "loop.steps", "valid integer", "Optimizer steps"),
        (["--metrics.tensorboard", "maybe"], "metrics.tensorboard", "boolean", "TensorBoard"),
        (["--weights.transport", "pigeon"], "weights.transport", "'shared_memory'", "allowed"),
        (["--loop.steps"], "loop.steps", "value is missing", "--loop.steps VALUE"),
        (["--loop.steps", "--seed", "1"], "loop.steps", "value is missing", "--loop.steps VALUE"),
        (["--loop", "3"], "loop", "a table", "--loop.steps"),
        (["--lr", "1e-5"], "lr", "no such field", "did you mean trainer.optimizer.lr?"),
        (["--trainer.lr", "1e-5"], "trainer.lr", "no such field", "did you mean trainer.optimizer.lr?"),
        (["--rollout.group_sise=4"], "rollout.group_sise", "no such field", "rollout.group_size?"),
        (["--seeed", "1"], "seeed", "no such field", "did you mean seed?"),
        (["--qqqq", "1"], "qqqq", "no such field", "schema"),
        (["--runtime.slurm.extra_args", '["a"'], "runtime.slurm.extra_args", "array", "sbatch"),
    ],
)
def test_refused(arguments: list[str], field: str, wrong: str, remedy: str) -> None:
    parsed, problems = overrides.parse(arguments)
    problem = problems[0]
    assert (problem.source, problem.field) == ("command line", field)
    assert wrong in problem.wrong
    assert remedy in problem.remedy
    assert all(override.field != field for override in parsed)


def test_stray_words_are_refused() -> None:
    parsed, problems = overrides.parse(["seed", "3", "--seed", "4"])
    assert [(o.field, o.value) for o in parsed] == [("seed", 4)]
    assert [problem.value for problem in problems] == ["'seed'", "'3'"]


def test_overrides_win_over_the_file_and_the_last_one_wins(write_config: Write) -> None:
    config = load(write_config(), ["--loop.steps", "11", "--loop.steps=12", "--trainer.optimizer.lr", "0.5"])
    assert config.loop.steps == 12
    assert config.trainer.optimizer.lr == 0.5
    assert config.rollout.group_size == 4


def test_a_range_is_checked_after_the_override(write_config: Write) -> None:
    with pytest.raises(ConfigError, match="greater than 0") as caught:
        load(write_config(), ["--loop.steps", "-3"])
    (problem,) = caught.value.problems
    assert (problem.source, problem.field, problem.value) == ("command line", "loop.steps", "-3")


def test_into_an_array_of_tables(write_config: Write) -> None:
    file = write_config(teachers=[{"name": "a", "model": "m", "base_url": "http://localhost/v1"}])
    assert load(file, ["--teachers.0.model", "n"]).teachers[0].model == "n"
    with pytest.raises(ConfigError, match="no such table"):
        load(file, ["--teachers.1.model", "n"])


def test_every_field_is_documented_and_found_by_its_name() -> None:
    names = [name for name, _ in fields.leaves()]
    assert len(names) == len(set(names)) > 80
    assert [name for name in names if not fields.describe(name)] == []


def test_an_optional_field_is_none_by_default() -> None:
    # TOML has no null: `dump_toml` leaves None out, so nothing else may be the default.
    for name, field in fields.leaves():
        if fields.is_optional(field.annotation):
            assert field.default is None, name


@given(st.floats(min_value=1e-12, max_value=1e6, allow_nan=False))
def test_any_float_survives_its_text(number: float) -> None:
    assert value(["--trainer.optimizer.lr", repr(number)]) == number


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8), max_size=4)
)
def test_any_list_of_texts_survives_as_json(texts: list[str]) -> None:
    raw = json.dumps(texts, ensure_ascii=False)
    assert value([f"--runtime.slurm.extra_args={raw}"]) == texts
