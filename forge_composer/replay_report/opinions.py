"""Agreement: of the teachers with each other, with the student, and against chance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.teachers.agreement import (
    AgreementReport,
    ChanceTest,
    StepVotes,
    measure,
    permutation_test,
)

_MOST_DRAWS, _LEAST_DRAWS = 1000, 200
_SHUFFLED_STEPS = 2_000_000
"""Steps in all draws together, about: some ten seconds."""


@dataclass(slots=True, frozen=True)
class TeacherPair:
    """Two teachers on the steps that both answered.

    Attributes:
        steps: how many those are.
        rate: share of them where both say the same.
        kappa: that, corrected for what two teachers agree on who do not look (Cohen, 1960).
    """

    one: str
    other: str
    steps: int
    rate: float
    kappa: float


@dataclass(slots=True, frozen=True)
class Opinions:
    """All measures; `report` and `chance` are None where no step has a valid vote."""

    report: AgreementReport | None
    pairs: tuple[TeacherPair, ...]
    chance: ChanceTest | None


def opinions(steps: Sequence[ReplayedStep], config: ReplayConfig) -> Opinions:
    """Measure the votes of a replay."""
    votes = [step.step_votes() for step in steps]
    report = measure(votes, quorum=config.quorum, min_quorum=config.min_quorum)
    if not report.steps:
        return Opinions(None, (), None)
    chance = permutation_test(
        votes, quorum=config.quorum, min_quorum=config.min_quorum, draws=draws_for(len(votes))
    )
    return Opinions(report, tuple(_pairs(votes, report)), chance)


def draws_for(steps: int) -> int:
    """Shuffles of the votes: 1,000; fewer of a large replay, where each takes long and varies little."""
    return max(_LEAST_DRAWS, min(_MOST_DRAWS, _SHUFFLED_STEPS // max(1, steps)))


def _pairs(steps: Sequence[StepVotes], report: AgreementReport) -> list[TeacherPair]:
    said: dict[str, dict[str, str]] = {}
    for step in steps:
        for vote in step.votes:
            if vote.action is not None:
                said.setdefault(vote.teacher, {})[step.step_id] = vote.action
    found = []
    for one, other in itertools.combinations(sorted(said), 2):
        common = said[one].keys() & said[other].keys()
        if common:
            same = sum(said[one][step] == said[other][step] for step in common)
            kappa = report.kappa[one, other]
            found.append(TeacherPair(one, other, len(common), same / len(common), kappa))
    return found
