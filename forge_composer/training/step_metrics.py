"""Metrics of one optimizer step, summed over micro-batches and data-parallel ranks.

Denominators are guarded: a batch without a trained token gives zeros, never NaN.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge_composer.losses.grpo import GRPOOutput

_MEANS = {
    "train/entropy": "entropy",
    "train/ratio_mean": "ratio",
    "train/clip_low_frac": "clipped_low",
    "train/clip_high_frac": "clipped_high",
    "train/tis_mean": "importance",
    "train/tis_capped_frac": "capped",
    "train/behaviour_diff_mean": "difference",
}
_MAXIMA = ("train/ratio_max", "train/tis_max", "train/behaviour_diff_max", "train/logprob_diff_max")
"""`behaviour_diff`: |trainer - generator| over all trained tokens, so the lag is in it; `logprob_diff`: over
those that the current version sampled, where only numerics can differ."""


class StepMetrics:
    """Collects sums and maxima on one rank; `reduce` makes them those of the global batch."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)
        self._device = device

    def add(
        self,
        output: GRPOOutput,
        *,
        logp_N: Tensor,
        entropy_N: Tensor,
        logp_generator_N: Tensor,
        on_policy_N: Tensor,
    ) -> None:
        """Take in one micro-batch. `on_policy_N`: tokens that the current version sampled."""
        difference_N = (logp_N - logp_generator_N).abs()
        tokens = {
            "entropy": entropy_N,
            "ratio": output.ratio_N,
            "clipped_low": output.clipped_low_N,
            "clipped_high": output.clipped_high_N,
            "importance": output.importance_N,
            "capped": output.capped_N,
            "difference": difference_N,
            "on_policy": on_policy_N,
            "count": torch.ones_like(logp_N),
        }
        for name, values in tokens.items():
            self._add(name, values.double().sum())
        self._add("loss", output.loss.detach().double())
        if logp_N.numel():
            worst = (output.ratio_N, output.importance_N, difference_N, difference_N * on_policy_N)
            self._maxima = torch.maximum(self._maxima, torch.stack([w.double().max() for w in worst]))

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = (
            self._sums.get(name, torch.zeros((), dtype=torch.float64, device=self._device)) + value
        )

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Values of the global batch, the same on every rank."""
        names = sorted(self._sums)
        sums = torch.stack([self._sums[name] for name in names])
        if group is not None:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
            dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX, group=group)
        total = dict(zip(names, sums.tolist(), strict=True))
        count = max(total["count"], 1.0)
        values = {key: total[name] / count for key, name in _MEANS.items()}
        values |= dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        return values | {
            "train/loss": total["loss"],
            "train/loss_grpo": total["loss"],
            "train/tokens": total["count"],
            "train/tokens_on_policy": total["on_policy"],
        }
