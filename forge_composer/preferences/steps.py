"""Steps of recorded traces that teachers can be asked about: rollouts of a run, and conversations of others.

A step of a conversation has what the file holds: tokens and log-probabilities often are not there, and an
environment's remarks never are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forge_composer.config.replay import ReplayConfig
from forge_composer.hints.targets import REPEATED, TRUNCATED, faults
from forge_composer.rollout.episode import history_before
from forge_composer.traces.formats.conversation import Conversation, StepTokens
from forge_composer.types import Message, ParsedAction, Rollout, Turn

SUCCESS = 1.0
"""Reward of an episode that reached everything."""
_OUR_FINDINGS = frozenset({REPEATED, TRUNCATED})
"""Kinds of faults that nobody complained about."""


@dataclass(slots=True, frozen=True)
class StepState:
    """What the student was given at one step, and what it did.

    Attributes:
        trace: id of the trace.
        step: turn of the trace, from 0.
        messages: everything before the step.
        tools: in the OpenAI shape.
        action: the student's.
        failing: the step does not parse, the environment complained about what it did, or it is where a
            failed trace went wrong: its last step, and the last one that wrote something.
        prompt_ids: context of the step for the policy; None where no tokens were recorded.
        completion_ids: the student's tokens, with the turn-end token unless the turn was cut off.
        surprise: mean negative log-probability of the student's tokens, nats; None if unknown.
        version: oldest policy version among the tokens; -1 if unknown.
        temperature: that they were sampled at.
        rollout: the recorded rollout, where there is one: what a fork needs.
    """

    trace: str
    step: int
    messages: list[Message]
    tools: list[dict[str, Any]]
    action: ParsedAction
    failing: bool = False
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    surprise: float | None = None
    version: int = -1
    temperature: float = 1.0
    rollout: Rollout | None = None

    @property
    def step_id(self) -> str:
        """Names the step among those of all traces."""
        return f"{self.trace}#{self.step}"


def rollout_is_replayed(rollout: Rollout, config: ReplayConfig) -> bool:
    """Whether `replay.traces` takes the rollout. A void one, which has no reward, is never replayed."""
    if rollout.reward is None or not rollout.turns:
        return False
    return config.traces == "all" or rollout.reward < SUCCESS


def conversation_is_replayed(conversation: Conversation, config: ReplayConfig) -> bool:
    """Whether `replay.traces` takes the conversation; one of unknown reward may have failed, and is taken."""
    if not conversation.steps:
        return False
    return config.traces == "all" or conversation.reward is None or conversation.reward < SUCCESS


def steps_of_rollout(rollout: Rollout) -> list[StepState]:
    """All steps of a rollout, in order."""
    failing = _failing_turns(rollout)
    return [
        _rollout_step(rollout, number, turn, number in failing) for number, turn in enumerate(rollout.turns)
    ]


def _failing_turns(rollout: Rollout) -> set[int]:
    """A failing test is a complaint about the turn that wrote the code; the one that ran it is taken, too."""
    failed = rollout.reward is None or rollout.reward < SUCCESS
    found = {fault.turn for fault in faults(rollout, succeeded=not failed) if fault.kind not in _OUR_FINDINGS}
    for number, turn in enumerate(rollout.turns):
        last = number + 1 == len(rollout.turns)
        if turn.feedback or turn.action.error is not None or (last and failed):
            found.add(number)
    return found


def _rollout_step(rollout: Rollout, number: int, turn: Turn, failing: bool) -> StepState:
    known = [version for version in turn.versions if version >= 0]
    return StepState(
        trace=rollout.rollout_id,
        step=number,
        messages=history_before(rollout, number),
        tools=list(rollout.tools),
        action=turn.action,
        failing=failing,
        prompt_ids=tuple(turn.prompt_ids) or None,
        completion_ids=tuple(turn.completion_ids) or None,
        surprise=_surprise(turn.logprobs),
        version=min(known, default=-1) if len(known) == len(turn.versions) else -1,
        temperature=float(rollout.info.get("temperature", 1.0)),
        rollout=rollout,
    )


def steps_of_conversation(conversation: Conversation) -> list[StepState]:
    """All steps of a conversation, in order; a step fails if it does not parse, or is the last of a trace
    whose reward is known and below 1."""
    failed = conversation.reward is not None and conversation.reward < SUCCESS
    steps = []
    for number, step in enumerate(conversation.steps):
        last = number + 1 == len(conversation.steps)
        tokens = step.tokens or StepTokens([])
        steps.append(
            StepState(
                trace=conversation.trace_id,
                step=number,
                messages=conversation.state(number),
                tools=list(conversation.tools),
                action=step.action,
                failing=step.action.error is not None or (last and failed),
                prompt_ids=tuple(tokens.prompt_ids or ()) or None,
                completion_ids=tuple(tokens.completion_ids) or None,
                surprise=_surprise(tokens.logprobs or ()),
            )
        )
    return steps


def _surprise(logprobs: Sequence[float]) -> float | None:
    if not logprobs or not all(map(math.isfinite, logprobs)):
        return None
    return -math.fsum(logprobs) / len(logprobs)


def choose_steps(steps: Iterable[StepState], config: ReplayConfig) -> list[StepState]:
    """The steps that `replay.steps` takes, at most `replay.max_steps_per_trace` of each trace.

    Traces come in order of their first step, their steps in order. Under `entropy` a step whose surprise is
    unknown is not taken.
    """
    traces: dict[str, list[StepState]] = defaultdict(list)
    for step in steps:
        traces[step.trace].append(step)
    return [
        step
        for members in traces.values()
        for step in _chosen(sorted(members, key=lambda step: step.step), config)[: config.max_steps_per_trace]
    ]


def _chosen(steps: list[StepState], config: ReplayConfig) -> list[StepState]:
    """The steps of one trace that are taken, in order."""
    match config.steps:
        case "all":
            return steps
        case "every":
            return steps[:: config.every]
        case "failing":
            return [step for step in steps if step.failing]
        case "entropy":
            return _least_sure(steps, config.entropy_share)


def _least_sure(steps: list[StepState], share: float) -> list[StepState]:
    known = [(step.surprise, step) for step in steps if step.surprise is not None]
    count = math.ceil(share * len(known) - 1e-9)  # 0.1 x 30 is 3, whatever floats make of it
    ranked = sorted(known, key=lambda pair: (-pair[0], pair[1].step))[:count]
    return sorted((step for _, step in ranked), key=lambda step: step.step)
