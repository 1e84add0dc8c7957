"""Rollout JSONL of verifiers and prime-rl: `prompt`, `completion`, `reward`, and `trajectory` with token ids.

Tool calls stand there as JSON texts, tools flat under `tool_defs` (earlier: in the OpenAI shape under
`tools`, `oai_tools` or `info.oai_tools`). Read and written are rollouts of messages; the node graph that
newer prime-rl releases write is another format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forge_composer.traces.atif import TraceFormatError
from forge_composer.traces.formats.conversation import Conversation, Step, StepTokens
from forge_composer.traces.formats.fields import Fields, ids_of, numbers_of, parse_json
from forge_composer.traces.formats.messages import flat_call, read_messages, read_tools, split_steps
from forge_composer.types import Message

NAME = "verifiers"


def read_verifiers(document: Mapping[str, Any]) -> Conversation:
    """One line.

    Raises:
        TraceFormatError: no prompt, no completion (a rollout that failed before its first turn has none), or
            messages that cannot be read.
    """
    warnings: list[str] = []
    fields = Fields(document, "", warnings)
    prompt = read_messages(_messages(fields, "prompt", "user"), "prompt", warnings)
    completion = read_messages(_messages(fields, "completion", "assistant"), "completion", warnings)
    _, steps = split_steps(completion, [False] * len(completion))
    before = [message for message, _ in completion[: _first_turn(completion)]]
    conversation = Conversation(
        format=NAME,
        start=[*(message for message, _ in prompt), *before],
        steps=steps,
        tools=_tools(fields, warnings),
        task_id=_task(fields),
        model=fields.peek("model", str),
        reward=fields.take("reward", float),
        warnings=warnings,
    )
    if trajectory := fields.take("trajectory", list):
        _read_trajectory(conversation, trajectory)
    conversation.extra = fields.rest()
    return conversation


def _first_turn(completion: list[tuple[Message, dict[str, Any]]]) -> int:
    turns = (place for place, (message, _) in enumerate(completion) if message["role"] == "assistant")
    return next(turns, len(completion))


def _messages(fields: Fields, key: str, role: str) -> list[Any]:
    """A list of messages, or the one text that stands for one."""
    text = fields.peek(key, str)
    if text is not None:
        fields.take(key, str)
        return [{"role": role, "content": text}]
    return fields.need(key, list)


def _task(fields: Fields) -> str | None:
    identity = fields.peek("example_id", str)
    number = fields.peek("example_id", int)
    return identity if number is None else str(number)


def _tools(fields: Fields, warnings: list[str]) -> list[dict[str, Any]]:
    for key in ("tool_defs", "tools", "oai_tools"):
        if found := fields.take(key, list):
            return read_tools(found, key, warnings)
    info = fields.peek("info", dict) or {}
    inside = info.get("oai_tools")
    if isinstance(inside, str):
        try:
            inside = parse_json(inside)
        except TraceFormatError as error:
            fields.warn("info.oai_tools", f"{error}; left out")
    return read_tools(inside, "info.oai_tools", warnings) if isinstance(inside, list) else []


def _read_trajectory(conversation: Conversation, trajectory: list[Any]) -> None:
    """Prompts and token ids of the steps, if there is one entry a step."""
    warnings = conversation.warnings
    if len(trajectory) != len(conversation.steps):
        turns = len(conversation.steps)
        warnings.append(f"trajectory: {len(trajectory)} entries for {turns} assistant messages; left out")
        return
    for number, (value, step) in enumerate(zip(trajectory, conversation.steps, strict=True)):
        fields = Fields(value, f"trajectory[{number}]", warnings)
        if fields.has("prompt"):
            read = read_messages(_messages(fields, "prompt", "user"), fields.place("prompt"), warnings)
            prompt = [message for message, _ in read]
            step.context = None if prompt == conversation.preceding(number) else prompt
        fields.take("completion", list)  # the message of the step, said once more
        if fields.has("tokens"):
            step.tokens = _tokens(fields.sub("tokens"))
        step.extra = fields.rest()


def _tokens(fields: Fields) -> StepTokens | None:
    completion = ids_of(fields.take("completion_ids", list))
    if completion is None:
        fields.warn("completion_ids", "missing, or not whole numbers; the ids of the step are left out")
        return None
    prompt = ids_of(fields.take("prompt_ids", list))
    logprobs = numbers_of(fields.take("completion_logprobs", list))
    if logprobs is None or len(logprobs) != len(completion):
        count = "no numbers" if logprobs is None else f"{len(logprobs)} numbers"
        fields.warn("completion_logprobs", f"{count} for {len(completion)} ids; left out")
        logprobs = None
    return StepTokens(completion, prompt, logprobs)


def write_verifiers(conversation: Conversation) -> dict[str, Any]:
    """One line. Which assistant messages of the start are context is told by their place in `prompt`."""
    same = conversation.format == NAME
    document: dict[str, Any] = {
        "prompt": [_written(message) for message in conversation.start],
        "completion": [_written(message) for message in conversation.messages[len(conversation.start) :]],
        "reward": conversation.reward,
    }
    if conversation.task_id is not None:
        document["example_id"] = conversation.task_id
    if conversation.tools:
        document["tool_defs"] = [tool["function"] for tool in conversation.tools]
    if any(step.tokens or step.context or (same and step.extra) for step in conversation.steps):
        document["trajectory"] = [
            _entry(conversation, number, same) for number in range(len(conversation.steps))
        ]
    return document | (conversation.extra if same else {})


def _entry(conversation: Conversation, number: int, same: bool) -> dict[str, Any]:
    step = conversation.steps[number]
    entry: dict[str, Any] = {
        "prompt": [_written(message) for message in conversation.state(number)],
        "completion": [_written(step.message)],
        "tokens": None if step.tokens is None else _written_tokens(step),
    }
    return entry | (step.extra if same else {})


def _written_tokens(step: Step) -> dict[str, Any]:
    assert step.tokens is not None
    prompt, completion = step.tokens.prompt_ids or [], step.tokens.completion_ids
    return {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": completion,
        "completion_mask": [1] * len(completion),
        "completion_logprobs": step.tokens.logprobs,
    }


def _written(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = dict(message)
    if "tool_calls" in message:
        calls = (flat_call(call) for call in message["tool_calls"])
        result["tool_calls"] = [json.dumps(call, ensure_ascii=False) for call in calls]
    return result
