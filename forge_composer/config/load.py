"""From a TOML file and overrides to a `Config`, and back."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forge_composer.config import fields, overrides
from forge_composer.config.errors import ConfigError, Problem
from forge_composer.config.schema import Config

Table = TypeVar("Table", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the values of a config come from, for messages."""

    file: str = "config"
    overridden: frozenset[str] = field(default_factory=frozenset)
    written: frozenset[str] = field(default_factory=frozenset)
    root: type[BaseModel] = Config
    """The schema."""

    def of(self, dotted: str) -> str:
        """`command line`, the file, or the file with the remark that the value is a default."""
        if dotted in self.overridden:
            return overrides.COMMAND_LINE
        known = fields.find(dotted, self.root) is not None
        return f"{self.file} (default)" if known and dotted not in self.written else self.file


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config that fits the schema, before the rules over several fields."""

    config: Config
    origin: Origin


def load(path: str | Path, arguments: Sequence[str] = ()) -> Config:
    """Read, override and check a config; quick, loads no torch and starts nothing.

    Args:
        path: TOML file.
        arguments: dotted overrides as on a command line, `["--trainer.nproc", "2"]`.

    Returns:
        The config, with `model.path` and `output_dir` absolute.

    Raises:
        ConfigError: with every problem that was found.
    """
    from forge_composer.config.checks import find_problems

    loaded = read(path, arguments)
    if problems := find_problems(loaded.config, loaded.origin):
        raise ConfigError(problems)
    return loaded.config


def read(path: str | Path, arguments: Sequence[str] = ()) -> Loaded:
    """`load` without the rules of `checks`: the file parses and every field has its type.

    Raises:
        ConfigError: unreadable file, TOML errors, unknown keys, wrong types or ranges.
    """
    config, origin = read_table(path, arguments, Config)
    return Loaded(_with_paths(config, Path(path)), origin)


def read_table(path: str | Path, arguments: Sequence[str], root: type[Table]) -> tuple[Table, Origin]:
    """A TOML file with overrides as an object of a schema, and where its values come from.

    Raises:
        ConfigError: unreadable file, TOML errors, unknown keys, wrong types or ranges.
    """
    path = Path(path)
    tree = _read_toml(path)
    given, problems = overrides.parse(arguments, root)
    problems += overrides.apply(tree, given)
    written = frozenset(_dotted(tree))
    origin = Origin(str(path), frozenset(override.field for override in given), written, root)
    try:
        table = root.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems += [_problem(details, origin) for details in error.errors(include_url=False)]
    if problems:
        raise ConfigError(problems)
    return table, origin


def dump_toml(config: Config) -> str:
    """The config as TOML; reads back to an equal one (a field that is None is left out)."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read_toml(path: Path) -> dict[str, Any]:
    if path.suffix != ".toml":
        remedy = "name a TOML file, for example configs/cpu.toml"
        raise ConfigError([Problem(str(path), "", "", "a config is a file that ends in .toml", remedy)])
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        nearby = sorted(str(other) for other in Path("configs").glob("*.toml"))
        remedy = f"name an existing file, such as {', '.join(nearby)}" if nearby else "name an existing file"
        wrong = f"cannot be read: {error.strerror or error}"
        raise ConfigError([Problem(str(path), "", "", wrong, remedy)]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        wrong = f"is not valid TOML: {error}"
        remedy = "mend the line; texts need quotes, tables are written [section.name]"
        raise ConfigError([Problem(str(path), "", "", wrong, remedy)]) from error


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of everything that a tree sets, tables and array elements included."""
    names = []
    for key, value in tree.items():
        names.append(prefix + key)
        if isinstance(value, dict):
            names += _dotted(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                names.append(f"{prefix}{key}.{index}")
                if isinstance(item, dict):
                    names += _dotted(item, f"{prefix}{key}.{index}.")
    return names


def _problem(details: ErrorDetails, origin: Origin) -> Problem:
    """A pydantic error in our words."""
    dotted = ".".join(str(part) for part in details["loc"])
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        return overrides.unknown(origin.of(dotted), dotted, _show(value), origin.root)
    about = fields.describe(dotted, origin.root)
    if kind == "missing":
        remedy = f"add it to the file, or give --{dotted} VALUE. {about}".strip()
        return Problem(origin.file, dotted, "", "the field is required", remedy)
    context = details.get("ctx", {})
    wrong = overrides.in_words(details["msg"])
    if kind == "literal_error":
        wrong = f"allowed are {context['expected']}"
    remedy = f"give an allowed value. {about}".strip()
    return Problem(origin.of(dotted), dotted, _show(value), wrong, remedy)


def _show(value: object) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _with_paths(config: Config, file: Path) -> Config:
    """Make the paths absolute, so that processes with another current folder see the same files.

    `model.path` is looked up in the current folder, then in the config file's. `{name}` and `{time}` in
    `output_dir` stand for the run's name and the time of loading, `YYYYmmdd-HHMMSS`.
    """
    model = config.model.model_copy(update={"path": here_or_beside(config.model.path, file)})
    return config.model_copy(update={"model": model, "output_dir": filled_in(config.output_dir, config.name)})


def here_or_beside(path: Path, file: Path) -> Path:
    """A path in the current folder or, if it is not there, beside a config file; absolute."""
    path = path.expanduser()
    beside = file.resolve().parent / path
    return (beside if not path.exists() and beside.exists() else path).absolute()


def filled_in(folder: Path, name: str) -> Path:
    """An output folder, absolute, with its `{name}` and `{time}`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(str(folder).replace("{name}", name).replace("{time}", stamp)).expanduser().absolute()
