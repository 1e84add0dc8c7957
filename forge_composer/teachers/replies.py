"""What a teacher's reply is. Every reply has one kind; only those of kind `ok` hold an action to use.

A reply is data from outside: anything may be missing, of another type, nested without end or no Unicode, and
nothing here raises on it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from forge_composer.rendering.tool_calls import CALL_OPEN, MAX_DEPTH, parse_action
from forge_composer.teachers.kinds import ReplyKind, status_kind
from forge_composer.types import ParsedAction, ToolCall

_CUT_OFF = frozenset({"length", "max_tokens", "MAX_TOKENS"})
_SAYS_NO = re.compile(
    r"\W*(i[’']?m (very |so )?sorry|sorry|i apologi[sz]e)?\W*(but )?(as an ai[^.]{0,40}, )?"
    r"i (can[’']?t|cannot|can not|won[’']?t|will not|am (not able|unable) to|[’']m (not able|unable) to)\s+"
    r"(help|assist|comply|continue|fulfil|provide|do (that|this)|engage|support)",
    re.IGNORECASE,
)
_LONGEST_REFUSAL = 600


@dataclass(slots=True, frozen=True)
class Reading:
    """A reply, read: its kind, its action if the kind is `ok`, and the status that an error in it names."""

    kind: ReplyKind
    action: ParsedAction | None = None
    finish_reason: str = ""
    status: int | None = None


class _UnusableError(Exception):
    def __init__(self, kind: ReplyKind, status: int | None = None) -> None:
        super().__init__(kind)
        self.kind, self.status = kind, status


def decode(body: bytes) -> tuple[ReplyKind | None, Any]:
    """The JSON value of a body with status 200, or the kind of a body that holds none."""
    if not body.strip():
        return ReplyKind.EMPTY, None
    try:
        return None, json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return ReplyKind.TRUNCATED, None
    except (ValueError, RecursionError):  # an integer of thousands of digits; nesting without end
        return ReplyKind.WRONG_SCHEMA, None


def classify(body: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> Reading:
    """Read the first choice of a chat completion. Never raises.

    Args:
        body: the decoded reply, any JSON value.
        tools: tools that were offered, in OpenAI's form; None: names of tools are not checked.

    Returns:
        The reading. Calls come from `tool_calls`; where there are none, from the text, for endpoints that do
        not parse the calls of the model they serve.
    """
    try:
        choice = _first_choice(body)
        reason = choice.get("finish_reason")
        reason = reason if isinstance(reason, str) else ""
        action = _action(choice, reason, None if tools is None else _required(tools))
    except _UnusableError as problem:
        return Reading(problem.kind, status=problem.status)
    return Reading(ReplyKind.OK, action, reason)


def _first_choice(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise _UnusableError(ReplyKind.WRONG_SCHEMA)
    _raise_error(body.get("error"))
    if "choices" not in body:
        raise _UnusableError(ReplyKind.WRONG_SCHEMA)
    choices = body["choices"]
    if choices is None or choices == []:
        raise _UnusableError(ReplyKind.NO_CHOICE)
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise _UnusableError(ReplyKind.WRONG_SCHEMA)
    choice: dict[str, Any] = choices[0]
    _raise_error(choice.get("error"))
    if choice.get("finish_reason") == "error":
        raise _UnusableError(ReplyKind.SERVER_ERROR)
    return choice


def _raise_error(error: Any) -> None:
    """An error inside of a reply with status 200; routers put what went wrong behind them there."""
    if not error:
        return
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) == 3:
        code = int(code)
    if isinstance(code, int) and 300 <= code < 600:
        raise _UnusableError(status_kind(code), code)
    raise _UnusableError(ReplyKind.SERVER_ERROR)


def _action(choice: dict[str, Any], reason: str, required: dict[str, bool] | None) -> ParsedAction:
    message = choice.get("message")
    if reason == "content_filter":
        raise _UnusableError(ReplyKind.REFUSAL)
    if not isinstance(message, dict):
        raise _UnusableError(ReplyKind.WRONG_SCHEMA)
    if message.get("refusal"):
        raise _UnusableError(ReplyKind.REFUSAL)
    if reason in _CUT_OFF:
        raise _UnusableError(ReplyKind.LENGTH)
    said = parse_action(_text(message.get("content")), id_prefix="teacher")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, str) and _is_text(reasoning) else said.reasoning
    calls = _calls(message.get("tool_calls"), required)
    if not calls:
        if said.error is not None:  # its thinking does not end, or it wrote a call that does not parse
            raise _UnusableError(
                ReplyKind.BAD_ARGUMENTS if CALL_OPEN in said.error + said.text else ReplyKind.EMPTY
            )
        calls = said.tool_calls
        _check_known(calls, required)
    if not calls and not said.text:
        raise _UnusableError(ReplyKind.EMPTY)
    if not calls and len(said.text) <= _LONGEST_REFUSAL and _SAYS_NO.match(said.text):
        raise _UnusableError(ReplyKind.REFUSAL)
    return ParsedAction(said.text, calls, reasoning)


def _text(content: Any) -> str:
    """The text of a message's content: a string, nothing, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if any(part.get("type") == "refusal" for part in content):
            raise _UnusableError(ReplyKind.REFUSAL)
        parts = [part.get("text", "") for part in content if part.get("type") in ("text", "output_text")]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not _is_text(content):
        raise _UnusableError(ReplyKind.WRONG_SCHEMA)
    return str(content)


def _calls(value: Any, required: dict[str, bool] | None) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _UnusableError(ReplyKind.WRONG_SCHEMA)
    calls = []
    for number, entry in enumerate(value):
        function = entry.get("function") if isinstance(entry, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not _is_text(name) or not name:
            raise _UnusableError(ReplyKind.WRONG_SCHEMA)
        call_id = entry.get("id")
        if not _is_text(call_id) or not call_id:
            call_id = f"teacher_{number}"
        arguments = _arguments(function.get("arguments"), needed=(required or {}).get(name, False))
        calls.append(ToolCall(call_id, name, arguments))
    _check_known(calls, required)
    return tuple(calls)


def _check_known(calls: Sequence[ToolCall], required: dict[str, bool] | None) -> None:
    if required is not None and any(call.name not in required for call in calls):
        raise _UnusableError(ReplyKind.UNKNOWN_TOOL)


def _required(tools: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Names of the tools, and whether a call of each needs arguments."""
    known = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            known[function["name"]] = isinstance(parameters, Mapping) and bool(parameters.get("required"))
    return known


def _arguments(value: Any, *, needed: bool) -> dict[str, Any]:
    """The arguments of a call; some endpoints send the object itself, or nothing where there are none."""
    if value is None or value == "":
        if needed:
            raise _UnusableError(ReplyKind.BAD_ARGUMENTS)
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise _UnusableError(ReplyKind.BAD_ARGUMENTS) from None
    if not isinstance(value, dict) or not _can_be_carried(value):
        raise _UnusableError(ReplyKind.BAD_ARGUMENTS)
    return value


def _can_be_carried(value: Any, depth: int = 0) -> bool:
    """False for numbers beyond JSON, half surrogate pairs, and nesting deeper than the policy may write."""
    if depth > MAX_DEPTH:
        return False
    match value:
        case str():
            return _is_text(value)
        case float():
            return math.isfinite(value)
        case dict():
            return all(_is_text(key) and _can_be_carried(item, depth + 1) for key, item in value.items())
        case list():
            return all(_can_be_carried(item, depth + 1) for item in value)
    return True


def _is_text(value: Any) -> bool:
    """True for a string that UTF-8 can hold."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
