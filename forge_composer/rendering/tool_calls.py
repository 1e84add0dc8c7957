"""Qwen's tool-call format, read from sampled text.

A turn may hold reasoning, plain text and calls, in this order::

    <think>
    ...
    </think>

    text
    <tool_call>
    {"name": "read", "arguments": {"path": "a.py"}}
    </tool_call>

The JSON object is read by a JSON decoder from where it starts, so a `</tool_call>` inside one of its
strings does not end it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from forge_composer.types import Message, ParsedAction, ToolCall

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

MAX_DEPTH = 64
"""Deepest nesting of a call's arguments."""

_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _MalformedCallError(ValueError):
    """A tool call that does not parse; the message goes to the policy."""


def parse_action(text: str, *, id_prefix: str = "call") -> ParsedAction:
    """Read one assistant turn. Never raises.

    Args:
        text: the decoded completion without its turn-end token.
        id_prefix: calls get the ids `{id_prefix}_0`, `{id_prefix}_1`, ...; formats that want ids unique
            over an episode need a prefix per turn.

    Returns:
        The action. `text` is what stands outside of reasoning and calls, stripped. At the first malformed
        call parsing stops: `error` says what is wrong, `text` keeps the rest verbatim, `tool_calls` holds
        the valid calls before it.
    """
    reasoning, body, error = _split_reasoning(text)
    if error is not None:
        return ParsedAction(text=body.strip(), reasoning=reasoning, error=error)
    said: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := body.find(CALL_OPEN, position)) >= 0:
        said.append(body[position:start])
        position = start
        try:
            name, arguments, position = _read_call(body, start + len(CALL_OPEN))
        except _MalformedCallError as problem:
            error = f"tool call {len(calls) + 1}: {problem}"
            break
        calls.append(ToolCall(f"{id_prefix}_{len(calls)}", name, arguments))
    said.append(body[position:])
    outside = "\n".join(piece for part in said if (piece := part.strip()))
    return ParsedAction(text=outside, tool_calls=tuple(calls), reasoning=reasoning, error=error)


def to_message(action: ParsedAction) -> Message:
    """The action as an assistant message for the chat template.

    Calls are in the OpenAI shape with one difference that chat templates want: `arguments` is the JSON
    object itself and not its text.
    """
    message = Message(role="assistant", content=action.text)
    if action.reasoning:
        message["reasoning_content"] = action.reasoning
    if action.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in action.tool_calls
        ]
    return message


def _split_reasoning(text: str) -> tuple[str, str, str | None]:
    """Reasoning, the rest, and an error if the reasoning does not end.

    A template whose generation prompt opens the reasoning leaves only `</think>` in the sampled text; it
    counts as long as no call comes before it.
    """
    lead = _SPACE.match(text)
    start = lead.end() if lead else 0
    opened = text.startswith(THINK_OPEN, start)
    if opened:
        start += len(THINK_OPEN)
    end = text.find(THINK_CLOSE, start)
    if opened and end < 0:
        return text[start:].strip(), "", f"the reasoning does not end: {THINK_CLOSE} is missing"
    first_call = text.find(CALL_OPEN)
    if end < 0 or (not opened and 0 <= first_call < end):
        return "", text, None
    return text[start:end].strip(), text[end + len(THINK_CLOSE) :], None


def _read_call(body: str, start: int) -> tuple[str, dict[str, Any], int]:
    """Name, arguments and the position after `</tool_call>` of the call whose JSON begins at `start`."""
    begin = _skip_space(body, start)
    try:
        value, end = _DECODER.raw_decode(body, begin)
    except _MalformedCallError:
        raise
    except json.JSONDecodeError as problem:
        where = problem.pos - begin
        raise _MalformedCallError(f"not valid JSON ({problem.msg} at character {where})") from None
    except RecursionError:
        raise _MalformedCallError(f"the JSON is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:
        raise _MalformedCallError("the JSON holds an integer with too many digits") from None
    name, arguments = _check_call(value)
    end = _skip_space(body, end)
    if not body.startswith(CALL_CLOSE, end):
        raise _MalformedCallError(f"{CALL_CLOSE} is missing after the JSON object")
    return name, arguments, end + len(CALL_CLOSE)


def _check_call(value: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise _MalformedCallError('expected a JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _MalformedCallError('"name" is missing or not a string')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise _MalformedCallError('"arguments" is not a JSON object')
    _check_values(name, arguments)
    return name, arguments


def _check_values(*values: Any) -> None:
    """Refuse what later stages cannot carry: half surrogate pairs (no UTF-8) and deep nesting."""
    waiting = [(value, 0) for value in values]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _MalformedCallError(f"the JSON is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, str) and _SURROGATE.search(value):
            raise _MalformedCallError("a string holds half of a surrogate pair")
        if isinstance(value, dict):
            waiting += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _MalformedCallError(f"the number {digits[:32]} is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise _MalformedCallError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite_float, parse_constant=_no_constant)
