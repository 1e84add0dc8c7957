"""Numbers made from rollouts: pure functions from records to named floats.

Names are `section/quantity`. Whatever depends on the clock is under `time/`, so that two synchronous runs
of one seed have equal metrics otherwise. A quantity that nothing was there to measure is left out, never
reported as 0.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from forge_composer.metrics.intervals import mean_interval
from forge_composer.types import Rollout, RolloutGroup, RolloutStatus

SUCCESS_REWARD = 1.0
"""A rollout with at least this reward is a success."""

LAG_PREFIX = "lag/tokens_"
"""`lag/tokens_k`: sampled tokens whose policy was k versions old when they were taken for training."""


def group_metrics(groups: Sequence[RolloutGroup], *, version: int) -> dict[str, float]:
    """Statistics of the groups that a batch was made from, whether or not they can be trained on.

    Args:
        groups: the groups.
        version: the trainer's policy version, from which lags are counted.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = reward_metrics(rollouts) | rollout_metrics(rollouts) | lag_metrics(rollouts, version=version)
    outcomes = [[is_success(r) for r in group.rollouts if r.reward is not None] for group in groups]
    stds = [statistics.pstdev(group.rewards) for group in groups if len(group.rewards) > 1]
    metrics |= {
        "groups/count": float(len(groups)),
        "groups/solved": float(sum(bool(outcome) and all(outcome) for outcome in outcomes)),
        "groups/unsolved": float(sum(bool(outcome) and not any(outcome) for outcome in outcomes)),
        "groups/zero_variance": float(sum(is_flat(group.rewards) for group in groups)),
    }
    if stds:
        metrics["reward/std_in_group"] = math.fsum(stds) / len(stds)
    return metrics


def evaluation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Statistics of an evaluation, all under `eval/`, with 95% confidence intervals."""
    rewards = _rewards(rollouts)
    interval = mean_interval(rewards)
    metrics = {"eval/" + key.replace("/", "_"): value for key, value in reward_metrics(rollouts).items()}
    metrics |= {
        "eval/" + key.split("/")[1]: value
        for key, value in rollout_metrics(rollouts).items()
        if key.startswith("rollout/")
    }
    metrics |= {"eval/tasks": float(len(rollouts)), "eval/scored": float(len(rewards))}
    if rewards:
        metrics |= {"eval/reward_low": interval.low, "eval/reward_high": interval.high}
    return metrics | rollout_times(rollouts)


def reward_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Mean, spread and success rate over the scorable rollouts; empty without any."""
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    rewards = _rewards(scored)
    if not rewards:
        return {}
    return {
        "reward/mean": math.fsum(rewards) / len(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/success_rate": sum(map(is_success, scored)) / len(scored),
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths, ends, feedback and malformed calls; times under `time/`."""
    metrics = {"rollout/count": float(len(rollouts))}
    if not rollouts:
        return metrics
    n = len(rollouts)
    tokens = [rollout.completion_tokens for rollout in rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    metrics |= {
        "rollout/truncated_share": sum(rollout.truncated for rollout in rollouts) / n,
        "rollout/failed_share": sum(r.status is RolloutStatus.FAILED for r in rollouts) / n,
        "rollout/turns_mean": len(turns) / n,
        "rollout/turns_max": float(max(len(rollout.turns) for rollout in rollouts)),
        "rollout/completion_tokens_mean": sum(tokens) / n,
        "rollout/completion_tokens_max": float(max(tokens)),
        "rollout/completion_tokens": float(sum(tokens)),
        "rollout/samples_mean": sum(turn.opens_sample for turn in turns) / n,
    }
    if turns:
        metrics["rollout/malformed_share"] = sum(t.action.error is not None for t in turns) / len(turns)
    kinds = Counter(note.kind for turn in turns for note in turn.feedback)
    metrics |= {f"feedback/{kind}": float(count) for kind, count in kinds.items()}
    return metrics | rollout_times(rollouts)


def rollout_times(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Seconds that rollouts spent, summed over rollouts that ran side by side."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return {
        "time/rollout_s": math.fsum(max(0.0, rollout.ended_at - rollout.started_at) for rollout in rollouts),
        "time/generate_s": math.fsum(turn.generate_s for turn in turns),
        "time/environment_s": math.fsum(turn.environment_s for turn in turns),
    }


def lag_metrics(rollouts: Iterable[Rollout], *, version: int) -> dict[str, float]:
    """Histogram, mean and maximum of the lag of sampled tokens, in policy versions."""
    counts = Counter(version - v for rollout in rollouts for turn in rollout.turns for v in turn.versions)
    total = counts.total()
    if not total:
        return {}
    metrics = {f"{LAG_PREFIX}{lag}": float(count) for lag, count in sorted(counts.items())}
    metrics["lag/mean"] = sum(lag * count for lag, count in counts.items()) / total
    metrics["lag/max"] = float(max(counts))
    return metrics


def lookup(metrics: Mapping[str, float], name: str) -> float | None:
    """The metric of that name; a name without a section stands for the largest of it in any section."""
    if name in metrics:
        return metrics[name]
    return max((value for key, value in metrics.items() if key.rpartition("/")[2] == name), default=None)


def is_success(rollout: Rollout) -> bool:
    """True if the rollout was scored and its reward is full."""
    return rollout.reward is not None and rollout.reward >= SUCCESS_REWARD


def is_flat(rewards: Sequence[float]) -> bool:
    """True if there are rewards and they are all equal: a group without any preference in it."""
    return bool(rewards) and max(rewards) == min(rewards)


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [rollout.reward for rollout in rollouts if rollout.reward is not None]
