"""Replayed steps out of replies as they come over the wire: bodies are read by the client's own reader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.replay import ReplayedStep, replayed_step
from forge_composer.preferences.steps import StepState
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.teachers.client import TeacherReply
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.replies import classify
from forge_composer.teachers.requests import TeacherRequest
from forge_composer.types import Message, ParsedAction, ToolCall

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("read", "write_body", "run_tests", "submit")
]
START = [Message(role="system", content="You fix code."), Message(role="user", content="Fix add.")]
DEAD = ReplyKind.CONNECTION


def calling(name: str, **arguments: Any) -> ParsedAction:
    return ParsedAction("", (ToolCall("call_0_0", name, arguments),))


def state(action: ParsedAction, step: int = 0, trace: str = "trace", **fields: Any) -> StepState:
    return StepState(trace, step, list(fields.pop("messages", START)), TOOLS, action, **fields)


def token_state(renderer: ChatRenderer, said: str, *, end: bool = True, **fields: Any) -> StepState:
    """A step whose tokens are the student's words, as sampled."""
    ids = renderer.tokenizer.encode(said, add_special_tokens=False)
    return state(
        parse_action(renderer.decode(ids)),
        prompt_ids=tuple(renderer.initial_ids(START, TOOLS)),
        completion_ids=(*ids, *renderer.turn_end_ids[:1]) if end else tuple(ids),
        **fields,
    )


def body(name: str, arguments: str | None, content: Any = None) -> dict[str, Any]:
    """A chat completion with one call, its arguments as JSON text; without arguments one of text."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if arguments is not None:
        function = {"name": name, "arguments": arguments}
        message["tool_calls"] = [{"id": "x", "type": "function", "function": function}]
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def reply(
    at: StepState, teacher: str, family: str, answer: Any, *, sample: int = 0, cost: float = 0.01
) -> TeacherReply:
    """A teacher's reply: a body, an action, or the kind of a failure."""
    request = TeacherRequest(at.trace, str(at.step), at.messages, at.tools, sample)
    if isinstance(answer, ReplyKind):
        return TeacherReply(teacher, family, request, answer)
    if isinstance(answer, ParsedAction):
        return TeacherReply(teacher, family, request, ReplyKind.OK, answer, cost, 0.5, 1)
    reading = classify(answer, at.tools)
    return TeacherReply(teacher, family, request, reading.kind, reading.action, cost, 0.5, 1)


def replayed(
    at: StepState,
    answers: Sequence[Any],
    config: ReplayConfig | None = None,
    *,
    families: str | None = None,
) -> ReplayedStep:
    """One reply a teacher; a letter of `families` each (default: all different)."""
    names = families or "ABCDEFGH"[: len(answers)]
    replies = [reply(at, f"t{number}", names[number], answer) for number, answer in enumerate(answers)]
    return replayed_step(at, replies, config or ReplayConfig())


def spelled(**arguments: Any) -> str:
    return json.dumps(arguments)
