"""The numbers of each teacher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forge_composer.config.teachers import TeacherConfig
from forge_composer.preferences.records import TeacherVote
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.replay_report.calls import Account, account
from forge_composer.teachers.kinds import NOT_SENT, ReplyKind
from forge_composer.teachers.ledger import CallRecord


@dataclass(slots=True, frozen=True)
class Percentiles:
    """Of latencies, seconds, interpolated linearly between order statistics."""

    p50: float
    p95: float
    p99: float


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """None of nothing."""
    if not seconds:
        return None
    p50, p95, p99 = np.percentile(np.asarray(seconds, dtype=np.float64), (50, 95, 99)).tolist()
    return Percentiles(p50, p95, p99)


@dataclass(slots=True, frozen=True)
class TeacherNumbers:
    """One teacher in one replay.

    Attributes:
        calls: questions that it was asked, however often each was sent.
        kinds: calls by the kind of their reply, those that were not sent included.
        cached: calls that the ledger answered.
        latencies: seconds of each call, retries included.
        account: its requests, tokens and money.
        disagreement: share of its valid votes that are not what the student did; None without votes.
    """

    name: str
    model: str
    family: str
    calls: int
    kinds: Counter[str]
    cached: int
    latencies: tuple[float, ...]
    account: Account
    disagreement: float | None

    @property
    def errors(self) -> int:
        """Calls without a usable reply."""
        return self.calls - self.kinds[ReplyKind.OK]

    @property
    def usd_per_call(self) -> float | None:
        """Mean cost of a call, all its requests; None without calls."""
        return self.account.cost_usd / self.calls if self.calls else None


def teacher_numbers(
    teacher: TeacherConfig, steps: Sequence[ReplayedStep], calls: Sequence[CallRecord]
) -> TeacherNumbers:
    """The numbers of a teacher over replayed steps and the ledger's entries."""
    votes = list(votes_of(teacher.name, steps))
    sent = [vote for vote in votes if vote.kind not in NOT_SENT]
    against = [
        vote.action != step.student
        for step in steps
        for vote in step.step_votes().votes
        if vote.teacher == teacher.name and vote.action is not None
    ]
    return TeacherNumbers(
        name=teacher.name,
        model=teacher.model,
        family=teacher.family_name,
        calls=len(sent),
        kinds=Counter(vote.kind for vote in votes),
        cached=sum(vote.cached for vote in sent),
        latencies=tuple(vote.latency_s for vote in sent),
        account=account([call for call in calls if call.teacher == teacher.name]),
        disagreement=sum(against) / len(against) if against else None,
    )


def votes_of(teacher: str, steps: Iterable[ReplayedStep]) -> Iterable[TeacherVote]:
    """A teacher's votes."""
    return (vote for step in steps for vote in step.votes if vote.teacher == teacher)
