"""Where the time goes.

Two clocks are kept apart. The trainer's: a step waits for a batch, trains, and brings the new weights to
the generators; these are shares of the step's wall time. The rollouts': each generates, waits for its
environment, and queues; these are shares of the rollouts' own time, which overlaps with the trainer's and
with each other.
"""

from __future__ import annotations

from collections.abc import Mapping

STEP_PARTS: Mapping[str, tuple[str, ...]] = {
    "train": ("time/train_s",),
    "sync": ("time/publish_s", "time/update_s", "time/verify_s"),
    "wait": ("time/wait_s",),
}
"""Shares of a step's wall time, and the seconds that each is made of."""

ROLLOUT_PARTS: Mapping[str, tuple[str, ...]] = {
    "generate": ("time/generate_s",),
    "environment": ("time/environment_s",),
}
"""Shares of the rollouts' time."""


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """`time/share_*` of one step from its seconds; what a step has no seconds for is left out."""
    shares = _shares(metrics, "time/step_s", STEP_PARTS)
    return shares | _shares(metrics, "time/rollout_s", ROLLOUT_PARTS)


def throughput(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sampled tokens and rollouts per second of a step's wall time."""
    seconds = metrics.get("time/step_s", 0.0)
    if seconds <= 0:
        return {}
    rates = {
        "time/tokens_per_s": "rollout/completion_tokens",
        "time/rollouts_per_s": "rollout/count",
    }
    return {name: metrics[count] / seconds for name, count in rates.items() if count in metrics}


def _shares(
    metrics: Mapping[str, float], total: str, parts: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    whole = metrics.get(total, 0.0)
    if whole <= 0:
        return {}
    return {
        f"time/share_{name}": sum(metrics.get(key, 0.0) for key in keys) / whole
        for name, keys in parts.items()
        if any(key in metrics for key in keys)
    }
