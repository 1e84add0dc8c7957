"""The unified loss: grpo + alpha sdpo + beta replay_dpo.

Each channel divides by its own global count (tokens, distilled tokens, pairs), so that none thins another
out. A channel of weight 0 costs nothing: its code is not entered, and loss and gradients of the others are
bit for bit what they are without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class Channel:
    """One term of the total: `compute` makes it, weighted or not is not its business."""

    name: str
    weight: float
    compute: Callable[[], Tensor]


@dataclass(slots=True, frozen=True)
class ComposerLoss:
    """The total, and each entered channel's unweighted loss, detached."""

    total: Tensor
    parts: dict[str, Tensor]


def composer_loss(channels: Sequence[Channel]) -> ComposerLoss:
    """The weighted sum of the channels, in their order.

    Raises:
        ValueError: two channels have one name, a weight is negative, or all weights are 0.
    """
    entered = _entered(channels)
    losses = [channel.compute() for channel in entered]
    total = _weighted(entered[0], losses[0])
    for channel, loss in zip(entered[1:], losses[1:], strict=True):
        total = total + _weighted(channel, loss)
    parts = {channel.name: loss.detach() for channel, loss in zip(entered, losses, strict=True)}
    return ComposerLoss(total, parts)


def _entered(channels: Sequence[Channel]) -> list[Channel]:
    names = [channel.name for channel in channels]
    if len(set(names)) != len(names):
        raise ValueError(f"channels have one name each, got {names}")
    if any(channel.weight < 0 for channel in channels):
        raise ValueError(f"weights are at least 0, got {[channel.weight for channel in channels]}")
    entered = [channel for channel in channels if channel.weight > 0]
    if not entered:
        raise ValueError(f"every channel has weight 0: {names}")
    return entered


def _weighted(channel: Channel, loss: Tensor) -> Tensor:
    return loss if channel.weight == 1.0 else channel.weight * loss
