"""Synthetic micro-task traces: first attempts, corrections after feedback, and attempts after a hint.

A trace is what an agent with a given skill would leave: `WarmupSkill` says how often its attempts are
right; wrong ones are bodies of similar functions. Held-out functions never occur.

A hint that always agreed with the sentence would teach nothing about hints: the sentence alone would do, and
a model of this size takes the easier way. So part of the demonstrations show another function's body, and are
obeyed; that makes copying from the context the only way to be right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forge_composer.envs import prompts
from forge_composer.envs.micro_grammar import Difficulty, space
from forge_composer.envs.micro_tasks import (
    NAMINGS,
    MicroTask,
    make_task,
    name_function,
    trusted_report,
)
from forge_composer.hints.texts import DEMONSTRATION as HINT_DEMONSTRATION
from forge_composer.hints.texts import FEEDBACK as HINT_FEEDBACK
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import to_message
from forge_composer.types import Message, ParsedAction, ToolCall

TASKS_SEEN = 600
"""Tasks that the traces are about. Making a task costs far more than a step on it, and the traces teach the
form; the functions are all in the practice."""


@dataclass(slots=True, frozen=True)
class WarmupSkill:
    """How good the imitated agent is."""

    first_right: float = 0.35
    """Share of first attempts that are right."""
    correction_right: float = 0.4
    """Share of corrections that are right, after the feedback of a failed test."""
    hint_share: float = 0.4
    """Share of traces with a hint, before the first attempt or before the correction."""
    feedback_hints: float = 0.2
    """Share of hints that tell what failed; the others demonstrate a body."""
    other_body: float = 0.5
    """Share of demonstrations that show the body of a similar function."""
    obeyed: float = 0.99
    """Share of attempts that are the demonstrated body."""
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
    while True:
        task = make_task(difficulty, "train", rng.randrange(TASKS_SEEN), hidden_tests=1)
        yield make_trace(task, skill, rng)


def make_trace(task: MicroTask, skill: WarmupSkill, rng: random.Random) -> Trace:
    """One trace on one task."""
    bare = rng.random() < skill.bare_share
    trace = Trace([Message(role="user", content=task.module_source)], [])
    if not bare:
        trace = Trace(prompts.initial_messages(task.module_source), prompts.TOOLS)
    hinted = (0 if bare else rng.randrange(2)) if rng.random() < skill.hint_share else None
    if bare:
        body = _hinted(trace.prompt, task, skill, rng) if hinted == 0 else None
        trace.turns.append((_write(body or _attempt(task, skill.first_right, rng)), []))
        return trace
    before = trace.prompt
    for turn, chance in enumerate((skill.first_right, skill.correction_right)):
        body = _hinted(before, task, skill, rng) if hinted == turn else _attempt(task, chance, rng)
        answer = trusted_report(task, body)
        before = _answers(prompts.WRITTEN, answer)
        trace.turns.append((_write(body, then_test=True), before))
        if answer == prompts.ALL_PASSED:
            break
    trace.turns.append((_action(ToolCall("call_0", prompts.SUBMIT, {})), []))
    return trace


def practice_pairs(difficulty: Difficulty, seed: int) -> Iterator[tuple[str, str | None, str]]:
    """Endless (head of a function with its sentence, hint, body) over all training functions.

    Each head comes twice: without a hint and with its own body, and with a demonstration of another
    function's body, which is then the answer.
    """
    rng = random.Random(f"practice/{seed}")
    specs = space(difficulty).train
    while True:
        named = name_function(rng.choice(specs), rng.randrange(NAMINGS))
        head = f'def {named.function}({", ".join(named.parameters)}):\n    """{named.sentence}"""\n'
        yield head, None, named.body
        other = name_function(rng.choice(specs), rng.randrange(NAMINGS)).body
        yield head, HINT_DEMONSTRATION.format(body=other), other


class PracticeIds:
    """Token ids of practice pairs as one-turn conversations, without the token that ends the turn, which the
    traces teach. The template is rendered once: rendering each pair would take longer than a step on it."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.tokenizer = renderer.tokenizer
        task, hint, body = "@task@", "@hint@", "@body@"
        alone = [Message(role="user", content=task)]
        answer = renderer.decode(renderer.turn_ids([*alone, to_message(_write(body))], []))
        self._answer = answer.split(body)
        self._alone = renderer.decode(renderer.initial_ids(alone, [])).split(task)
        behind = [*alone, Message(role="user", content=hint)]
        text = renderer.decode(renderer.initial_ids(behind, []))
        before, rest = text.split(task)
        self._behind = [before, *rest.split(hint)]

    def __call__(
        self, head: str, hint: str | None, body: str, *, own_message: bool
    ) -> tuple[list[int], list[bool]]:
        """Ids, and which of them the agent wrote; the hint is a message of its own or ends the first one."""
        if hint is not None and own_message:
            prompt = self._behind[0] + head + self._behind[1] + hint + self._behind[2]
        else:
            prompt = self._alone[0] + (head if hint is None else f"{head}\n{hint}") + self._alone[1]
        said = json.dumps(body)[1:-1].join(self._answer)
        ids, own = (self.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, said))
        return ids + own, [False] * len(ids) + [True] * len(own)


def _hinted(before: list[Message], task: MicroTask, skill: WarmupSkill, rng: random.Random) -> str:
    """Put a hint after the messages before a turn; returns the body that the turn writes."""
    wrong = task.plausible_wrong_bodies(rng, 1)
    if wrong and rng.random() < skill.feedback_hints:
        text = HINT_FEEDBACK.format(feedback=trusted_report(task, wrong[0]).splitlines()[0])
        body = _attempt(task, skill.correction_right, rng)
    else:
        shown = wrong[0] if wrong and rng.random() < skill.other_body else task.reference_body
        text = HINT_DEMONSTRATION.format(body=shown)
        body = shown if rng.random() < skill.obeyed else _attempt(task, skill.first_right, rng)
    if rng.random() < 0.5:
        before.append(Message(role="user", content=text))
    else:
        last = before[-1]
        before[-1] = Message(role=last["role"], content=f"{last['content']}\n{text}")
    return body


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
