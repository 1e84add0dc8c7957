"""Dotted overrides on the command line: `--trainer.optimizer.lr 1e-5`, `--output_dir=runs/x`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from forge_composer.config import fields
from forge_composer.config.errors import Problem
from forge_composer.config.schema import Config

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Override:
    """One override: the field's dotted name and its value in JSON types."""

    field: str
    value: Any


def parse(arguments: Sequence[str], root: type[BaseModel] = Config) -> tuple[list[Override], list[Problem]]:
    """Read overrides; values are typed by the schema.

    `none` sets an optional field to None; a switch may stand alone (`--metrics.tensorboard`); an array
    is written in TOML (`'["a", "b"]'`) or, for texts and numbers, with commas (`a,b`); `teachers.0.model`
    reaches into an array of tables.

    Args:
        arguments: what the command line holds beside the app's own options.
        root: the schema.

    Returns:
        The overrides in order, and what is wrong with the others.
    """
    overrides: list[Override] = []
    problems: list[Problem] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("--") or argument == "--":
            problems.append(_stray(argument))
            continue
        name, equals, raw = argument[2:].partition("=")
        name = name.replace("-", "_")
        given: str | None = raw if equals else None
        if given is None and position < len(arguments) and not arguments[position].startswith("--"):
            given = arguments[position]
            position += 1
        result = _convert(name, given, root)
        if isinstance(result, Problem):
            problems.append(result)
        else:
            overrides.append(result)
    return overrides, problems


def apply(tree: dict[str, Any], overrides: Sequence[Override]) -> list[Problem]:
    """Put overrides into the tree of a config file; changes `tree`, returns what does not fit."""
    problems = []
    for override in overrides:
        *path, last = override.field.split(".")
        node: Any = tree
        try:
            for part in path:
                node = node[int(part)] if part.isdecimal() else node.setdefault(part, {})
            node[last] = override.value
        except (IndexError, TypeError, AttributeError, KeyError):
            problems.append(
                Problem(
                    COMMAND_LINE,
                    override.field,
                    json.dumps(override.value),
                    "there is no such table in the config file to set this in",
                    "count the tables of the array from 0, or add the table to the file",
                )
            )
    return problems


def unknown(source: str, dotted: str, value: Any, root: type[BaseModel] = Config) -> Problem:
    """The problem of a key that the schema does not have, with the nearest one that it has."""
    near = fields.nearest(dotted, root)
    remedy = f"did you mean {near}?" if near else f"see the schema in {root.__module__.replace('.', '/')}.py"
    return Problem(source, dotted, "" if value is None else str(value), "there is no such field", remedy)


def in_words(message: str) -> str:
    """A message of the parser, worded as the end of a sentence about the field."""
    message = message.replace("Input should be", "must be")
    return message[0].lower() + message[1:]


def _stray(argument: str) -> Problem:
    return Problem(
        COMMAND_LINE,
        "",
        repr(argument),
        "this belongs to no option",
        "write overrides as --section.field VALUE or --section.field=VALUE; quote a value with spaces",
    )


def _convert(name: str, raw: str | None, root: type[BaseModel]) -> Override | Problem:
    field = fields.find(name, root)
    if field is None:
        return unknown(COMMAND_LINE, name, raw, root)
    annotation = field.annotation
    if table := fields.section_of(annotation):
        names = ", ".join(f"--{name}.{inner}" for inner in table.model_fields)
        return Problem(COMMAND_LINE, name, raw or "", "this is a table, not a value", f"set one of {names}")
    if raw is None:
        if fields.is_bool(annotation):
            return Override(name, True)
        return Problem(COMMAND_LINE, name, "", "the value is missing", f"write --{name} VALUE")
    if raw.lower() in ("none", "null") and fields.is_optional(annotation):
        return Override(name, None)
    try:
        return Override(name, _typed(annotation, raw))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        remedy = f"give an allowed value. {fields.describe(name, root)}".strip()
        return Problem(COMMAND_LINE, name, raw, in_words(reason), remedy)


def _typed(annotation: Any, raw: str) -> Any:
    """`raw` as the annotation's type, in JSON types."""
    element = fields.element_of(annotation)
    if element is None:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        return adapter.dump_python(adapter.validate_strings(raw), mode="json")
    if raw.lstrip().startswith("["):
        adapter = TypeAdapter(annotation)
        items = tomllib.loads(f"value = {raw}")["value"]
        return json.loads(adapter.dump_json(adapter.validate_json(json.dumps(items)), exclude_unset=True))
    return [_typed(element, item.strip()) for item in raw.split(",")] if raw.strip() else []
