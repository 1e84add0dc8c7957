"""Group-relative advantages by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.rollout.advantages import group_advantages


def test_mean_baseline() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], std=False, leave_one_out=False) == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out() -> None:
    """3 - mean(0, 0) = 3, 0 - mean(3, 0) = -1.5."""
    assert group_advantages([3.0, 0.0, 0.0], std=False, leave_one_out=True) == pytest.approx(
        [3.0, -1.5, -1.5]
    )


def test_standard_deviation() -> None:
    """Sample standard deviation of 1, 2, 3 is 1; of 0, 10, 20 is 10."""
    for rewards in ([1.0, 2.0, 3.0], [0.0, 10.0, 20.0]):
        advantages = group_advantages(rewards, std=True, leave_one_out=False)
        assert advantages == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


def test_unscorable_rollouts_are_outside() -> None:
    advantages = group_advantages([1.0, None, 0.0, None], std=False, leave_one_out=False)
    assert advantages == [0.5, None, -0.5, None]


@pytest.mark.parametrize("rewards", [[], [None], [1.0], [None, 1.0, None]])
def test_nothing_to_compare_with(rewards: list[float | None]) -> None:
    assert group_advantages(rewards, std=True, leave_one_out=True) == [None] * len(rewards)


@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_give_exactly_zero(std: bool, leave_one_out: bool) -> None:
    """0.1 three times has a mean that is not 0.1."""
    advantages = group_advantages([0.1, 0.1, None, 0.1], std=std, leave_one_out=leave_one_out)
    assert advantages == [0.0, 0.0, None, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_reward_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, bad], std=False, leave_one_out=False)


@given(st.lists(st.floats(-10, 10) | st.none(), min_size=2), st.booleans(), st.booleans())
def test_advantages_sum_to_zero(rewards: list[float | None], std: bool, leave_one_out: bool) -> None:
    advantages = group_advantages(rewards, std=std, leave_one_out=leave_one_out)
    assert [a is None for a in advantages] == [r is None for r in rewards] or set(advantages) == {None}
    assert math.fsum(a for a in advantages if a is not None) == pytest.approx(0.0, abs=1e-4)
