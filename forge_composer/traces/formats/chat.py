"""OpenAI chat JSONL: one `{"messages": [...], "tools": [...]}` a line, as fine-tuning takes it.

An assistant message of weight 0 is context, as in fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_composer.traces.atif import TraceFormatError
from forge_composer.traces.formats.conversation import Conversation
from forge_composer.traces.formats.fields import Fields
from forge_composer.traces.formats.messages import read_messages, read_tools, split_steps, written

NAME = "chat"


def read_chat(document: Mapping[str, Any]) -> Conversation:
    """One line.

    Raises:
        TraceFormatError: no messages, a message without a known role, a call without a name.
    """
    warnings: list[str] = []
    fields = Fields(document, "", warnings)
    values = fields.need("messages", list)
    if not values:
        raise TraceFormatError("messages: there is none")
    messages = read_messages(values, "messages", warnings)
    tools = read_tools(fields.take("tools", list) or fields.take("functions", list) or [], "tools", warnings)
    start, steps = split_steps(messages, [extra.get("weight") == 0 for _, extra in messages])
    return Conversation(
        format=NAME,
        start=start,
        steps=steps,
        tools=tools,
        trace_id=fields.peek("id", str) or "",
        model=fields.peek("model", str),
        reward=fields.peek("reward", float),
        extra=fields.rest(),
        warnings=warnings,
    )


def write_chat(conversation: Conversation) -> dict[str, Any]:
    """One line. Context is told by weight 0; prompts that differ from the messages before them are lost."""
    same = conversation.format == NAME
    messages = [_context(message) for message in conversation.start]
    for step in conversation.steps:
        messages.append(written(step.message) | (step.extra if same else {}))
        messages += [_context(message) for message in step.after]
    document: dict[str, Any] = {"messages": messages}
    if conversation.tools:
        document["tools"] = conversation.tools
    return document | (conversation.extra if same else {})


def _context(message: Any) -> dict[str, Any]:
    return written(message) | ({"weight": 0} if message["role"] == "assistant" else {})
