"""Asking all teachers what they would have done at recorded steps.

    step of a trace -> the same messages and tools to each teacher -> votes: canonical actions, None for a
    reply that was no valid action

Nothing that a teacher does raises: a refusal, a dead endpoint and a spent budget are kinds of replies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.records import TeacherVote
from forge_composer.preferences.steps import StepState
from forge_composer.teachers.actions import canonical_action
from forge_composer.teachers.agreement import StepVotes, Vote
from forge_composer.teachers.client import TeacherReply
from forge_composer.teachers.kinds import NOT_SENT
from forge_composer.teachers.pool import TeacherPool
from forge_composer.teachers.requests import TeacherRequest
from forge_composer.types import ParsedAction

OnStep = Callable[["ReplayedStep"], None]


@dataclass(slots=True, frozen=True)
class ReplayedStep:
    """A step and what the teachers said to it.

    Attributes:
        state: the step.
        votes: a vote a reply: by sample, then in the order of the teachers.
        actions: canonical action -> the action as it was first said.
        student: canonical action of the student; None if it does not parse.
    """

    state: StepState
    votes: tuple[TeacherVote, ...]
    actions: dict[str, ParsedAction]
    student: str | None

    @property
    def cost_usd(self) -> float:
        """Spent on the step, all replies; a reply out of the ledger counts with what it cost once."""
        return sum(vote.cost_usd for vote in self.votes)

    @property
    def latency_s(self) -> float:
        """Of the slowest reply, its retries included; seconds."""
        return max((vote.latency_s for vote in self.votes), default=0.0)

    @property
    def kinds(self) -> Counter[str]:
        """Replies by kind."""
        return Counter(vote.kind for vote in self.votes)

    @property
    def is_missing(self) -> bool:
        """True if a request was not sent: no budget was left, or the teacher is benched."""
        return any(vote.kind in NOT_SENT for vote in self.votes)

    def step_votes(self) -> StepVotes:
        """One vote a teacher: its most frequent valid action, the one said first among equals; None if none
        of its replies was valid."""
        said: dict[tuple[str, str], Counter[str]] = {}
        for vote in self.votes:  # a Counter keeps the order in which its keys came
            answers = said.setdefault((vote.teacher, vote.family), Counter())
            if vote.action is not None:
                answers[vote.action] += 1
        cast = (
            Vote(teacher, family, max(answers, key=answers.__getitem__) if answers else None)
            for (teacher, family), answers in said.items()
        )
        return StepVotes(self.state.step_id, self.student, tuple(cast))


def replayed_step(state: StepState, replies: Sequence[TeacherReply], config: ReplayConfig) -> ReplayedStep:
    """A step with the replies of its teachers.

    Args:
        state: the step.
        replies: by sample, then in the order of the teachers.
        config: `text` says when two texts are one action.
    """
    votes: list[TeacherVote] = []
    actions: dict[str, ParsedAction] = {}
    for reply in replies:
        action = None
        if reply.action is not None:
            action = canonical_action(reply.action, text=config.text)
            if action is not None:
                actions.setdefault(action, reply.action)
        votes.append(
            TeacherVote(
                teacher=reply.teacher,
                family=reply.family,
                kind=str(reply.kind),
                action=action,
                cost_usd=reply.cost_usd,
                latency_s=reply.seconds,
                sample=reply.request.sample,
                attempts=reply.attempts,
                cached=reply.cached,
            )
        )
    return ReplayedStep(state, tuple(votes), actions, canonical_action(state.action, text=config.text))


class StepReplayer:
    """Asks a pool of teachers about steps.

    Attributes:
        steps: steps that were asked about.
        counts: replies by kind.
    """

    def __init__(self, pool: TeacherPool, config: ReplayConfig) -> None:
        self.pool, self.config = pool, config
        self.steps = 0
        self.counts: Counter[str] = Counter()

    async def replay(self, state: StepState) -> ReplayedStep:
        """Ask every teacher about one step, `replay.samples` times each.

        Raises:
            LedgerError: the ledger is closed.
        """
        requests = [
            TeacherRequest(state.trace, str(state.step), state.messages, state.tools, sample)
            for sample in range(self.config.samples)
        ]
        asked = [asyncio.ensure_future(self.pool.ask(request)) for request in requests]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            await _cancelled(asked)
        step = replayed_step(state, [reply for replies in answers for reply in replies], self.config)
        self.steps += 1
        self.counts += step.kinds
        return step

    async def replay_all(
        self, states: Iterable[StepState], on_step: OnStep | None = None
    ) -> list[ReplayedStep]:
        """Ask about many steps, `replay.concurrency` of them at once.

        Args:
            states: the steps; taken one by one as there is room.
            on_step: called with each step as it is done, in any order. What it raises ends the replay.

        Returns:
            The replayed steps in the order of `states`. On cancellation the requests in flight are
            cancelled; what was answered is in the ledger, and has been given to `on_step`.
        """
        waiting = enumerate(states)
        done: dict[int, ReplayedStep] = {}
        workers = [
            asyncio.ensure_future(self._work(waiting, done, on_step)) for _ in range(self.config.concurrency)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            await _cancelled(workers)
        return [done[number] for number in sorted(done)]

    async def _work(
        self,
        waiting: Iterator[tuple[int, StepState]],
        done: dict[int, ReplayedStep],
        on_step: OnStep | None,
    ) -> None:
        for number, state in waiting:  # shared by the workers: each takes the next one
            done[number] = await self.replay(state)
            if on_step is not None:
                on_step(done[number])


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, and wait until it has let go of what it holds."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
