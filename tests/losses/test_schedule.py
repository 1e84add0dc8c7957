"""Shares of a channel's weight, by hand."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from forge_composer.losses.config import WeightSchedule
from forge_composer.losses.schedule import scheduled_share


def shares(steps: int, **options: object) -> list[float]:
    schedule = WeightSchedule(**options)  # type: ignore[arg-type]
    return [scheduled_share(schedule, step, steps) for step in range(steps)]


def test_constant_by_default() -> None:
    assert shares(3) == [1.0, 1.0, 1.0]


def test_warm_up_has_something_in_the_first_step_and_all_in_the_last() -> None:
    assert shares(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_its_final_share() -> None:
    assert shares(6, decay="linear", decay_steps=4) == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert shares(3, decay="linear", decay_steps=2, final_share=0.5) == [1.0, 0.75, 0.5]


def test_cosine_decay() -> None:
    wanted = [1.0, *((1 + math.cos(math.pi * done)) / 2 for done in (0.25, 0.5, 0.75, 1.0))]
    assert shares(5, decay="cosine", decay_steps=4) == pytest.approx(wanted)


def test_the_smaller_one_counts_where_they_overlap() -> None:
    assert shares(4, warmup_steps=4, decay="linear", decay_steps=4) == [0.25, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("options", [{"decay": "linear"}, {"decay_steps": 3}])
def test_a_decay_needs_kind_and_steps(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="decay and decay_steps"):
        WeightSchedule(**options)  # type: ignore[arg-type]
