"""alpha of a step: the configured weight, its schedule, and the balance of the channels' gradients.

With Dr. GRPO's constant divisor a token's share of GRPO's gradient is far smaller than of SDPO's, and
division by the group's standard deviation changes it again: no fixed weight means the same in two runs. So
the sizes of the two gradients can be measured and alpha be set by them. They are measured where the channels
part, at the hidden states H [N, D] that the LM head reads: the gradient of each channel for a gain g [D] that
multiplies them,

    dL/dg = sum_n H_n * dL/dH_n,

is (up to the gain's own value) that of the weight of the policy's last norm, a parameter that both share. It
is D numbers a channel, a sum over all tokens like every parameter's gradient, and costs one product of [N,
D]."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_composer.losses.config import SDPOConfig
from forge_composer.losses.schedule import scheduled_share

CHANNELS = ("grpo", "sdpo")


class _Tap(torch.autograd.Function):
    """Passes hidden states on, and adds their product with the gradient to a sum, [D]."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, gain_D: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND)
        ctx.gain_D = gain_D
        return hidden_ND.view_as(hidden_ND)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (hidden_ND,) = ctx.saved_tensors
        ctx.gain_D += (hidden_ND.float() * grads[0].float()).sum(dim=0)
        return grads[0], None


class GradientGauge:
    """Norms of the channels' gradients in one optimizer step, over all ranks."""

    def __init__(self, width: int, device: torch.device) -> None:
        """`width` is the hidden size D."""
        self.gains_CD = torch.zeros(len(CHANNELS), width, device=device)
        self._tensor_parallel: dist.ProcessGroup | None = None

    def tap(self, hidden_ND: Tensor, channel: str, tensor_parallel: dist.ProcessGroup | None) -> Tensor:
        """The same hidden states; what a channel makes of them is measured."""
        self._tensor_parallel = tensor_parallel
        tapped: Tensor = _Tap.apply(hidden_ND, self.gains_CD[CHANNELS.index(channel)])
        return tapped

    def norms(
        self, data_parallel: dist.ProcessGroup | None, alpha: float, grpo_weight: float = 1.0
    ) -> tuple[float, float]:
        """Norms for GRPO and for SDPO, each without its weight; the same on all ranks. A collective.

        Args:
            data_parallel: its ranks.
            alpha: weight of SDPO in the total.
            grpo_weight: weight of GRPO in the total.
        """
        for group in (self._tensor_parallel, data_parallel):
            if group is not None:
                dist.all_reduce(self.gains_CD, group=group)
        grpo, sdpo = self.gains_CD.norm(dim=1).tolist()
        return (
            grpo / grpo_weight if grpo_weight > 0 else 0.0,
            sdpo / alpha if alpha > 0 else 0.0,
        )


class ChannelWeight:
    """alpha of each step. The same on every rank, since it depends on reduced numbers alone."""

    def __init__(self, config: SDPOConfig, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.ratio: float | None = None
        """Running ratio of the gradient norms, GRPO to SDPO; None before the first measurement."""

    @property
    def measures(self) -> bool:
        """Whether gradients are measured."""
        return self.config.balance == "grad_norm"

    def at(self, step: int, scale: float = 1.0) -> float:
        """alpha in a step. The first step of a balanced run, before any measurement, uses the plain weight.

        Args:
            step: the optimizer step, from 0.
            scale: what a guard leaves of it.
        """
        ratio = 1.0 if self.ratio is None or not self.measures else self.ratio
        return (
            self.config.weight * ratio * scale * scheduled_share(self.config.schedule, step, self.total_steps)
        )

    def observe(self, grpo_norm: float, sdpo_norm: float) -> None:
        """Take in one step's norms, both without their weights."""
        if not (grpo_norm > 0 and sdpo_norm > 0):
            return
        ratio = min(grpo_norm / sdpo_norm, self.config.balance_max)
        if self.ratio is None:
            self.ratio = ratio
        else:  # geometric, so that twice and half cancel out
            self.ratio *= (ratio / self.ratio) ** self.config.balance_rate
