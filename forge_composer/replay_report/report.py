"""A replay in numbers: everything that the table, the JSON file and the page show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forge_composer.preferences.records import PreferencePair
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.replay_report.calls import Account, account, lower_bound_s, wall_s
from forge_composer.replay_report.gather import Gathered
from forge_composer.replay_report.missing import Missing, missing
from forge_composer.replay_report.opinions import Opinions, opinions
from forge_composer.replay_report.projection import Projection, project
from forge_composer.replay_report.run import Asked
from forge_composer.replay_report.settings import ReplaySettings
from forge_composer.replay_report.teachers import Percentiles, TeacherNumbers, percentiles, teacher_numbers
from forge_composer.replay_report.verdict import Check, judge
from forge_composer.teachers.kinds import NOT_SENT, ReplyKind


@dataclass(slots=True, frozen=True)
class Pairs:
    """Attributes:
    made: the pairs, in the order of the traces.
    skipped: steps without a pair by reason.
    by_trace: pairs of each replayed trace.
    """

    made: tuple[PreferencePair, ...]
    skipped: Counter[str]
    by_trace: dict[str, int]

    @property
    def per_trace(self) -> float | None:
        """Mean pairs a trace; None without traces."""
        return len(self.made) / len(self.by_trace) if self.by_trace else None


@dataclass(slots=True, frozen=True)
class Report:
    """One replay.

    Attributes:
        planned: calls that it is made of: steps x teachers x samples.
        kinds: calls by the kind of their reply; those that were not sent are in `missing`.
        latency: of steps, each that of its slowest teacher; of steps with all calls.
        wall_s: time of asking, all starts; `started_s` is this start's.
        bound_s: what the concurrency permits at best (`calls.lower_bound_s`).
    """

    settings: ReplaySettings
    gathered: Gathered
    asked: Asked
    planned: int
    kinds: Counter[str]
    cached: int
    account: Account
    teachers: tuple[TeacherNumbers, ...]
    latency: Percentiles | None
    wall_s: float
    bound_s: float
    opinions: Opinions
    pairs: Pairs
    missing: Missing
    projection: Projection
    checks: tuple[Check, ...]

    @property
    def calls(self) -> int:
        """Questions that were asked, however often each was sent."""
        return self.kinds.total()

    @property
    def errors(self) -> int:
        """Calls without a usable reply."""
        return self.calls - self.kinds[ReplyKind.OK]

    @property
    def usd_per_trace(self) -> float | None:
        """Mean cost of a replayed trace; None without traces."""
        traces = len(self.gathered.traces)
        return self.account.cost_usd / traces if traces else None

    @property
    def holds(self) -> bool | None:
        """The verdict: every limit is held; None while that is open."""
        results = [check.holds for check in self.checks]
        return False if False in results else None if None in results else True


def make_report(settings: ReplaySettings, gathered: Gathered, asked: Asked, pairs: Pairs) -> Report:
    """Measure a replay.

    Args:
        settings: its config.
        gathered: its steps.
        asked: what came of asking.
        pairs: what came of the steps.
    """
    steps, calls, replay = asked.steps, asked.calls, settings.replay
    votes = [vote for step in steps for vote in step.votes]
    sent = [vote for vote in votes if vote.kind not in NOT_SENT]
    planned = len(gathered.states) * len(settings.teachers) * replay.samples
    teachers = tuple(teacher_numbers(teacher, steps, calls) for teacher in settings.teachers)
    left = missing(asked.questions, steps, planned, calls, teachers, replay.budget)
    bound = lower_bound_s(calls, settings.concurrency, replay.concurrency)
    found = opinions(steps, replay)
    sums, latency = account(calls), step_percentiles(steps)
    traces = len(gathered.traces)
    return Report(
        settings=settings,
        gathered=gathered,
        asked=asked,
        planned=planned,
        kinds=Counter(vote.kind for vote in sent),
        cached=sum(vote.cached for vote in sent),
        account=sums,
        teachers=teachers,
        latency=latency,
        wall_s=wall_s(calls, asked.earlier, asked.seconds),
        bound_s=bound,
        opinions=found,
        pairs=pairs,
        missing=left,
        projection=project(settings, teachers, calls, steps=len(gathered.states), traces=traces),
        checks=judge(
            replay.limits,
            whole=not left.calls and bool(steps),
            usd_per_trace=sums.cost_usd / traces if traces else None,
            latency_p95_s=None if latency is None else latency.p95,
            errors=len(sent) - sum(vote.kind == ReplyKind.OK for vote in sent),
            pairs_per_trace=pairs.per_trace,
            p_value=None if found.chance is None else found.chance.p_value,
        ),
    )


def step_percentiles(steps: Sequence[ReplayedStep]) -> Percentiles | None:
    """Of the steps with all their calls: one that was not made might have been the slowest."""
    return percentiles([step.latency_s for step in steps if not step.is_missing])
