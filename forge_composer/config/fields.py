"""Looking fields up in a schema by their dotted names; in that of a run, unless another root is given."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from forge_composer.config.schema import Config


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The table that an annotation stands for, or None for a plain value."""
    for kind in _alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def array_section_of(annotation: Any) -> type[BaseModel] | None:
    """The table that an array of tables holds, or None."""
    element = element_of(annotation)
    return None if element is None else section_of(element)


def element_of(annotation: Any) -> Any:
    """The annotation of an array's elements; None if the value is no array."""
    for kind in _alternatives(annotation):
        if typing.get_origin(kind) is tuple:
            return typing.get_args(kind)[0]
    return None


def is_optional(annotation: Any) -> bool:
    """True if None is among the allowed values."""
    return type(None) in _alternatives(annotation)


def is_bool(annotation: Any) -> bool:
    """True for a switch."""
    return bool in _alternatives(annotation)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def find(dotted: str, root: type[BaseModel] = Config) -> FieldInfo | None:
    """The field of a dotted name (an index may stand where an array of tables is), or None."""
    parts = dotted.split(".")
    table: type[BaseModel] | None = root
    field: FieldInfo | None = None
    for part in parts:
        if field is not None and table is None and part.isdecimal():
            table = array_section_of(field.annotation)
            if table is not None:
                continue
        if table is None or part not in table.model_fields:
            return None
        field = table.model_fields[part]
        table = section_of(field.annotation)
    return None if parts[-1].isdecimal() else field


def leaves(table: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All plain fields (arrays of tables included) with their dotted names."""
    for name, field in table.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def nearest(dotted: str, root: type[BaseModel] = Config) -> str | None:
    """The existing name that an unknown one was probably meant to be.

    A right last part in the wrong table wins over a similar spelling; in an array of tables only its own
    fields are looked at.
    """
    array, index, rest = _in_array(dotted, root)
    if array is not None:
        inner = nearest(rest, array)
        return f"{index}.{inner}" if inner else None
    names = [name for name, _ in leaves(root)]
    tables = sorted({name.rpartition(".")[0] for name in names} - {""})
    candidates = names + tables
    parent, _, last = dotted.rpartition(".")
    same_last = [name for name in candidates if name.rpartition(".")[2] == last]
    if same_last:
        return max(same_last, key=lambda name: difflib.SequenceMatcher(None, name, dotted).ratio())
    siblings = [name for name in candidates if name.rpartition(".")[0] == parent]
    for pool in (siblings, candidates):
        if close := difflib.get_close_matches(dotted, pool, n=1, cutoff=0.6):
            return close[0]
    by_last = {name.rpartition(".")[2]: name for name in reversed(candidates)}
    if close := difflib.get_close_matches(last, by_last, n=1, cutoff=0.7):
        return by_last[close[0]]
    return None


def _in_array(dotted: str, root: type[BaseModel]) -> tuple[type[BaseModel] | None, str, str]:
    """The array of tables that a name reaches into: its table, the name up to the index, and what follows."""
    parts = dotted.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdecimal():
            index = ".".join(parts[: place + 1])
            field = find(".".join(parts[:place]), root)
            table = None if field is None else array_section_of(field.annotation)
            return table, index, ".".join(parts[place + 1 :])
    return None, "", dotted


def describe(dotted: str, root: type[BaseModel] = Config) -> str:
    """The documentation of a field in one line, empty if there is none."""
    field = find(dotted, root)
    text = (field.description or "") if field is not None else ""
    return " ".join(text.split())
