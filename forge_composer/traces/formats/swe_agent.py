"""SWE-agent's `.traj` files: one JSON document a run.

Layouts, told apart by what is there:

- `query`, since 1.1.0: each entry of `trajectory` has the exact input of the model as `query`.
- `history`, before: the messages are in `history` alone (1.0 repeats them in `messages` of each entry).
- `messages`, mini-swe-agent: a list of messages and `trajectory_format`, no entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_composer.traces.atif import TraceFormatError
from forge_composer.traces.formats.conversation import Conversation, Step
from forge_composer.traces.formats.fields import Fields
from forge_composer.traces.formats.messages import action_of, read_messages, split_steps, written
from forge_composer.types import Message

NAME = "swe_agent"
MINI_FORMAT = "mini-swe-agent-1"

Read = tuple[Message, dict[str, Any]]


def read_swe_agent(document: Mapping[str, Any]) -> Conversation:
    """One run.

    Raises:
        TraceFormatError: neither entries with `query`, nor a history, nor messages.
    """
    warnings: list[str] = []
    fields = Fields(document, "", warnings)
    conversation = Conversation(format=NAME, start=[], steps=[], warnings=warnings)
    if fields.peek("trajectory_format", str) is not None or not fields.has("trajectory"):
        _read_mini(conversation, fields)
    else:
        _read_entries(conversation, fields)
    conversation.task_id = fields.peek("instance_id", str)
    conversation.extra |= fields.rest()
    return conversation


def _read_mini(conversation: Conversation, fields: Fields) -> None:
    values = fields.need("messages", list)
    if values and isinstance(values[-1], Mapping) and values[-1].get("role") == "exit":
        values = values[:-1]  # says how the run ended; `info` says it too
    messages = read_messages(values, "messages", conversation.warnings)
    conversation.start, conversation.steps = split_steps(messages, [False] * len(messages))
    conversation.extra["layout"] = "messages"


def _read_entries(conversation: Conversation, fields: Fields) -> None:
    warnings = conversation.warnings
    values = fields.need("trajectory", list)
    entries = [Fields(value, f"trajectory[{number}]", warnings) for number, value in enumerate(values)]
    history = read_messages(fields.take("history", list) or [], "history", warnings)
    demonstration = [extra.get("is_demo") is True for _, extra in history]
    if entries and all(entry.peek("query", list) for entry in entries):
        acted = [item for item, demo in zip(history, demonstration, strict=True) if not demo]
        _from_queries(conversation, entries, acted)
        conversation.extra["layout"] = "query"
    elif history:
        conversation.start, conversation.steps = split_steps(history, demonstration)
        _attach(conversation, entries)
        conversation.extra["layout"] = "history"
    else:
        raise TraceFormatError(
            "trajectory: an entry has no `query`, and there is no `history`: the model's input is not known"
        )


def _from_queries(conversation: Conversation, entries: list[Fields], history: list[Read]) -> None:
    """An entry's input is its query; its message is in the next query, that of the last in the history."""
    queries = []
    for entry in entries:
        read = read_messages(entry.take("query", list) or [], entry.place("query"), conversation.warnings)
        queries.append([message for message, _ in read])
    conversation.start = queries[0]
    turns = _Turns(history)
    for number, entry in enumerate(entries):
        response = entry.peek("response", str) or ""
        from_history = turns.find(response)
        following = queries[number + 1][len(queries[number]) :] if number + 1 < len(entries) else []
        if following and following[0]["role"] == "assistant":
            message, after = following[0], following[1:]
        elif from_history is not None:
            message, after = from_history
        else:
            message, after = _from_entry(entry, response)
        step = Step(message, action_of(message), after)
        conversation.steps.append(step)
        if queries[number] != conversation.preceding(number):
            step.context = queries[number]
        step.extra = entry.rest()


class _Turns:
    """The assistant's messages of a history, found in order by their text."""

    def __init__(self, history: Sequence[Read]) -> None:
        self._messages = [message for message, _ in history]
        self._next = 0

    def find(self, response: str) -> tuple[Message, list[Message]] | None:
        """The next message with this text, and what follows it up to the next turn."""
        for place in range(self._next, len(self._messages)):
            message = self._messages[place]
            if message["role"] == "assistant" and message["content"] == response:
                self._next = place + 1
                return message, list(self._until_turn(place + 1))
        return None

    def _until_turn(self, place: int) -> Iterator[Message]:
        while place < len(self._messages) and self._messages[place]["role"] != "assistant":
            yield self._messages[place]
            place += 1


def _from_entry(entry: Fields, response: str) -> tuple[Message, list[Message]]:
    observation = entry.peek("observation", str)
    after = [Message(role="user", content=observation)] if observation else []
    return Message(role="assistant", content=response), after


def _attach(conversation: Conversation, entries: list[Fields]) -> None:
    """Give each step what its entry says, if there is one entry a step."""
    for step in conversation.steps:
        step.extra = {}
    if len(entries) != len(conversation.steps):
        conversation.warnings.append(
            f"trajectory: {len(entries)} entries for {len(conversation.steps)} turns of the history; left out"
        )
        return
    for entry, step in zip(entries, conversation.steps, strict=True):
        entry.take("messages", list)  # the history up to here, once more
        step.extra = entry.rest()


def write_swe_agent(conversation: Conversation, *, layout: str | None = None) -> dict[str, Any]:
    """One run. Token ids, rewards and tools have no place in the format and are lost.

    Args:
        conversation: what to write.
        layout: `query`, `history` or `messages` (see the module); None: the source's, or `query`.

    Raises:
        ValueError: there is no such layout.
    """
    same = conversation.format == NAME
    extra = dict(conversation.extra) if same else {}
    source = extra.pop("layout", "query")
    layout = layout or source
    if layout not in ("query", "history", "messages"):
        raise ValueError(f"layout {layout!r}: there are query, history and messages")
    if layout != source:
        extra.pop("trajectory_format", None)
    if layout == "messages":
        return {"info": {}, "messages": _mini(conversation, same), "trajectory_format": MINI_FORMAT} | extra
    entries = [_entry(conversation, number, same) for number in range(len(conversation.steps))]
    if layout == "query":
        for number, entry in enumerate(entries):
            entry["query"] = [_item(message) for message in conversation.state(number)]
    return {
        "environment": "main",
        "trajectory": entries,
        "history": _history(conversation),
        "info": {},
    } | extra


def _mini(conversation: Conversation, same: bool) -> list[dict[str, Any]]:
    messages = [written(message) for message in conversation.start]
    for step in conversation.steps:
        messages.append(written(step.message) | (step.extra if same else {}))
        messages += [written(message) for message in step.after]
    return messages


def _entry(conversation: Conversation, number: int, same: bool) -> dict[str, Any]:
    step = conversation.steps[number]
    if same and "response" in step.extra:
        return dict(step.extra)
    text = step.message["content"]
    return {
        "action": _command(step),
        "observation": "\n".join(message["content"] for message in step.after),
        "response": text,
        "thought": text,
        "state": {},
        "execution_time": 0.0,
        "extra_info": {},
    }


def _command(step: Step) -> str:
    """The first call as one line: its only text argument, as shells take it, or name and arguments."""
    if not step.action.tool_calls:
        return step.action.text
    call = step.action.tool_calls[0]
    values = list(call.arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}"


def _history(conversation: Conversation) -> list[dict[str, Any]]:
    history = [_item(message, demonstration=message["role"] == "assistant") for message in conversation.start]
    for step in conversation.steps:
        history.append(_item(step.message) | {"action": _command(step), "thought": step.message["content"]})
        history += [_item(message, demonstration=message["role"] == "assistant") for message in step.after]
    return history


def _item(message: Message, *, demonstration: bool = False) -> dict[str, Any]:
    kind = {"system": "system_prompt", "assistant": "action"}.get(message["role"], "observation")
    item = written(message) | {"agent": "main", "message_type": kind}
    if "tool_call_id" in item:
        item["tool_call_ids"] = [item.pop("tool_call_id")]
    return item | ({"is_demo": True} if demonstration else {})
