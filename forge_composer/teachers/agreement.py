"""What several teachers' votes on a step are worth: quorum, agreement measures, a test against chance.

A vote is a canonical action (`forge_composer.teachers.actions`). Teachers count by model family, since models
of one family share their blind spots and no majority among them repairs that.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, frozen=True)
class Vote:
    """One teacher's action at a step; `action` is None where the reply was no valid action."""

    teacher: str
    family: str
    action: str | None


@dataclass(slots=True, frozen=True)
class StepVotes:
    """All votes on one step of a trace, and what the student did there."""

    step_id: str
    student: str | None
    votes: tuple[Vote, ...]


@dataclass(slots=True, frozen=True)
class Agreement:
    """The action that enough families agree on.

    `share` is supporting families / families that gave a valid answer: the weight of a pair made from it.
    """

    action: str
    families: tuple[str, ...]
    share: float


def agree(votes: Sequence[Vote], *, quorum: int) -> Agreement | None:
    """The action that at least `quorum` families voted for, or None; a tie for the most families is none.

    Raises:
        ValueError: quorum is below 1.
    """
    if quorum < 1:
        raise ValueError(f"quorum must be at least 1, got {quorum}")
    supporters: dict[str, set[str]] = defaultdict(set)
    for vote in votes:
        if vote.action is not None:
            supporters[vote.action].add(vote.family)
    if not supporters:
        return None
    ranked = sorted(supporters.items(), key=lambda item: (-len(item[1]), item[0]))
    action, families = ranked[0]
    tied = len(ranked) > 1 and len(ranked[1][1]) == len(families)
    if len(families) < quorum or tied:
        return None
    answered = {vote.family for vote in votes if vote.action is not None}
    return Agreement(action, tuple(sorted(families)), len(families) / len(answered))


@dataclass(slots=True, frozen=True)
class AgreementReport:
    """Measures over the steps of one or more traces; every rate is 0 where nothing could be counted.

    Attributes:
        steps: steps with at least one valid vote.
        agreement_rate: share of those with a quorum.
        disagreement_rate: share of the steps with a quorum where the student did something else.
        useful_pairs: steps with a quorum against the student.
        entropy: mean entropy of the votes of a step, nats.
        kappa: Cohen's kappa of each pair of teachers, on the steps that both answered.
    """

    steps: int
    agreement_rate: float
    disagreement_rate: float
    useful_pairs: int
    entropy: float
    kappa: dict[tuple[str, str], float]


def measure(steps: Sequence[StepVotes], *, quorum: int) -> AgreementReport:
    """Agreement measures over steps."""
    answered = [step for step in steps if any(vote.action is not None for vote in step.votes)]
    agreed = [(step, found) for step in answered if (found := agree(step.votes, quorum=quorum)) is not None]
    against = sum(found.action != step.student for step, found in agreed)
    entropies = [
        _entropy([vote.action for vote in step.votes if vote.action is not None]) for step in answered
    ]
    return AgreementReport(
        steps=len(answered),
        agreement_rate=len(agreed) / max(1, len(answered)),
        disagreement_rate=against / max(1, len(agreed)),
        useful_pairs=against,
        entropy=math.fsum(entropies) / max(1, len(entropies)),
        kappa=_kappas(answered),
    )


def _entropy(actions: Sequence[str]) -> float:
    counts = Counter(actions).values()
    total = sum(counts)
    return -math.fsum(count / total * math.log(count / total) for count in counts)


def _kappas(steps: Sequence[StepVotes]) -> dict[tuple[str, str], float]:
    """(observed - expected) / (1 - expected) agreement (Cohen, 1960), for each pair of teachers."""
    said: dict[str, dict[str, str]] = defaultdict(dict)
    for step in steps:
        for vote in step.votes:
            if vote.action is not None:
                said[vote.teacher][step.step_id] = vote.action
    kappas = {}
    for one, other in itertools.combinations(sorted(said), 2):
        common = sorted(said[one].keys() & said[other].keys())
        if not common:
            continue
        observed = sum(said[one][step] == said[other][step] for step in common) / len(common)
        first = Counter(said[one][step] for step in common)
        second = Counter(said[other][step] for step in common)
        expected = sum(count * second[action] for action, count in first.items()) / len(common) ** 2
        kappas[one, other] = 1.0 if expected == 1.0 else (observed - expected) / (1.0 - expected)
    return kappas


@dataclass(slots=True, frozen=True)
class ChanceTest:
    """Useful pairs that were found, and how many chance would give.

    `p_value` is one-sided: (1 + draws with at least as many) / (1 + draws).
    """

    observed: int
    expected: float
    p_value: float
    draws: int


def permutation_test(
    steps: Sequence[StepVotes], *, quorum: int, draws: int = 1000, seed: int = 0
) -> ChanceTest:
    """Is the number of useful pairs more than teachers would give who do not look at the step?

    Under the null hypothesis a teacher's votes have nothing to do with the step that they were cast on, so
    each teacher's votes are dealt out to the steps anew; how often each teacher says what stays as it is.
    Agreement that comes from all teachers having one favourite action is part of the null, and counts for
    nothing.
    """
    observed = measure(steps, quorum=quorum).useful_pairs
    rng = np.random.default_rng(seed)
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, step in enumerate(steps):
        for index, vote in enumerate(step.votes):
            places[vote.teacher].append((number, index))
    counts = np.empty(draws, dtype=np.int64)
    for draw in range(draws):
        counts[draw] = _useful(_shuffled(steps, places, rng), quorum)
    return ChanceTest(
        observed=observed,
        expected=float(counts.mean()) if draws else 0.0,
        p_value=float((1 + np.count_nonzero(counts >= observed)) / (1 + draws)),
        draws=draws,
    )


def _shuffled(
    steps: Sequence[StepVotes], places: dict[str, list[tuple[int, int]]], rng: np.random.Generator
) -> list[StepVotes]:
    votes = [list(step.votes) for step in steps]
    for where in places.values():
        for (number, index), source in zip(where, rng.permutation(len(where)), strict=True):
            from_step, from_index = where[source]
            votes[number][index] = steps[from_step].votes[from_index]
    return [
        StepVotes(step.step_id, step.student, tuple(cast)) for step, cast in zip(steps, votes, strict=True)
    ]


def _useful(steps: Sequence[StepVotes], quorum: int) -> int:
    found = ((step, agree(step.votes, quorum=quorum)) for step in steps)
    return sum(agreement is not None and agreement.action != step.student for step, agreement in found)
