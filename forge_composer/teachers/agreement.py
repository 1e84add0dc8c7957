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
from typing import Literal

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


NoAgreement = Literal["no_answer", "too_few_families", "no_quorum", "tie"]
"""`no_answer`: no reply was valid. `too_few_families`: valid ones came from less than `min_quorum` families.
`no_quorum`: no action has enough families. `tie`: two have enough, and equally many."""


def agree(votes: Sequence[Vote], *, quorum: int, min_quorum: int | None = None) -> Agreement | None:
    """The action that enough families voted for, or None; see `reach_agreement`."""
    found = reach_agreement(votes, quorum=quorum, min_quorum=min_quorum)
    return found if isinstance(found, Agreement) else None


def reach_agreement(
    votes: Sequence[Vote], *, quorum: int, min_quorum: int | None = None
) -> Agreement | NoAgreement:
    """The action that enough families voted for, or why there is none; a tie for the most families is none.

    Args:
        votes: on one step.
        quorum: families that have to agree.
        min_quorum: where fewer than `quorum` families gave a valid answer (teachers are down), all of those
            have to agree, as long as they are this many. None: it takes `quorum` whoever answered.

    Raises:
        ValueError: quorum is below 1, or min_quorum is not between 1 and quorum.
    """
    least = quorum if min_quorum is None else min_quorum
    if quorum < 1:
        raise ValueError(f"quorum must be at least 1, got {quorum}")
    if not 1 <= least <= quorum:
        raise ValueError(f"min_quorum must be 1 to {quorum} (quorum), got {least}")
    supporters: dict[str, set[str]] = defaultdict(set)
    for vote in votes:
        if vote.action is not None:
            supporters[vote.action].add(vote.family)
    if not supporters:
        return "no_answer"
    answered = len(set.union(*supporters.values()))
    if answered < least:
        return "too_few_families"
    ranked = sorted(supporters.items(), key=lambda item: (-len(item[1]), item[0]))
    action, families = ranked[0]
    if len(families) < min(quorum, answered):
        return "no_quorum"
    if len(ranked) > 1 and len(ranked[1][1]) == len(families):
        return "tie"
    return Agreement(action, tuple(sorted(families)), len(families) / answered)


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


def measure(steps: Sequence[StepVotes], *, quorum: int, min_quorum: int | None = None) -> AgreementReport:
    """Agreement measures over steps; the quorum as in `reach_agreement`."""
    answered = [step for step in steps if any(vote.action is not None for vote in step.votes)]
    agreed = [
        (step, found)
        for step in answered
        if (found := agree(step.votes, quorum=quorum, min_quorum=min_quorum)) is not None
    ]
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
    steps: Sequence[StepVotes],
    *,
    quorum: int,
    min_quorum: int | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> ChanceTest:
    """Is the number of useful pairs more than teachers would give who do not look at the step?

    Under the null hypothesis a teacher's votes have nothing to do with the step that they were cast on, so
    each teacher's votes are dealt out to the steps anew; how often each teacher says what stays as it is.
    Agreement that comes from all teachers having one favourite action is part of the null, and counts for
    nothing.
    """
    observed = measure(steps, quorum=quorum, min_quorum=min_quorum).useful_pairs
    rng = np.random.default_rng(seed)
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, step in enumerate(steps):
        for index, vote in enumerate(step.votes):
            places[vote.teacher].append((number, index))
    counts = np.empty(draws, dtype=np.int64)
    for draw in range(draws):
        counts[draw] = _useful(_shuffled(steps, places, rng), quorum, min_quorum)
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


def _useful(steps: Sequence[StepVotes], quorum: int, min_quorum: int | None) -> int:
    found = ((step, agree(step.votes, quorum=quorum, min_quorum=min_quorum)) for step in steps)
    return sum(agreement is not None and agreement.action != step.student for step, agreement in found)
