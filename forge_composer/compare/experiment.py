"""An experiment file: one base config, arms that change it, seeds, and what counts as success."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from forge_composer._section import Section
from forge_composer.config import Config, ConfigError, Problem, load
from forge_composer.config.fields import array_section_of, section_of
from forge_composer.config.overrides import COMMAND_LINE, in_words

Endpoint = Literal["area", "rollouts_to_threshold", "seconds_to_threshold", "held_out"]

RESERVED = ("seed", "output_dir")
"""Fields of the run config that the comparison sets itself."""


class SuccessSection(Section):
    """What is measured."""

    metric: str = "reward/success_rate"
    """Key in `metrics.jsonl` that the learning curve is made of: of the training steps, or of the
    held-out evaluations if it begins with `eval/` (then set `loop.eval_every` too). Higher is better."""
    held_out: str = "eval/reward_success_rate"
    """Key of the last held-out evaluation that counts as the final result."""
    threshold: float = 0.8
    """The smoothed curve has to reach this value."""
    smoothing: int = Field(5, ge=1)
    """Points (steps or evaluations) of the trailing mean that is held against the threshold."""


class ArmSection(Section):
    """One way to run the base config."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")
    """Name in tables; also the name of the folder that holds the arm's runs."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the run config, dotted or as nested tables; the text "none" empties an optional field."""


class Experiment(Section):
    """A comparison of arms."""

    name: str = "comparison"
    """Title of the tables and the page."""
    base: Path
    """Run config (TOML) that every arm starts from; looked up in the current folder, then beside the
    experiment file."""
    seeds: tuple[int, ...]
    """Seeds that every arm runs with. A seed fixes the order of the tasks, so runs of one seed are a pair."""
    arms: tuple[ArmSection, ...]
    """The arms (array of tables)."""
    baseline: str
    """Name of the arm that the others are compared with."""
    primary: Endpoint = "area"
    """The endpoint that the verdict is about; fixed before the runs, or its p-value means nothing."""
    success: SuccessSection = Field(default_factory=SuccessSection)
    """What is measured."""

    def arguments(self, arm: ArmSection, seed: int, folder: Path) -> tuple[str, ...]:
        """The command line of one run, without the program."""
        given = [f"--{dotted}={as_argument(value)}" for dotted, value in flatten(arm.overrides)]
        return ("--config", str(self.base), f"--seed={seed}", f"--output_dir={folder}", *given)

    def arm(self, name: str) -> ArmSection:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


def load_experiment(path: str | Path) -> Experiment:
    """Read an experiment file and check it, without its run configs (`resolve` does those).

    Raises:
        ConfigError: with every problem that was found.
    """
    path = Path(path)
    tree = _read(path)
    try:
        experiment = Experiment.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_problem(path, details) for details in error.errors(include_url=False)) from error
    if problems := list(_contradictions(experiment, str(path))):
        raise ConfigError(problems)
    base = experiment.base.expanduser()
    if not base.exists() and (beside := path.resolve().parent / base).exists():
        base = beside
    return experiment.model_copy(update={"base": base})


def resolve(experiment: Experiment, source: str, runs: Path) -> dict[str, Config]:
    """The checked run config of each arm, by name; its seed and folder stand for those of all seeds.

    Args:
        experiment: the experiment.
        source: its file, for messages.
        runs: folder that will hold the runs.

    Raises:
        ConfigError: with the problems of every arm.
    """
    configs: dict[str, Config] = {}
    problems: dict[Problem, None] = {}
    for arm in experiment.arms:
        arguments = experiment.arguments(arm, experiment.seeds[0], runs / arm.name / "new")
        try:
            configs[arm.name] = load(experiment.base, arguments[2:])
        except ConfigError as error:
            for problem in error.problems:
                place = f"{source}: arm {arm.name}" if problem.source == COMMAND_LINE else problem.source
                problems[dataclasses.replace(problem, source=place)] = None
    for name, config in configs.items():
        if experiment.primary == "held_out" and not config.loop.eval_tasks:
            wrong = f"the primary endpoint is held_out, and arm {name} evaluates on loop.eval_tasks = 0 tasks"
            remedy = "set loop.eval_tasks, or choose another endpoint"
            problems[Problem(source, "primary", "held_out", wrong, remedy)] = None
    if problems:
        raise ConfigError(problems)
    return configs


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values of nested tables with their dotted names."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def as_argument(value: Any) -> str:
    """A value as the command line takes it: text as it is, anything else in TOML."""
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # texts, numbers and booleans are alike in JSON and TOML


def _read(path: Path) -> dict[str, Any]:
    if path.suffix != ".toml":
        wrong = "an experiment is a file that ends in .toml"
        raise ConfigError([Problem(str(path), "", "", wrong, "name one, or rename it")])
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        wrong, remedy = f"cannot be read: {error.strerror or error}", "name an existing experiment file"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        wrong, remedy = f"is not valid TOML: {error}", "mend the line; texts need quotes"
    raise ConfigError([Problem(str(path), "", "", wrong, remedy)])


def _problem(path: Path, details: ErrorDetails) -> Problem:
    """A pydantic error in our words."""
    dotted = ".".join(str(part) for part in details["loc"])
    table = _table_of(details["loc"])
    last = str(details["loc"][-1])
    shown = json.dumps(details["input"], default=str)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    field = table.model_fields.get(last)
    about = " ".join((field.description or "").split()) if field else ""
    if details["type"] == "extra_forbidden":
        near = difflib.get_close_matches(last, table.model_fields, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(table.model_fields)}"
        return Problem(str(path), dotted, shown, "there is no such field", remedy)
    if details["type"] == "missing":
        return Problem(str(path), dotted, "", "the field is required", f"add it. {about}".strip())
    return Problem(
        str(path), dotted, shown, in_words(details["msg"]), f"give an allowed value. {about}".strip()
    )


def _table_of(location: tuple[int | str, ...]) -> type[BaseModel]:
    """The table that holds the field of an error."""
    table: type[BaseModel] = Experiment
    for part in location[:-1]:
        field = table.model_fields.get(str(part))
        if field is not None:
            table = section_of(field.annotation) or array_section_of(field.annotation) or table
    return table


def _contradictions(experiment: Experiment, source: str) -> Iterator[Problem]:
    """What is wrong with an experiment whose fields are right one by one."""
    names = [arm.name for arm in experiment.arms]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(source, "arms", name, "two arms have this name", "give each arm its own name")
    if len(names) < 2:
        wrong = f"{len(names)} arms: a comparison needs two or more"
        yield Problem(source, "arms", "", wrong, "add [[arms]] tables, each with a name")
    seeds = experiment.seeds
    if not seeds:
        yield Problem(source, "seeds", "[]", "there is nothing to run", "list seeds; 8 are a good number")
    for seed in sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        wrong = "this seed is listed twice: a repeated run is no further evidence"
        yield Problem(source, "seeds", str(seed), wrong, "list each seed once")
    for seed in seeds:
        if seed < 0:
            yield Problem(source, "seeds", str(seed), "a seed is 0 or more", "choose another one")
    if experiment.baseline not in names:
        near = difflib.get_close_matches(experiment.baseline, names, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        yield Problem(source, "baseline", experiment.baseline, "there is no such arm", remedy)
    for index, arm in enumerate(experiment.arms):
        for dotted, value in flatten(arm.overrides):
            if dotted.replace("-", "_") in RESERVED:
                yield Problem(
                    source,
                    f"arms.{index}.overrides.{dotted}",
                    str(value),
                    "the comparison sets this field of every run itself",
                    "take it out of the arm; seeds are listed in `seeds`",
                )
