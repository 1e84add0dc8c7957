"""Which targets are chosen: 20 of two steps, two kinds and two sources."""

from __future__ import annotations

from typing import Any

import pytest

from forge_composer.hints.records import Target
from forge_composer.inspection.records import InspectionError, StepTarget
from forge_composer.inspection.selection import Selection

TARGETS = [
    StepTarget(
        1 + number // 10,
        Target(f"r{number:02d}", 0, ("low_reward", "test_failed")[number % 2], "x", "ab"[number % 3 == 0]),
    )
    for number in range(20)
]


def chosen(**options: Any) -> list[StepTarget]:
    selection = Selection(**options)
    return selection.to_measure(selection.fitting(TARGETS))


def test_random_choice_is_fixed_by_the_seed_and_in_the_order_of_the_run() -> None:
    first = chosen(limit=6, seed=3)
    assert len(first) == 6
    assert first == chosen(limit=6, seed=3) == sorted(first, key=TARGETS.index)
    assert first != chosen(limit=6, seed=4)
    assert {entry.target.rollout_id for seed in range(40) for entry in chosen(limit=6, seed=seed)} == {
        entry.target.rollout_id for entry in TARGETS
    }


def test_filters() -> None:
    assert chosen(step=2, kind="low_reward") == TARGETS[10::2]
    assert chosen(source="b", limit=100) == TARGETS[::3]
    assert chosen(step=1, kind="test_failed", source="b", limit=1) in ([TARGETS[3]], [TARGETS[9]])


def test_the_earliest() -> None:
    assert chosen(sort="step", limit=11) == TARGETS[:11]
    assert Selection(sort="step").in_words(20) == "the earliest"


@pytest.mark.parametrize("sort", ["jsd", "advantage"])
def test_sorting_by_a_measurement_measures_all(sort: Any) -> None:
    assert chosen(sort=sort, limit=2) == TARGETS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 7}, r"^--step 7: no target has it; there are targets of 2 steps from 1 to 2$"),
        ({"kind": "x"}, r"^--kind x: .* there are low_reward \(10\), test_failed \(10\)$"),
        ({"step": 1, "source": "judge"}, r"^--source judge: .* there are a \(6\), b \(4\)$"),
    ],
)
def test_no_fit_says_what_there_is(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InspectionError, match=message):
        chosen(**options)
