"""A preference pair as a JSON object, and back, without loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from forge_composer.preferences.records import ChosenSource, PairTokens, PreferencePair, TeacherVote
from forge_composer.types import Message, ParsedAction, ToolCall

FORMAT = "forge_composer.preference_pair/1"
"""Value of `format` in each object; the number goes up when older readers cannot read it."""

_FLOAT = "$float"
"""Key of the object that stands for a float which JSON lacks."""
_ESCAPED = "$object"
"""Key of the object that holds one which would read as something else."""

Value = TypeVar("Value")


class PairFormatError(ValueError):
    """A JSON object that is no preference pair; the message names the field."""


def pair_to_json(pair: PreferencePair) -> dict[str, Any]:
    """The pair in JSON's types."""
    document = {
        "format": FORMAT,
        "trace": pair.trace,
        "step": pair.step,
        "messages": pair.messages,
        "tools": pair.tools,
        "chosen": _action_to_json(pair.chosen),
        "rejected": _action_to_json(pair.rejected),
        "source": pair.source,
        "families": list(pair.families),
        "weight": pair.weight,
        "votes": [_vote_to_json(vote) for vote in pair.votes],
        "cost_usd": pair.cost_usd,
        "tokens": _tokens_to_json(pair.tokens),
        "version": pair.version,
        "temperature": pair.temperature,
        "outcome": pair.outcome,
        "info": pair.info,
    }
    return cast("dict[str, Any]", _escaped(document))


def dumps(document: Mapping[str, Any]) -> bytes:
    """One line of JSON, without its end. Half a surrogate pair, which UTF-8 lacks, is written as an escape.

    Raises:
        TypeError: a value is not JSON.
    """
    options: dict[str, Any] = {"allow_nan": False, "separators": (",", ":")}
    try:
        return json.dumps(document, ensure_ascii=False, **options).encode()
    except UnicodeEncodeError:
        return json.dumps(document, **options).encode()


def pair_from_json(document: Any) -> PreferencePair:
    """The pair of a JSON object.

    Raises:
        PairFormatError: it is of another format or version, or a field is missing or wrong.
    """
    if not isinstance(document, dict):
        raise PairFormatError(f"expected a JSON object, got {type(document).__name__}")
    if document.get("format") != FORMAT:
        raise PairFormatError(f"format: expected {FORMAT!r}, got {document.get('format')!r:.80}")
    fields = cast("dict[str, Any]", _restored(document))
    return PreferencePair(
        trace=_take(fields, "trace", _of(str)),
        step=_take(fields, "step", _of(int)),
        messages=cast("list[Message]", _take(fields, "messages", _objects)),
        tools=_take(fields, "tools", _objects),
        chosen=_take(fields, "chosen", _action_from_json),
        rejected=_take(fields, "rejected", _action_from_json),
        source=_take(fields, "source", _source),
        families=tuple(_take(fields, "families", _list_of(str))),
        weight=_take(fields, "weight", _number),
        votes=tuple(_take(fields, "votes", lambda votes: list(map(_vote_from_json, _objects(votes))))),
        cost_usd=_take(fields, "cost_usd", _number),
        tokens=_take(fields, "tokens", _tokens_from_json),
        version=_take(fields, "version", _of(int)),
        temperature=_take(fields, "temperature", _number),
        outcome=_take(fields, "outcome", _outcome),
        info=_take(fields, "info", _of(dict)),
    )


# -- parts ------------------------------------------------------------------------------------------


def _action_to_json(action: ParsedAction) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in action.tool_calls]
    return {
        "text": action.text,
        "tool_calls": calls,
        "reasoning": action.reasoning,
        "error": action.error,
    }


def _action_from_json(value: Any) -> ParsedAction:
    fields = _of(dict)(value)
    calls = tuple(
        ToolCall(
            _take(call, "id", _of(str)), _take(call, "name", _of(str)), _take(call, "arguments", _of(dict))
        )
        for call in _take(fields, "tool_calls", _objects)
    )
    error = _take(fields, "error", _or_none(_of(str)))
    return ParsedAction(_take(fields, "text", _of(str)), calls, _take(fields, "reasoning", _of(str)), error)


def _vote_to_json(vote: TeacherVote) -> dict[str, Any]:
    return {
        "teacher": vote.teacher,
        "family": vote.family,
        "kind": vote.kind,
        "action": vote.action,
        "cost_usd": vote.cost_usd,
        "latency_s": vote.latency_s,
        "sample": vote.sample,
        "attempts": vote.attempts,
        "cached": vote.cached,
    }


def _vote_from_json(fields: dict[str, Any]) -> TeacherVote:
    return TeacherVote(
        teacher=_take(fields, "teacher", _of(str)),
        family=_take(fields, "family", _of(str)),
        kind=_take(fields, "kind", _of(str)),
        action=_take(fields, "action", _or_none(_of(str))),
        cost_usd=_take(fields, "cost_usd", _number),
        latency_s=_take(fields, "latency_s", _number),
        sample=_take(fields, "sample", _of(int)),
        attempts=_take(fields, "attempts", _of(int)),
        cached=_take(fields, "cached", _of(bool)),
    )


def _tokens_to_json(tokens: PairTokens | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {
        "prompt_ids": list(tokens.prompt_ids),
        "chosen_ids": list(tokens.chosen_ids),
        "rejected_ids": list(tokens.rejected_ids),
    }


def _tokens_from_json(value: Any) -> PairTokens | None:
    if value is None:
        return None
    fields = _of(dict)(value)
    ids = _list_of(int)
    return PairTokens(
        tuple(_take(fields, "prompt_ids", ids)),
        tuple(_take(fields, "chosen_ids", ids)),
        tuple(_take(fields, "rejected_ids", ids)),
    )


# -- checked reading --------------------------------------------------------------------------------


def _take(fields: Mapping[str, Any], key: str, read: Callable[[Any], Value]) -> Value:
    """A field that has to be there. Raises: PairFormatError, with the field's place."""
    if key not in fields:
        raise PairFormatError(f"{key}: the field is missing")
    try:
        return read(fields[key])
    except PairFormatError as error:
        inner = str(error)
        inside = inner.partition(":")[0].replace(".", "").isidentifier()
        raise PairFormatError(f"{key}.{inner}" if inside else f"{key}: {inner}") from None


def _of(kind: type[Value]) -> Callable[[Any], Value]:
    def read(value: Any) -> Value:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise PairFormatError(f"expected {_NAMES[kind]}, got {value!r:.80}")
        return value

    return read


_NAMES: dict[type, str] = {
    str: "a string", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"
}  # fmt: skip


def _or_none(read: Callable[[Any], Value]) -> Callable[[Any], Value | None]:
    return lambda value: None if value is None else read(value)


def _list_of(kind: type[Value]) -> Callable[[Any], list[Value]]:
    one = _of(kind)
    return lambda value: [one(item) for item in _of(list)(value)]


def _objects(value: Any) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", _list_of(dict)(value))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PairFormatError(f"expected a number, got {value!r:.80}")
    return float(value)


def _source(value: Any) -> ChosenSource:
    if value not in ("student", "rendered"):
        raise PairFormatError(f'expected "student" or "rendered", got {value!r:.80}')
    return cast("ChosenSource", value)


def _outcome(value: Any) -> dict[str, float] | None:
    if value is None:
        return None
    return {key: _number(item) for key, item in _of(dict)(value).items()}


# -- floats that JSON lacks -------------------------------------------------------------------------


def _escaped(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        inner = {key: _escaped(item) for key, item in value.items()}
        return {_ESCAPED: inner} if len(inner) == 1 and inner.keys() <= {_FLOAT, _ESCAPED} else inner
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            try:
                return float(value[_FLOAT])
            except (TypeError, ValueError):
                raise PairFormatError(f"{_FLOAT}: expected a number, got {value[_FLOAT]!r:.80}") from None
        if value.keys() == {_ESCAPED} and isinstance(value[_ESCAPED], dict):
            value = value[_ESCAPED]
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
