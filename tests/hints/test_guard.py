"""The guard against collapse, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from forge_composer.config.hints import GuardConfig
from forge_composer.hints.guard import CollapseError, CollapseGuard


def make_guard(**options: Any) -> CollapseGuard:
    return CollapseGuard(GuardConfig(**({"window": 2} | options)))


def feed(guard: CollapseGuard, name: str, *values: float) -> list[str | None]:
    return [guard.step({name: value}) for value in values]


def test_means_of_a_window_against_the_first_one() -> None:
    """First window 0.1; the last two means are 0.3, at the limit, and 0.35."""
    guard = make_guard(max_jsd_growth=3.0)
    *quiet, warning = feed(guard, "sdpo/jsd", 0.05, 0.15, 0.2, 0.4, 0.3)
    assert quiet == [None] * 4
    assert warning is not None
    assert "teacher-student divergence 0.35 over 2 steps, against 0.1 at first" in warning
    assert guard.scale == 0.5


@pytest.mark.parametrize(
    ("name", "option", "first", "fine", "bad"),
    [
        ("train/entropy", "min_entropy", 1.0, 0.11, 0.09),
        ("train/entropy", "max_entropy", 1.0, 2.9, 3.1),
        ("rollout/completion_tokens_mean", "min_length", 100.0, 26.0, 24.0),
        ("rollout/completion_tokens_mean", "max_length", 100.0, 249.0, 251.0),
        ("sdpo/jsd", "max_jsd_growth", 0.01, 0.029, 0.031),
    ],
)
def test_each_limit(name: str, option: str, first: float, fine: float, bad: float) -> None:
    assert option in GuardConfig.model_fields
    guard = make_guard(window=1)
    assert feed(guard, name, first, fine) == [None, None]
    assert feed(guard, name, bad) != [None]


def test_a_lower_weight_gets_a_window_to_show_and_then_falls_further() -> None:
    """0.5, 0.25, 0.125, then under the floor of 0.1: off, and silent from then on."""
    guard = make_guard(window=2)
    scales = []
    feed(guard, "sdpo/jsd", 0.1, 0.1)
    for _ in range(10):
        feed(guard, "sdpo/jsd", 1.0)
        scales.append(guard.scale)
    assert scales == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0, 0.0, 0.0, 0.0]
    assert feed(guard, "sdpo/jsd", 9.0) == [None]


def test_metrics_that_are_not_there_are_not_judged() -> None:
    guard = make_guard(window=1)
    feed(guard, "sdpo/jsd", 0.1)
    assert guard.step({"train/entropy": 0.2}) is None
    assert guard.step({"train/entropy": 0.2, "sdpo/jsd": 0.2}) is None


def test_held_out_reward() -> None:
    """Against the best evaluation so far, not the last one."""
    guard = make_guard(max_reward_drop=0.1)
    assert [guard.evaluation(reward) for reward in (0.5, 0.45, 0.6, 0.52)] == [None] * 4
    warning = guard.evaluation(0.49)
    assert warning is not None
    assert "0.490" in warning
    assert "0.600" in warning
    assert guard.scale == 0.5


def test_stopping_gives_the_reason() -> None:
    guard = make_guard(action="stop", window=1)
    feed(guard, "train/entropy", 1.0)
    with pytest.raises(CollapseError, match=r"entropy 0\.01 over 1 steps, against 1 at first"):
        feed(guard, "train/entropy", 0.01)
    guard.evaluation(0.9)
    with pytest.raises(CollapseError, match="held-out reward"):
        guard.evaluation(0.1)


def test_off_does_nothing() -> None:
    guard = make_guard(action="off", window=1)
    assert feed(guard, "train/entropy", 1.0, 0.0) == [None, None]
    assert (guard.evaluation(0.9), guard.evaluation(0.1), guard.scale) == (None, None, 1.0)
