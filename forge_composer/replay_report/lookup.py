"""Fields of any table by their dotted names; `forge_composer.config.fields` does that for a run's config."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from forge_composer.config.fields import array_section_of, leaves, section_of


def find(root: type[BaseModel], dotted: str) -> FieldInfo | None:
    """The field of a dotted name (an index may stand where an array of tables is), or None."""
    table: type[BaseModel] | None = root
    field: FieldInfo | None = None
    for part in dotted.split("."):
        if field is not None and table is None and part.isdecimal():
            table, field = array_section_of(field.annotation), None
            if table is None:
                return None
            continue
        if table is None or part not in table.model_fields:
            return None
        field = table.model_fields[part]
        table = section_of(field.annotation)
    return field


def nearest(root: type[BaseModel], dotted: str) -> str | None:
    """The existing name that an unknown one was probably meant to be: of the same table if one is close, else
    a field of this name in another table."""
    table, parent = _table_of(root, dotted)
    last = dotted.rpartition(".")[2]
    close = difflib.get_close_matches(last, table.model_fields, n=1, cutoff=0.6)
    if close:
        return f"{parent}.{close[0]}" if parent else close[0]
    names = [name for name, _ in leaves(root)]
    same = [name for name in names if name.rpartition(".")[2] == last]
    return same[0] if same else next(iter(difflib.get_close_matches(dotted, names, n=1, cutoff=0.6)), None)


def describe(root: type[BaseModel], dotted: str) -> str:
    """The documentation of a field in one line, empty if there is none."""
    field = find(root, dotted)
    return " ".join((field.description or "").split()) if field is not None else ""


def _table_of(root: type[BaseModel], dotted: str) -> tuple[type[BaseModel], str]:
    """The innermost existing table around a name, and that table's own name."""
    table, known = root, ""
    around: Any = root
    for part in dotted.split(".")[:-1]:
        if part.isdecimal() and known:
            known += f".{part}"
            continue
        field = around.model_fields.get(part)
        inner = None if field is None else section_of(field.annotation) or array_section_of(field.annotation)
        if inner is None:
            break
        table = around = inner
        known = f"{known}.{part}" if known else part
    return table, known
