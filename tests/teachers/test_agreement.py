"""Quorum, measures and the test against chance, against numbers worked out by hand or exactly."""

from __future__ import annotations

import math
import random
from math import comb

import pytest

from forge_composer.teachers.agreement import (
    Agreement,
    StepVotes,
    Vote,
    agree,
    measure,
    permutation_test,
    reach_agreement,
)


def votes(*said: str | None, families: str | None = None) -> tuple[Vote, ...]:
    """One teacher a letter of `families` (default: all different)."""
    names = families or "ABCDEFGH"[: len(said)]
    return tuple(Vote(f"t{i}", names[i], action) for i, action in enumerate(said))


@pytest.mark.parametrize(
    ("cast", "quorum", "action", "share"),
    [
        (votes("x", "x", "y"), 2, "x", 2 / 3),
        (votes("x", "x", "y"), 3, None, 0),
        (votes("x", "y", "z"), 1, None, 0),  # a tie
        (votes("x", None, None), 1, "x", 1.0),
        (votes("x", "x", None), 2, "x", 1.0),
        (votes(None, None), 1, None, 0),
        (votes("x", "x", "y", families="AAB"), 2, None, 0),  # one family, twice
        (votes("x", "x", "x", families="AAB"), 2, "x", 1.0),
        (votes("x", "x", "y", "y"), 2, None, 0),
    ],
)
def test_quorum(cast: tuple[Vote, ...], quorum: int, action: str | None, share: float) -> None:
    found = agree(cast, quorum=quorum)
    assert (found.action if found else None) == action
    if found:
        assert found.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("cast", "quorum", "min_quorum", "found"),
    [
        (votes(None, None), 2, 1, "no_answer"),
        (votes("x", "x", "y"), 3, None, "no_quorum"),
        (votes("x", "x", None), 3, None, "too_few_families"),
        (votes("x", "x", None), 3, 2, ("A", "B")),  # one is dead: the others have to agree
        (votes("x", "y", None), 3, 2, "no_quorum"),
        (votes("x", "x", "y"), 3, 2, "no_quorum"),  # nobody is dead: it takes three
        (votes("x", None, None), 3, 2, "too_few_families"),
        (votes("x", None, None), 3, 1, ("A",)),
        (votes("x", "x", families="AA"), 2, 2, "too_few_families"),
        (votes("x", "y", families="AA"), 2, 1, "tie"),  # the only family is of two minds
        (votes("x", "x", "y", "y"), 2, 2, "tie"),
    ],
)
def test_the_quorum_adapts_to_who_answered(
    cast: tuple[Vote, ...], quorum: int, min_quorum: int | None, found: str | tuple[str, ...]
) -> None:
    reached = reach_agreement(cast, quorum=quorum, min_quorum=min_quorum)
    assert (reached.families if isinstance(reached, Agreement) else reached) == found
    agreed = agree(cast, quorum=quorum, min_quorum=min_quorum)
    assert agreed == (reached if isinstance(reached, Agreement) else None)


def test_measures_with_an_adaptive_quorum() -> None:
    steps = [
        StepVotes("1", "z", votes("x", "x", None)),
        StepVotes("2", "z", votes("x", "x", "x")),
        StepVotes("3", "z", votes("x", "x", "y")),
    ]
    assert measure(steps, quorum=3).useful_pairs == 1
    assert measure(steps, quorum=3, min_quorum=2).useful_pairs == 2
    assert permutation_test(steps, quorum=3, draws=5).observed == 1
    result = permutation_test(steps, quorum=3, min_quorum=2, draws=50)
    # However the third teacher's votes are dealt out, one step has no answer of it and one its x.
    assert (result.observed, result.expected, result.p_value) == (2, 2.0, 1.0)


def test_quorums_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        agree((), quorum=0)
    for least in (0, 3):
        with pytest.raises(ValueError, match=f"min_quorum must be 1 to 2 .*, got {least}"):
            agree((), quorum=2, min_quorum=least)


def test_measures_by_hand() -> None:
    steps = [
        StepVotes("1", "x", votes("x", "x", "y")),  # agreed, with the student
        StepVotes("2", "z", votes("x", "x", "x")),  # agreed, against the student
        StepVotes("3", "x", votes("x", "y", None)),  # not agreed
        StepVotes("4", "x", votes(None, None, None)),  # nobody answered
    ]
    report = measure(steps, quorum=2)
    assert (report.steps, report.useful_pairs) == (3, 1)
    assert report.agreement_rate == pytest.approx(2 / 3)
    assert report.disagreement_rate == pytest.approx(1 / 2)
    two_to_one = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)
    assert report.entropy == pytest.approx((two_to_one + 0 + math.log(2)) / 3)
    # t0 x x x, t1 x x y: observed 2/3, expected (3 x 2 + 0 x 1) / 9 = 2/3
    assert report.kappa["t0", "t1"] == pytest.approx(0.0)
    # t0 x x, t2 y x: observed 1/2, expected (2 x 1) / 4
    assert report.kappa["t0", "t2"] == pytest.approx(0.0)
    # t1 x x, t2 y x: the same
    assert report.kappa["t1", "t2"] == pytest.approx(0.0)
    same = [StepVotes(str(i), None, votes("xy"[i % 2], "xy"[i % 2])) for i in range(4)]
    assert measure(same, quorum=2).kappa["t0", "t1"] == pytest.approx(1.0)
    opposed = [StepVotes(str(i), None, votes("xy"[i % 2], "yx"[i % 2])) for i in range(4)]
    assert measure(opposed, quorum=2).kappa["t0", "t1"] == pytest.approx(-1.0)


def test_nothing_to_measure() -> None:
    report = measure([], quorum=2)
    assert (report.steps, report.agreement_rate, report.entropy, report.kappa) == (0, 0.0, 0.0, {})


def independent(
    steps: int, accuracy: float, actions: int, teachers: int, draw: random.Random
) -> list[StepVotes]:
    """The right action of a step is 'right'; errors are uniform over the others."""

    def one() -> str:
        return "right" if draw.random() < accuracy else f"wrong{draw.randrange(actions - 1)}"

    return [StepVotes(str(i), "student", votes(*(one() for _ in range(teachers)))) for i in range(steps)]


EXACT = {(1, 1): (0.8, 1.0), (3, 2): (0.991, 0.904), (3, 3): (0.9999, 0.512)}
"""Precision and yield by (teachers, quorum), at accuracy 0.8 and 16 actions."""


@pytest.mark.parametrize(("teachers", "quorum"), list(EXACT))
def test_independent_errors_follow_the_exact_model(teachers: int, quorum: int) -> None:
    """Accuracy 0.8, 16 actions: precision and yield of the quorum within 2 points of the exact numbers."""
    p, wrong = 0.8, 0.2 / 15
    by_right = sum(comb(teachers, k) * p**k * (1 - p) ** (teachers - k) for k in range(quorum, teachers + 1))
    by_wrong = 15 * sum(
        comb(teachers, k) * wrong**k * (1 - wrong) ** (teachers - k) for k in range(quorum, teachers + 1)
    )
    assert (by_right / (by_right + by_wrong), by_right + by_wrong) == pytest.approx(
        EXACT[teachers, quorum], abs=5e-4
    )

    steps = independent(4000, p, 16, teachers, random.Random(0))
    found = [agreement for step in steps if (agreement := agree(step.votes, quorum=quorum))]
    assert len(found) / len(steps) == pytest.approx(by_right + by_wrong, abs=0.02)
    right = sum(agreement.action == "right" for agreement in found) / len(found)
    assert right == pytest.approx(by_right / (by_right + by_wrong), abs=0.02)


def test_teachers_who_look_are_told_from_those_who_do_not() -> None:
    """Each step has its own right action: teachers who know it stand out, random ones do not."""
    draw = random.Random(1)
    actions = [f"a{draw.randrange(8)}" for _ in range(60)]
    knowing = [
        StepVotes(
            str(i),
            "student",
            votes(*(right if draw.random() < 0.7 else f"a{draw.randrange(8)}" for _ in range(3))),
        )
        for i, right in enumerate(actions)
    ]
    result = permutation_test(knowing, quorum=2, draws=200)
    assert result.p_value == pytest.approx(1 / 201)
    assert result.observed > 2 * result.expected
    guessing = [
        StepVotes(str(i), "student", votes(*(f"a{draw.randrange(8)}" for _ in range(3)))) for i in range(60)
    ]
    assert permutation_test(guessing, quorum=2, draws=200).p_value > 0.05


def test_a_shared_favourite_is_no_signal() -> None:
    """All teachers say the same wherever they are asked: every step has a quorum, and chance gives it too."""
    steps = [StepVotes(str(i), "student", votes("x", "x", "x")) for i in range(20)]
    result = permutation_test(steps, quorum=2, draws=50)
    assert (result.observed, result.expected, result.p_value) == (20, 20.0, 1.0)


def test_the_test_is_calibrated() -> None:
    """Teachers who guess: p-values below 0.1 about one time in ten."""
    draw = random.Random(2)
    small = 0
    for trial in range(40):
        steps = [
            StepVotes(str(i), "s", votes(*(f"a{draw.randrange(4)}" for _ in range(3)))) for i in range(30)
        ]
        small += permutation_test(steps, quorum=2, draws=60, seed=trial).p_value < 0.1
    assert small <= 9  # binomial(40, 0.1): more than 9 has probability 0.005
