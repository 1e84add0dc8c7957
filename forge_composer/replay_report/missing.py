"""Questions that were not asked, why, and what budget would do for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forge_composer.config.teachers import BudgetConfig
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.replay_report.questions import Question
from forge_composer.replay_report.teachers import TeacherNumbers
from forge_composer.teachers.kinds import NOT_SENT
from forge_composer.teachers.ledger import CallRecord
from forge_composer.teachers.prices import to_usd

NOT_ASKED = "not_asked"
"""The replay was stopped before."""


@dataclass(slots=True, frozen=True)
class Need:
    """What a budget is, what of it is used, and what the missing questions would need, USD.

    Attributes:
        limit: the budget.
        used: what the ledger counts against it.
        likely: a budget that most likely does: what was used, the mean cost of a call for each missing one,
            and room for the dearest call's bound, without which it is not sent.
        surely: a budget that does whatever the first attempts at the missing calls cost.
    """

    limit: float
    used: float
    likely: float
    surely: float


@dataclass(slots=True, frozen=True)
class Missing:
    """Attributes:
    calls: questions without a call, by reason.
    run: the budget of the whole replay; None if nothing is missing.
    trace: the budget of a trace, for the trace that needs most.
    """

    calls: Counter[str]
    run: Need | None = None
    trace: Need | None = None


def missing(
    asked: dict[tuple[str, str], Question],
    steps: Sequence[ReplayedStep],
    planned: int,
    calls: Sequence[CallRecord],
    teachers: Sequence[TeacherNumbers],
    budget: BudgetConfig,
) -> Missing:
    """What was not asked.

    Args:
        asked: the questions of the replay.
        steps: the replayed steps.
        planned: calls that the replay is made of.
        calls: the ledger's entries on them.
        teachers: their numbers.
        budget: the budgets.
    """
    votes = [vote for step in steps for vote in step.votes]
    reasons = Counter(vote.kind for vote in votes if vote.kind in NOT_SENT)
    reasons[NOT_ASKED] = planned - len(votes)
    reasons = +reasons
    if not reasons:
        return Missing(reasons)
    replied = {
        (vote.teacher, step.state.trace, step.state.step, vote.sample)
        for step in steps
        for vote in step.votes
        if vote.kind not in NOT_SENT
    }
    left = {
        (teacher, request): question
        for (teacher, request), question in asked.items()
        if (teacher, question.trace, question.step, question.sample) not in replied
    }
    means = {teacher.name: teacher.usd_per_call for teacher in teachers}
    used: Counter[str] = Counter()
    for call in calls:
        used[call.trace] += call.counted_nano_usd
    traces = {question.trace for question in left.values()}
    by_trace = [
        _need(
            budget.per_trace_usd,
            used[trace],
            {key: question for key, question in left.items() if question.trace == trace},
            means,
        )
        for trace in sorted(traces)
    ]
    return Missing(
        reasons,
        _need(budget.run_usd, used.total(), left, means),
        max(by_trace, key=lambda need: need.likely, default=None),
    )


def _need(
    limit: float, used: int, left: dict[tuple[str, str], Question], means: dict[str, float | None]
) -> Need:
    bounds = [question.bound for question in left.values()]
    expected = 0.0
    for (teacher, _), question in left.items():
        mean = means[teacher]
        expected += to_usd(question.bound) if mean is None else mean
    spent, surely = to_usd(used), to_usd(used + sum(bounds))
    return Need(limit, spent, min(surely, spent + expected + to_usd(max(bounds, default=0))), surely)
