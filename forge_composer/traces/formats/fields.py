"""Taking fields out of JSON that others wrote: the wrong type is an error or a warning, with its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from forge_composer.traces.atif import TraceFormatError

Value = TypeVar("Value")
_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


class Fields:
    """One JSON object on its way into a record. Fields are taken out; what is left over can be kept.

    A field that is null counts as missing.
    """

    def __init__(self, value: Any, where: str, warnings: list[str]) -> None:
        """Start on an object.

        Args:
            value: the object.
            where: its place in the document, `steps[3].metrics`; empty for the document itself.
            warnings: gets what is passed over.

        Raises:
            TraceFormatError: the value is no JSON object.
        """
        if not isinstance(value, Mapping):
            raise TraceFormatError(
                f"{where or 'the document'}: expected a JSON object, got {described(value)}"
            )
        self._left = {key: item for key, item in value.items() if item is not None}
        self._where = where
        self._warnings = warnings

    def place(self, key: str) -> str:
        """The place of a field in the document."""
        return f"{self._where}.{key}" if self._where else key

    def warn(self, key: str, problem: str) -> None:
        """Note that a field was passed over or mended."""
        self._warnings.append(f"{self.place(key)}: {problem}")

    def has(self, key: str) -> bool:
        """True if the field is still there."""
        return key in self._left

    def peek(self, key: str, kind: type[Value]) -> Value | None:
        """The field, left where it is; None if it is missing or of another type."""
        value = self._left.get(key)
        return _as(value, kind) if value is not None else None

    def take(self, key: str, kind: type[Value]) -> Value | None:
        """Take the field out; None if it is missing, and with a warning if it has another type."""
        value = self._left.pop(key, None)
        if value is None:
            return None
        found = _as(value, kind)
        if found is None:
            self.warn(key, f"expected {_name(kind)}, got {described(value)}; left out")
        return found

    def need(self, key: str, kind: type[Value]) -> Value:
        """Take the field out.

        Raises:
            TraceFormatError: it is missing or has another type.
        """
        value = self._left.pop(key, None)
        if value is None:
            raise TraceFormatError(f"{self.place(key)}: the field is missing; expected {_name(kind)}")
        found = _as(value, kind)
        if found is None:
            raise TraceFormatError(f"{self.place(key)}: expected {_name(kind)}, got {described(value)}")
        return found

    def sub(self, key: str) -> Fields:
        """Take an object out, to go on in it; an empty one if it is missing or of another type."""
        return Fields(self.take(key, dict) or {}, self.place(key), self._warnings)

    def rest(self) -> dict[str, Any]:
        """What nobody has taken."""
        return dict(self._left)


def _as(value: Any, kind: type[Value]) -> Value | None:
    """The value as `kind`, or None. A whole number is a number, true is none."""
    if isinstance(value, bool) and kind is not bool:
        return None
    if kind is float and isinstance(value, int):
        try:
            return kind(value)  # type: ignore[call-arg]
        except OverflowError:
            return None
    return value if isinstance(value, kind) else None


def _name(kind: type) -> str:
    return _KINDS.get(kind, "a JSON object")


def described(value: Any) -> str:
    """A value for a message: its type, and itself if it is short."""
    if isinstance(value, Mapping):
        return "an object"
    name = _KINDS.get(type(value), "null" if value is None else "a value")
    shown = "" if isinstance(value, list) or value is None else f" ({str(value)[:40]!r})"
    return name + shown


def ids_of(values: list[Any] | None) -> list[int] | None:
    """The list, if it holds whole numbers only."""
    if values is None or not all(type(value) is int for value in values):
        return None
    return values


def numbers_of(values: list[Any] | None) -> list[float] | None:
    """The list as floats, if it holds finite numbers only."""
    if values is None or not all(type(value) in (int, float) for value in values):
        return None
    try:
        numbers = [float(value) for value in values]
    except OverflowError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def parse_json(text: str) -> Any:
    """JSON as producers write it: NaN and infinities, which JSON lacks, become null.

    Raises:
        TraceFormatError: the text is not JSON, is nested too deeply, or holds an absurd number.
    """
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise TraceFormatError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise TraceFormatError("not read: the JSON is nested too deeply") from None
    except ValueError as error:
        raise TraceFormatError(f"not read: {error}") from None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None
