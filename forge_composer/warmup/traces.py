"""Synthetic micro-task traces: first attempts, corrections after feedback, and attempts after a hint.

A trace is what an agent with a given skill would leave: `WarmupSkill` says how often its attempts are
right; wrong ones are bodies of similar functions. Held-out functions never occur.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forge_composer.envs import prompts
from forge_composer.envs.micro_grammar import Difficulty, space
from forge_composer.envs.micro_tasks import (
    NAMINGS,
    MicroTask,
    function_count,
    make_task,
    name_function,
    trusted_report,
)
from forge_composer.hints.texts import DEMONSTRATION as HINT_DEMONSTRATION
from forge_composer.hints.texts import FEEDBACK as HINT_FEEDBACK
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import to_message
from forge_composer.types import Message, ParsedAction, ToolCall

NAMES_SEEN = 3
"""Names under which each function occurs in the traces, of the 32 there are."""


@dataclass(slots=True, frozen=True)
class WarmupSkill:
    """How good the imitated agent is."""

    first_right: float = 0.35
    """Share of first attempts that are right."""
    correction_right: float = 0.4
    """Share of corrections that are right, after the feedback of a failed test."""
    hint_share: float = 0.2
    """Share of traces with a hint before the first attempt."""
    hinted_right: float = 0.97
    """Share of attempts that are right when the hint shows the solution."""
    bare_share: float = 0.25
    """Share of traces without system prompt and tools, one attempt long: cheap practice in the mapping."""


@dataclass(slots=True)
class Trace:
    """Messages of one conversation; the assistant's are what is trained on."""

    prompt: list[Message]
    tools: list[dict[str, Any]]
    turns: list[tuple[ParsedAction, list[Message]]] = field(default_factory=list)
    """Assistant turns, each with the environment's answers to it."""


def make_traces(difficulty: Difficulty, skill: WarmupSkill, seed: int) -> Iterator[Trace]:
    """Endless traces over the training functions of a difficulty; deterministic by seed."""
    rng = random.Random(f"warmup/{seed}")
    functions = function_count(difficulty, "train")
    while True:
        index = rng.randrange(functions * NAMES_SEEN)
        yield make_trace(make_task(difficulty, "train", index), skill, rng)


def make_trace(task: MicroTask, skill: WarmupSkill, rng: random.Random) -> Trace:
    """One trace on one task."""
    bare = rng.random() < skill.bare_share
    trace = Trace([Message(role="user", content=task.module_source)], [])
    if not bare:
        trace = Trace(prompts.initial_messages(task.module_source), prompts.TOOLS)
    right = skill.first_right
    if rng.random() < skill.hint_share:
        right = _add_hint(trace, task, skill, rng)
    if bare:
        trace.turns.append((_write(_attempt(task, right, rng)), []))
        return trace
    for chance in (right, skill.correction_right):
        body = _attempt(task, chance, rng)
        answer = trusted_report(task, body)
        trace.turns.append((_write(body, then_test=True), _answers(prompts.WRITTEN, answer)))
        if answer == prompts.ALL_PASSED:
            break
    trace.turns.append((_action(ToolCall("call_0", prompts.SUBMIT, {})), []))
    return trace


def practice_pairs(difficulty: Difficulty, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (head of a function with its sentence, body) pairs over the training functions."""
    rng = random.Random(f"practice/{seed}")
    specs = space(difficulty).train
    while True:
        named = name_function(rng.choice(specs), rng.randrange(NAMINGS))
        head = f'def {named.function}({", ".join(named.parameters)}):\n    """{named.sentence}\n'
        yield head, named.body


def _add_hint(trace: Trace, task: MicroTask, skill: WarmupSkill, rng: random.Random) -> float:
    """Put a hint before the first turn; returns how often the attempt after it is right."""
    wrong = task.plausible_wrong_bodies(rng, 1)
    if wrong and rng.random() < 0.4:
        text = HINT_FEEDBACK.format(feedback=trusted_report(task, wrong[0]).splitlines()[0])
        right = skill.correction_right
    else:
        text = HINT_DEMONSTRATION.format(body=task.reference_body)
        right = skill.hinted_right
    if rng.random() < 0.5:
        trace.prompt.append(Message(role="user", content=text))
    else:
        last = trace.prompt[-1]
        trace.prompt[-1] = Message(role=last["role"], content=f"{last['content']}\n{text}")
    return right


def _attempt(task: MicroTask, right: float, rng: random.Random) -> str:
    if rng.random() < right:
        return task.reference_body
    wrong = task.plausible_wrong_bodies(rng, 1)
    return wrong[0] if wrong else task.reference_body


def _write(body: str, *, then_test: bool = False) -> ParsedAction:
    calls = [ToolCall("call_0", prompts.WRITE_BODY, {"body": body})]
    if then_test:
        calls.append(ToolCall("call_1", prompts.RUN_TESTS, {}))
    return _action(*calls)


def _action(*calls: ToolCall) -> ParsedAction:
    return ParsedAction(text="", tool_calls=calls)


def _answers(*texts: str) -> list[Message]:
    return [Message(role="tool", content=text) for text in texts]


def trace_texts(trace: Trace) -> Iterator[str]:
    """The texts of a trace, for training a tokenizer: without markup, roles included."""
    import json

    yield from ("system\n", "user\n", "assistant\n")
    for tool in trace.tools:
        yield json.dumps(tool["function"])
    for message in trace.prompt:
        yield message["content"]
    for action, answers in trace.turns:
        for call in action.tool_calls:
            yield f'{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}'
        for answer in answers:
            yield answer["content"]


def trace_ids(trace: Trace, renderer: ChatRenderer) -> tuple[list[int], list[bool]]:
    """Token ids of a trace and the mask of the assistant's tokens, built as a rollout builds them."""
    ids = renderer.initial_ids(trace.prompt, trace.tools)
    mask = [False] * len(ids)
    history = list(trace.prompt)
    for action, answers in trace.turns:
        history.append(to_message(action))
        completion = renderer.turn_ids(history, trace.tools)
        ids += completion
        mask += [True] * len(completion)
        if not answers:
            break
        suffix = renderer.continuation_ids(history, answers, trace.tools)
        if suffix is None:
            raise ValueError("the warm-up's template must extend its own past")
        history += answers
        ids += suffix
        mask += [False] * len(suffix)
    return ids, mask
