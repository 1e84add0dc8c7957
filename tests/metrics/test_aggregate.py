"""Numbers made from rollouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.metrics.aggregate import (
    evaluation_metrics,
    group_metrics,
    lag_metrics,
    lookup,
    rollout_metrics,
)
from forge_composer.metrics.intervals import bootstrap_interval, mean_interval, wilson_interval
from forge_composer.metrics.timing import throughput, time_shares
from forge_composer.types import Feedback, ParsedAction, Rollout, RolloutGroup, RolloutStatus, Turn


def turn(tokens: int, version: int = 0, *, error: str | None = None, feedback: tuple[str, ...] = ()) -> Turn:
    return Turn(
        prompt_ids=[1, 2],
        completion_ids=[7] * tokens,
        logprobs=[-1.0] * tokens,
        versions=[version] * tokens,
        finish_reason="stop",
        action=ParsedAction("", error=error),
        feedback=[Feedback(kind, "") for kind in feedback],
        generate_s=2.0,
        environment_s=0.5,
    )


def rollout(
    reward: float | None, *turns: Turn, status: RolloutStatus = RolloutStatus.COMPLETED, seconds: float = 10.0
) -> Rollout:
    return Rollout(
        "r", 0, 0, "t", 0, [], [], list(turns), status, reward, started_at=100.0, ended_at=100.0 + seconds
    )


def group(*rewards: float | None) -> RolloutGroup:
    return RolloutGroup(0, "t", 0, [rollout(reward, turn(1)) for reward in rewards])


def test_group_statistics() -> None:
    groups = [group(1.0, 0.0), group(1.0, 1.0), group(0.0, None, 0.0), group(None, None), group(0.5, 0.5)]
    metrics = group_metrics(groups, version=0)
    assert metrics["reward/mean"] == pytest.approx(4.0 / 8)
    assert metrics["reward/success_rate"] == pytest.approx(3 / 8)
    assert metrics["reward/std"] == pytest.approx(float(np.std([1, 0, 1, 1, 0, 0, 0.5, 0.5])))
    assert metrics["reward/std_in_group"] == pytest.approx(0.5 / 4)
    assert metrics["groups/count"] == 5
    assert metrics["groups/solved"] == 1
    assert metrics["groups/unsolved"] == 2  # all zero, and all one half; the unscorable group is neither
    assert metrics["groups/zero_variance"] == 3


def test_an_unscorable_rollout_is_not_a_zero() -> None:
    assert group_metrics([group(1.0, None)], version=0)["reward/mean"] == 1.0
    assert not any(key.startswith("reward/") for key in group_metrics([group(None)], version=0))


def test_lengths_ends_and_feedback() -> None:
    metrics = rollout_metrics(
        [
            rollout(1.0, turn(3), turn(5, feedback=("test_failed", "test_failed"))),
            rollout(
                0.0, turn(2, error="bad", feedback=("malformed_call",)), status=RolloutStatus.TRUNCATED_TURNS
            ),
            rollout(0.0, turn(4), status=RolloutStatus.TRUNCATED_LENGTH),
            rollout(None, status=RolloutStatus.FAILED),
        ]
    )
    expected = {
        "rollout/count": 4,
        "rollout/truncated_share": 0.5,
        "rollout/failed_share": 0.25,
        "rollout/turns_mean": 1.0,
        "rollout/turns_max": 2,
        "rollout/completion_tokens_mean": 3.5,
        "rollout/completion_tokens_max": 8,
        "rollout/completion_tokens": 14,
        "rollout/samples_mean": 1.0,
        "rollout/malformed_share": 0.25,
        "feedback/test_failed": 2,
        "feedback/malformed_call": 1,
        "time/rollout_s": 40.0,
        "time/generate_s": 8.0,
        "time/environment_s": 2.0,
    }
    assert metrics == pytest.approx(expected)
    assert rollout_metrics([]) == {"rollout/count": 0.0}


def test_lag_histogram_counts_tokens() -> None:
    metrics = lag_metrics([rollout(1.0, turn(3, version=5), turn(1, version=3))], version=5)
    assert metrics == {"lag/tokens_0": 3, "lag/tokens_2": 1, "lag/mean": 0.5, "lag/max": 2}
    assert lag_metrics([rollout(None)], version=5) == {}


def test_evaluation_has_an_interval() -> None:
    metrics = evaluation_metrics([rollout(1.0, turn(2))] * 3 + [rollout(0.0, turn(4)), rollout(None)])
    assert metrics["eval/reward_mean"] == 0.75
    assert metrics["eval/reward_success_rate"] == 0.75
    assert (metrics["eval/tasks"], metrics["eval/scored"]) == (5, 4)
    wilson = wilson_interval(3, 4)
    assert (metrics["eval/reward_low"], metrics["eval/reward_high"]) == (wilson.low, wilson.high)
    assert metrics["eval/completion_tokens_mean"] == 2.0
    assert all(key.startswith(("eval/", "time/")) for key in metrics)
    assert "eval/reward_mean" not in evaluation_metrics([rollout(None)])


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263, and 0 of 20, 95%.
    interval = wilson_interval(81, 263)
    assert (interval.low, interval.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    interval = wilson_interval(0, 20)
    assert (interval.low, interval.high) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(20, 20).high == 1.0


def test_bootstrap_covers_the_normal_interval_and_repeats() -> None:
    values = list(np.random.default_rng(3).uniform(0, 1, 400))
    interval = bootstrap_interval(values)
    half = 1.96 * np.std(values) / math.sqrt(len(values))
    assert interval.mean == pytest.approx(np.mean(values))
    assert interval.low == pytest.approx(np.mean(values) - half, abs=0.004)
    assert interval.high == pytest.approx(np.mean(values) + half, abs=0.004)
    assert bootstrap_interval(values) == interval


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_intervals_hold_their_mean(values: list[float]) -> None:
    interval = mean_interval(values)
    assert min(values) - 1e-9 <= interval.mean <= max(values) + 1e-9
    assert 0 <= interval.low <= interval.high <= 1 + 1e-9
    assert interval.low - 0.35 <= interval.mean <= interval.high + 0.35


def test_no_value_gives_nan_and_not_zero() -> None:
    interval = mean_interval([])
    assert interval.n == 0
    assert all(map(math.isnan, (interval.mean, interval.low, interval.high)))


def test_time_shares() -> None:
    metrics = {
        "time/step_s": 10.0,
        "time/train_s": 4.0,
        "time/publish_s": 0.5,
        "time/update_s": 0.25,
        "time/verify_s": 0.25,
        "time/wait_s": 5.0,
        "time/rollout_s": 40.0,
        "time/generate_s": 30.0,
        "time/environment_s": 8.0,
        "rollout/count": 16.0,
        "rollout/completion_tokens": 900.0,
    }
    assert time_shares(metrics) == pytest.approx(
        {
            "time/share_train": 0.4,
            "time/share_sync": 0.1,
            "time/share_wait": 0.5,
            "time/share_generate": 0.75,
            "time/share_environment": 0.2,
        }
    )
    assert throughput(metrics) == {"time/tokens_per_s": 90.0, "time/rollouts_per_s": 1.6}
    assert time_shares({}) == throughput({}) == {}


def test_lookup_by_section_or_name() -> None:
    metrics = {"a/diff": 1.0, "b/diff": 2.0, "c/other": 3.0}
    assert lookup(metrics, "a/diff") == 1.0
    assert lookup(metrics, "diff") == 2.0
    assert lookup(metrics, "missing") is None
