"""A recorded conversation, whatever wrote it: messages, tools, and the steps where an assistant acted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forge_composer.traces.atif import TraceFormatError
from forge_composer.types import Message, ParsedAction

_MOST_LOGPROB = 1e-6
"""Log-probabilities are at most 0, up to rounding."""


@dataclass(slots=True)
class StepTokens:
    """Token ids of one step, where the trace has them.

    `logprobs[i]` (nats) belongs to `completion_ids[i]`; None where they were not recorded or did not fit.
    """

    completion_ids: list[int]
    prompt_ids: list[int] | None = None
    logprobs: list[float] | None = None


@dataclass(slots=True)
class Step:
    """One turn of the assistant and what came after it, up to the next turn."""

    message: Message
    """The turn as a message for chat templates and APIs. The arguments of a call are the decoded object, or
    the text as it was written where that is not a JSON object."""
    action: ParsedAction
    """The same turn as an action; `error` says what does not parse."""
    after: list[Message] = field(default_factory=list)
    """Tool results and other messages before the next turn."""
    context: list[Message] | None = None
    """The messages that the model was given, where they are not simply everything before this turn."""
    tokens: StepTokens | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the source's format says about the step, under its own names."""


@dataclass(slots=True)
class Conversation:
    """One trace.

    Assistant messages in `start` and in `after` are context: demonstrations, copied turns, turns with weight
    0. They are neither replayed nor trained on.
    """

    format: str
    """Name of the format it was read from; `extra` holds that format's fields."""
    start: list[Message]
    """Messages before the first step."""
    steps: list[Step]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """In the OpenAI shape."""
    trace_id: str = ""
    task_id: str | None = None
    model: str | None = None
    """Who acted."""
    reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list, compare=False)
    """What a lenient reader passed over, each with its place in the document."""
    source: str = field(default="", compare=False)
    """`file:line`."""

    @property
    def messages(self) -> list[Message]:
        """All messages in order."""
        return [*self.start, *_flat(self.steps)]

    def state(self, number: int) -> list[Message]:
        """What the model was given before step `number` (from 0)."""
        context = self.steps[number].context
        return list(context) if context is not None else self.preceding(number)

    def preceding(self, number: int) -> list[Message]:
        """All messages before step `number`, also where the model was given others."""
        return [*self.start, *_flat(self.steps[:number])]


def _flat(steps: list[Step]) -> Iterator[Message]:
    for step in steps:
        yield step.message
        yield from step.after


def training_problems(conversation: Conversation) -> list[str]:
    """Why the tokens of a conversation must not be trained on; empty if they may.

    Import is lenient and replay needs messages only; training on recorded tokens needs every id and every
    log-probability, and a document about which the reader had no doubt.
    """
    found = list(conversation.warnings)
    if not conversation.steps:
        found.append("there is no step")
    for number, step in enumerate(conversation.steps):
        found += [f"step {number}: {problem}" for problem in _token_problems(step.tokens)]
    return found


def require_trainable(conversation: Conversation) -> None:
    """Refuse a conversation whose tokens are not complete and consistent.

    Raises:
        TraceFormatError: with every reason.
    """
    if problems := training_problems(conversation):
        where = conversation.source or conversation.trace_id or "the conversation"
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise TraceFormatError(f"{where} cannot be trained on: {shown}")


def _token_problems(tokens: StepTokens | None) -> Iterator[str]:
    if tokens is None:
        yield "no token ids are recorded"
        return
    if not tokens.prompt_ids:
        yield "no prompt ids are recorded"
    if not tokens.completion_ids:
        yield "no completion ids are recorded"
    if any(i < 0 for ids in (tokens.prompt_ids or [], tokens.completion_ids) for i in ids):
        yield "a token id is negative"
    if tokens.logprobs is None:
        yield "no log-probabilities are recorded"
    elif len(tokens.logprobs) != len(tokens.completion_ids):
        yield f"{len(tokens.completion_ids)} completion ids but {len(tokens.logprobs)} log-probabilities"
    elif not all(math.isfinite(value) and value <= _MOST_LOGPROB for value in tokens.logprobs):
        yield "a log-probability is not finite, or above 0"
