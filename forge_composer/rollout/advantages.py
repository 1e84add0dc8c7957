"""Group-relative advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STD_EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float | None], *, std: bool, leave_one_out: bool
) -> list[float | None]:
    """Advantage of each rollout of one group: its reward minus a baseline made of the group's rewards.

    Rewards of None (unscorable rollouts) are outside the baseline and get None. With fewer than two scorable
    rollouts there is nothing to compare with, and all get None. Equal rewards give exactly 0.

    Args:
        rewards: one per rollout.
        std: divide by the group's sample standard deviation (GRPO, arXiv 2402.03300, section 4.1.2); off is
            Dr. GRPO (arXiv 2503.20783).
        leave_one_out: the baseline is the mean of the other rollouts (RLOO, arXiv 2402.14740, equation 8),
            not of all.

    Raises:
        ValueError: a reward is not finite.
    """
    valid = [reward for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in valid):
        raise ValueError(f"rewards must be finite numbers or None, got {list(rewards)}")
    if len(valid) < 2:
        return [None] * len(rewards)
    if min(valid) == max(valid):  # the mean of equal floats can differ from them in the last bit
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(valid) / len(valid)
    # R_i - mean of the others = (R_i - mean of all) n / (n - 1)
    scale = len(valid) / (len(valid) - 1) if leave_one_out else 1.0
    if std:
        variance = math.fsum((reward - mean) ** 2 for reward in valid) / (len(valid) - 1)
        scale /= math.sqrt(variance) + _STD_EPSILON
    return [None if reward is None else (reward - mean) * scale for reward in rewards]
