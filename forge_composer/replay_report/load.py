"""From a TOML file and overrides to `ReplaySettings`."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from forge_composer.config.errors import ConfigError, Problem
from forge_composer.config.fields import is_bool, is_optional, section_of
from forge_composer.config.overrides import COMMAND_LINE, Override, apply, in_words
from forge_composer.replay_report import lookup
from forge_composer.replay_report.rules import contradictions
from forge_composer.replay_report.settings import ReplaySettings


def load_settings(path: str | Path, arguments: Sequence[str] = ()) -> ReplaySettings:
    """Read, override and check the config of a replay; starts nothing and looks at no trace.

    Args:
        path: TOML file.
        arguments: dotted overrides as on a command line, `["--replay.quorum", "3"]`.

    Returns:
        The settings, with `output_dir`, `policy` and `traces` absolute.

    Raises:
        ConfigError: with every problem that was found.
    """
    path = Path(path)
    tree = _read(path)
    given, problems = _overrides(arguments)
    problems += apply(tree, given)
    overridden = frozenset(override.field for override in given)
    try:
        settings = ReplaySettings.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        found = (_problem(details, str(path), overridden) for details in error.errors(include_url=False))
        raise ConfigError([*problems, *found]) from error
    problems += contradictions(settings, str(path))
    if problems:
        raise ConfigError(problems)
    return _with_paths(settings, path)


def _read(path: Path) -> dict[str, Any]:
    if path.suffix != ".toml":
        wrong, remedy = (
            "a config is a file that ends in .toml",
            "name one, such as configs/replay_offline.toml",
        )
        raise ConfigError([Problem(str(path), "", "", wrong, remedy)])
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        wrong, remedy = f"cannot be read: {error.strerror or error}", "name an existing file"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        wrong = f"is not valid TOML: {error}"
        remedy = "mend the line; texts need quotes, tables are written [section.name]"
    raise ConfigError([Problem(str(path), "", "", wrong, remedy)])


def _overrides(arguments: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """`--section.field VALUE`, `--section.field=VALUE`, or a switch alone."""
    overrides: list[Override] = []
    problems: list[Problem] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or argument == "--":
            wrong, remedy = "this belongs to no option", "write overrides as --section.field VALUE"
            problems.append(Problem(COMMAND_LINE, "", repr(argument), wrong, remedy))
            continue
        name, equals, raw = argument[2:].partition("=")
        given = raw if equals else None
        if given is None and waiting and not waiting[0].startswith("--"):
            given = waiting.pop(0)
        result = _override(name.replace("-", "_"), given)
        (problems if isinstance(result, Problem) else overrides).append(result)  # type: ignore[arg-type]
    return overrides, problems


def _override(name: str, raw: str | None) -> Override | Problem:
    field = lookup.find(ReplaySettings, name)
    if field is None:
        return _unknown(COMMAND_LINE, name, raw or "")
    if table := section_of(field.annotation):
        names = ", ".join(f"--{name}.{inner}" for inner in table.model_fields)
        return Problem(COMMAND_LINE, name, raw or "", "this is a table, not a value", f"set one of {names}")
    if raw is None:
        if is_bool(field.annotation):
            return Override(name, True)
        return Problem(COMMAND_LINE, name, "", "the value is missing", f"write --{name} VALUE")
    if raw.lower() == "none" and is_optional(field.annotation):
        return Override(name, None)
    return Override(name, _value(field.annotation, raw))


def _value(annotation: Any, raw: str) -> Any:
    """A value as TOML has it where the field takes that, else the text: names need no quotes here."""
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
        adapter.validate_json(json.dumps(value, default=str), strict=True)
    except (tomllib.TOMLDecodeError, ValidationError):
        return raw
    return value


def _problem(details: ErrorDetails, file: str, overridden: frozenset[str]) -> Problem:
    """A pydantic error in our words."""
    dotted = ".".join(str(part) for part in details["loc"])
    source = COMMAND_LINE if dotted in overridden else file
    shown = json.dumps(details["input"], default=str)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    if details["type"] == "extra_forbidden":
        return _unknown(source, dotted, shown)
    about = lookup.describe(ReplaySettings, dotted)
    if details["type"] == "missing":
        return Problem(source, dotted, "", "the field is required", f"add it. {about}".strip())
    remedy = f"give an allowed value. {about}".strip()
    return Problem(source, dotted, shown, in_words(details["msg"]).removeprefix("value error, "), remedy)


def _unknown(source: str, dotted: str, value: str) -> Problem:
    near = lookup.nearest(ReplaySettings, dotted)
    remedy = f"did you mean {near}?" if near else "docs/replay.md has the keys"
    return Problem(source, dotted, value, "there is no such field", remedy)


def _with_paths(settings: ReplaySettings, file: Path) -> ReplaySettings:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = str(settings.output_dir).replace("{name}", settings.name).replace("{time}", stamp)
    policy = settings.policy
    return settings.model_copy(
        update={
            "output_dir": Path(output).expanduser().absolute(),
            "policy": None if policy is None else _found(policy, file),
            "traces": tuple(_found(path, file) for path in settings.traces),
        }
    )


def _found(path: Path, file: Path) -> Path:
    """A path in the current folder or, if it is not there, beside the config."""
    path = path.expanduser()
    beside = file.resolve().parent / path
    return (beside if not path.exists() and beside.exists() else path).absolute()
