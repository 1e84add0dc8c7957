"""Metrics of one optimizer step, accumulated per micro-batch on the device and reduced once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge_composer.losses.grpo import GRPOLoss

_MEANS = (
    "entropy",
    "ratio/mean",
    "clip/low_frac",
    "clip/high_frac",
    "tis/mean",
    "tis/capped_frac",
    "logprob_diff/mean",
)
_SUMS = ("loss/grpo", "logprob_diff/on_policy_tokens")
_MAXIMA = ("ratio/max", "tis/max", "logprob_diff/max", "logprob_diff/on_policy_max")


class StepMetrics:
    """Sums and maxima over trained tokens.

    `tis/mean` is of the weights that were applied, `tis/max` of the ratios before the cap;
    `logprob_diff` is |trainer - generator|, and `on_policy` are the tokens that the very weights being
    trained have sampled. Everything is 0 where there is no token.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(_MEANS) + len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        terms: GRPOLoss,
        *,
        logprobs_N: Tensor,
        generator_logprobs_N: Tensor,
        entropy_N: Tensor,
        mask_N: Tensor,
        on_policy_N: Tensor,
    ) -> None:
        """Take in one micro-batch."""
        difference_N = (logprobs_N.detach() - generator_logprobs_N).abs()
        on_policy_N = on_policy_N & mask_N
        per_token = (
            entropy_N,
            terms.ratio_N,
            terms.clipped_low_N,
            terms.clipped_high_N,
            terms.weight_N,
            terms.capped_N,
            difference_N,
        )
        sums = [_masked(values_N, mask_N).sum() for values_N in per_token]
        sums += [terms.loss.detach().double(), on_policy_N.sum().double()]
        self.sums += torch.stack(sums)
        maxima = [
            _masked(values_N, mask_N).max() for values_N in (terms.ratio_N, terms.importance_N, difference_N)
        ]
        maxima.append(_masked(difference_N, on_policy_N).max())
        self.maxima = torch.maximum(self.maxima, torch.stack(maxima))

    def reduce(self, group: dist.ProcessGroup | None, trained_tokens: int) -> dict[str, float]:
        """Metrics over all data-parallel ranks, the same on each. A collective over `group`."""
        if group is not None:
            dist.all_reduce(self.sums, op=dist.ReduceOp.SUM, group=group)
            dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX, group=group)
        sums = self.sums.tolist()
        count = max(1, trained_tokens)
        metrics = {name: total / count for name, total in zip(_MEANS, sums, strict=False)}
        metrics |= zip(_SUMS, sums[len(_MEANS) :], strict=True)
        metrics |= zip(_MAXIMA, self.maxima.tolist(), strict=True)
        return metrics


def _masked(values_N: Tensor, mask_N: Tensor) -> Tensor:
    return torch.where(mask_N, values_N.double(), 0.0)
