"""Metrics of one optimizer step, accumulated per micro-batch on the device and reduced once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge_composer.losses.grpo import GRPOLoss

_MEANS = (
    "train/entropy",
    "train/ratio_mean",
    "train/clip_low_frac",
    "train/clip_high_frac",
    "train/tis_mean",
    "train/tis_capped_frac",
    "train/behaviour_diff_mean",
    "train/kl_mean",
)
_SUMS = ("train/loss", "train/tokens_on_policy", "train/logprob_diff_mean")
_MAXIMA = ("train/ratio_max", "train/tis_max", "train/behaviour_diff_max", "train/logprob_diff_max")

_DISTILLED = (
    "sdpo/jsd",
    "sdpo/weight_mean",
    "sdpo/capped_frac",
    "sdpo/teacher_advantage",
    "sdpo/teacher_entropy",
)
"""Means over distilled tokens."""


class StepMetrics:
    """Sums and maxima over trained tokens.

    `tis_mean` is of the weights that were applied, `tis_max` of the ratios before the cap. Both differences
    are |trainer - generator| in nats: `behaviour_diff` over all trained tokens, so that the policy lag is in
    it; `logprob_diff` over those that the very weights being trained have sampled, where only the numerics
    of two implementations can differ. `kl_mean` is the estimate of the divergence from the reference policy,
    there only with a reference. Everything is 0 where there is no token.
    """

    def __init__(self, device: torch.device, *, with_kl: bool) -> None:
        self.with_kl = with_kl
        self.distilled = torch.zeros(len(_DISTILLED) + 1, dtype=torch.float64, device=device)
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
            terms.kl_N,
        )
        sums = [_masked(values_N, mask_N).sum() for values_N in per_token]
        sums += [
            terms.loss.detach().double(),
            on_policy_N.sum().double(),
            _masked(difference_N, on_policy_N).sum(),
        ]
        self.sums += torch.stack(sums)
        maxima = [
            _masked(values_N, mask_N).max() for values_N in (terms.ratio_N, terms.importance_N, difference_N)
        ]
        maxima.append(_masked(difference_N, on_policy_N).max())
        self.maxima = torch.maximum(self.maxima, torch.stack(maxima))

    @torch.no_grad()
    def add_distilled(self, loss: Tensor, *values: Tensor) -> None:
        """Take in the distilled tokens of one micro-batch.

        Args:
            loss: the channel's, without its weight.
            values: [N] each: divergence, weight, capped, the teacher's advantage (log pi_T - log pi_S of the
                sampled token: below 0 the teacher finds it less likely), the teacher's entropy.
        """
        totals = (values_N.double().sum() for values_N in values)
        self.distilled += torch.stack([loss.detach().double(), *totals])

    def reduce(
        self, group: dist.ProcessGroup | None, trained_tokens: int, distilled_tokens: int
    ) -> dict[str, float]:
        """Metrics over all data-parallel ranks, the same on each. A collective over `group`.

        Args:
            group: the data-parallel ranks.
            trained_tokens: of the global batch.
            distilled_tokens: of the global batch; 0 leaves out the metrics of the SDPO channel.
        """
        if group is not None:
            dist.all_reduce(self.sums, op=dist.ReduceOp.SUM, group=group)
            dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX, group=group)
        sums = self.sums.tolist()
        count = max(1, trained_tokens)
        metrics = {name: total / count for name, total in zip(_MEANS, sums, strict=False)}
        metrics |= zip(_SUMS, sums[len(_MEANS) :], strict=True)
        metrics |= zip(_MAXIMA, self.maxima.tolist(), strict=True)
        if distilled_tokens:
            if group is not None:
                dist.all_reduce(self.distilled, op=dist.ReduceOp.SUM, group=group)
            loss, *totals = self.distilled.tolist()
            metrics["sdpo/loss"] = loss
            metrics |= {
                name: total / distilled_tokens for name, total in zip(_DISTILLED, totals, strict=True)
            }
        if not self.with_kl:
            del metrics["train/kl_mean"]
        metrics["train/logprob_diff_mean"] /= max(1.0, metrics["train/tokens_on_policy"])
        return metrics


def _masked(values_N: Tensor, mask_N: Tensor) -> Tensor:
    return torch.where(mask_N, values_N.double(), 0.0)
