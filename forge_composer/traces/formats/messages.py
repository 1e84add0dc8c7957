"""Chat messages in the shapes that producers write them, to and from the one shape of `types.Message`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forge_composer.traces.atif import TraceFormatError
from forge_composer.traces.formats.conversation import Step
from forge_composer.traces.formats.fields import Fields, described, parse_json
from forge_composer.types import Message, ParsedAction, ToolCall

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_messages(
    values: Sequence[Any], where: str, warnings: list[str]
) -> list[tuple[Message, dict[str, Any]]]:
    """Messages with what else their objects hold; results without an id are given that of their call.

    Raises:
        TraceFormatError: a message is no object or has no known role.
    """
    read = [read_message(value, f"{where}[{number}]", warnings) for number, value in enumerate(values)]
    link_results([message for message, _ in read], where, warnings)
    return read


def read_message(value: Any, where: str, warnings: list[str]) -> tuple[Message, dict[str, Any]]:
    """One message, and what else its object holds.

    Raises:
        TraceFormatError: it is no object, or has no known role.
    """
    fields = Fields(value, where, warnings)
    role = fields.need("role", str)
    if role not in _ROLES:
        raise TraceFormatError(f"{fields.place('role')}: {role[:40]!r} is none of {', '.join(_ROLES)}")
    message = Message(role=_ROLES[role], content=_content(fields))
    if reasoning := fields.take("reasoning_content", str) or fields.take("reasoning", str):
        message["reasoning_content"] = reasoning
    calls = [_call(call, fields, number) for number, call in enumerate(fields.take("tool_calls", list) or [])]
    if fields.has("function_call"):  # what tool calls were before there were several
        calls.append(_call({"function": fields.take("function_call", dict)}, fields, len(calls)))
    if calls:
        message["tool_calls"] = calls
    if (identity := fields.take("tool_call_id", str)) is not None:
        message["tool_call_id"] = identity
    if (name := fields.take("name", str)) is not None:
        message["name"] = name
    return message, fields.rest()


def _content(fields: Fields) -> str:
    if fields.peek("content", list) is None:
        return fields.take("content", str) or ""
    return text_of_parts(fields.take("content", list) or [], fields)


def text_of_parts(parts: Sequence[Any], fields: Fields, key: str = "content") -> str:
    """The text parts of a content, one below the other; other parts are named and not kept."""
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else None
            kind = kind if isinstance(kind, str) else "unknown"
            fields.warn(f"{key}[{number}]", f"a part of type {kind[:40]!r} is no text; left out")
            texts.append(f"[{kind[:40]}]")
    return "\n".join(texts)


def _call(value: Any, holder: Fields, number: int) -> dict[str, Any]:
    """A call in the OpenAI shape; `value` may be flat (`name`, `arguments`) or the JSON text of either."""
    where = holder.place(f"tool_calls[{number}]")
    if isinstance(value, str):
        value = parse_json(value)
    fields = Fields(value, where, [])
    function = fields.sub("function") if fields.has("function") else fields
    name = function.take("name", str)
    if name is None:
        raise TraceFormatError(f"{where}.name: the field is missing or not a string")
    arguments = function.rest().get("arguments", {})
    if isinstance(arguments, str):
        try:
            decoded = parse_json(arguments) if arguments.strip() else {}
        except TraceFormatError:
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    elif not isinstance(arguments, dict):
        raise TraceFormatError(
            f"{where}.arguments: expected an object or its text, got {described(arguments)}"
        )
    identity = fields.take("id", str) or re.sub(r"\W+", "_", where).strip("_")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def link_results(messages: Sequence[Message], where: str, warnings: list[str]) -> None:
    """Give a tool message without an id that of its call: results come in the order of the calls."""
    waiting: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            waiting = list(message.get("tool_calls", []))
        elif message["role"] == "tool":
            identity = message.get("tool_call_id")
            if identity is None and waiting:
                message["tool_call_id"] = identity = waiting[0]["id"]
            elif identity is not None and identity not in [call["id"] for call in waiting]:
                warnings.append(
                    f"{where}[{number}].tool_call_id: no call before it has the id {identity[:40]!r}"
                )
            waiting = [call for call in waiting if call["id"] != identity]


def action_of(message: Message) -> ParsedAction:
    """What an assistant message does. At the first call whose arguments do not parse, `error` says so."""
    calls: list[ToolCall] = []
    error: str | None = None
    for number, call in enumerate(message.get("tool_calls", []), start=1):
        function = call["function"]
        if not isinstance(function["arguments"], dict):
            error = f"tool call {number}: the arguments are not a JSON object"
            break
        calls.append(ToolCall(call["id"], function["name"], function["arguments"]))
    return ParsedAction(message["content"], tuple(calls), message.get("reasoning_content", ""), error)


def split_steps(
    messages: Iterable[tuple[Message, dict[str, Any]]], is_context: Sequence[bool]
) -> tuple[list[Message], list[Step]]:
    """The messages before the first step, and the steps; where `is_context` is true a message opens none."""
    start: list[Message] = []
    steps: list[Step] = []
    for (message, extra), context in zip(messages, is_context, strict=True):
        if message["role"] == "assistant" and not context:
            steps.append(Step(message, action_of(message), extra=extra))
        else:
            (steps[-1].after if steps else start).append(message)
    return start, steps


def read_tools(values: Sequence[Any], where: str, warnings: list[str]) -> list[dict[str, Any]]:
    """Tools in the OpenAI shape, from that shape or from flat ones (`name`, `description`, `parameters`)."""
    tools = []
    for number, value in enumerate(values):
        function = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            warnings.append(f"{where}[{number}]: a tool without a name; left out")
            continue
        kept = {key: item for key, item in function.items() if item is not None and key != "type"}
        tools.append({"type": "function", "function": kept})
    return tools


def written(message: Message) -> dict[str, Any]:
    """A message as the chat-completions API takes it: arguments as text, null beside calls for no text."""
    result: dict[str, Any] = dict(message)
    if "tool_calls" in message:
        result["content"] = message["content"] or None
        result["tool_calls"] = [
            call | {"function": {"name": call["function"]["name"], "arguments": _text(call)}}
            for call in message["tool_calls"]
        ]
    return result


def flat_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as `id`, `name`, `arguments` (text)."""
    return {"id": call["id"], "name": call["function"]["name"], "arguments": _text(call)}


def _text(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
