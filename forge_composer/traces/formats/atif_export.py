"""Writing conversations as ATIF trajectories; what ATIF has no field for is under `extra` of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_composer import __version__
from forge_composer.traces.atif import NAMESPACE, SCHEMA_VERSION, validate
from forge_composer.traces.formats.atif import CONVERSATION, NAME
from forge_composer.traces.formats.conversation import Conversation, StepTokens
from forge_composer.types import Message


def write_atif(conversation: Conversation) -> dict[str, Any]:
    """The conversation as a trajectory, a validated JSON object; `read_atif` makes the same of it again.

    Raises:
        TraceFormatError: fields that were kept from the source do not fit into ATIF.
    """
    same = conversation.format == NAME
    extra = conversation.extra if same else {}
    agent = {"name": NAMESPACE, "version": __version__} | extra.get("agent", {})
    agent |= _given(model_name=conversation.model, tool_definitions=conversation.tools or None)
    own = _given(reward=conversation.reward, task_id=conversation.task_id)
    document = {key: value for key, value in extra.items() if key != "agent"} | {
        "schema_version": SCHEMA_VERSION,
        "agent": agent,
        "steps": list(_numbered(conversation, same)),
    }
    if conversation.trace_id:
        document["trajectory_id"] = conversation.trace_id
    _add_own(document, own)
    if isinstance(totals := document.get("final_metrics"), dict):
        document["final_metrics"] = totals | {"total_steps": len(document["steps"])}
    validate(document)
    return document


def _numbered(conversation: Conversation, same: bool) -> Iterator[dict[str, Any]]:
    number = 1
    for step in _steps(conversation, same):
        yield {"step_id": number} | step
        number += 1


def _steps(conversation: Conversation, same: bool) -> Iterator[dict[str, Any]]:
    yield from _context_steps(conversation.start)
    for step in conversation.steps:
        written = _agent_step(step.message)
        results = _results(step.message, step.after)
        _add_results(written, results)
        if step.tokens is not None:
            written["metrics"] = _metrics(step.tokens)
        if same:
            _merge(written, step.extra)
        own = _given(parse_error=step.action.error, context=step.context)
        _add_own(written, own)
        yield written
        yield from _context_steps(step.after[len(results) :])


def _context_steps(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Messages that are not acted by the one who is recorded."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if message["role"] != "assistant":
            yield _plain_step(message)
            continue
        results = _results(message, messages[place:])
        place += len(results)
        step = _agent_step(message) | {"is_copied_context": True}
        _add_results(step, results)
        yield step


def _plain_step(message: Message) -> dict[str, Any]:
    source = message["role"] if message["role"] in ("system", "user") else "user"
    step: dict[str, Any] = {"source": source, "message": message["content"]}
    if message["role"] != source or set(message) != {"role", "content"}:
        _add_own(step, {"message": message})
    return step


def _agent_step(message: Message) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": message["content"]}
    if reasoning := message.get("reasoning_content"):
        step["reasoning_content"] = reasoning
    calls = message.get("tool_calls", [])
    objects = [call for call in calls if isinstance(call["function"]["arguments"], dict)]
    if objects:
        step["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in objects
        ]
    if len(objects) != len(calls) or "name" in message:
        _add_own(step, {"message": message})
    return step


def _results(message: Message, after: Sequence[Message]) -> list[Message]:
    """The messages right after a turn that ATIF holds as results of its calls."""
    named = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", [])}
    whole = all(isinstance(call["function"]["arguments"], dict) for call in message.get("tool_calls", []))
    found: list[Message] = []
    for answer in after:
        identity = answer.get("tool_call_id")
        fits = answer["role"] == "tool" and answer.get("name", named.get(identity or "")) == named.get(
            identity or ""
        )
        if not (whole and fits and identity in named):
            break
        found.append(answer)
    return found


def _add_results(step: dict[str, Any], results: Sequence[Message]) -> None:
    written: list[dict[str, Any]] = []
    for answer in results:
        result = {"source_call_id": answer.get("tool_call_id"), "content": answer["content"]}
        _add_own(result, {"named": True} if "name" in answer else {})
        written.append(result)
    if written:
        step["observation"] = {"results": written}


def _metrics(tokens: StepTokens) -> dict[str, Any]:
    count = None if tokens.prompt_ids is None else len(tokens.prompt_ids)
    return _given(
        prompt_tokens=count,
        completion_tokens=len(tokens.completion_ids),
        prompt_token_ids=tokens.prompt_ids,
        completion_token_ids=tokens.completion_ids,
        logprobs=tokens.logprobs,
    )


def _merge(step: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Put back what was kept of the source's step."""
    for key, value in extra.items():
        held = step.get(key)
        both = isinstance(held, dict) and isinstance(value, dict)
        step[key] = held | value if both else value


def _add_own(holder: dict[str, Any], own: Mapping[str, Any]) -> None:
    if own:
        extra = dict(holder.get("extra") or {})
        extra[CONVERSATION] = dict(extra.get(CONVERSATION) or {}) | dict(own)
        holder["extra"] = extra


def _given(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
