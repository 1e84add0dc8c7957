"""Metrics of one optimizer step, accumulated per micro-batch on the device and reduced once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge_composer.losses.grpo import GRPOLoss
from forge_composer.losses.replay_dpo import ReplayDPOLoss

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
_WITHOUT_GRPO = (
    "train/entropy",
    "train/behaviour_diff_mean",
    "train/behaviour_diff_max",
    "train/tokens_on_policy",
    "train/logprob_diff_mean",
    "train/logprob_diff_max",
)
"""What is known of tokens that are only distilled."""

_DISTILLED = (
    "sdpo/jsd",
    "sdpo/weight_mean",
    "sdpo/capped_frac",
    "sdpo/teacher_advantage",
    "sdpo/teacher_entropy",
)
"""Means over distilled tokens."""

_PAIRED = ("dpo/margin", "dpo/accuracy", "dpo/chosen", "dpo/rejected", "dpo/weight_mean")
"""Means over preference pairs."""


class StepMetrics:
    """Sums and maxima over trained tokens, distilled tokens and preference pairs.

    `tis_mean` is of the weights that were applied, `tis_max` of the ratios before the cap. Both differences
    are |trainer - generator| in nats: `behaviour_diff` over all trained tokens, so that the policy lag is in
    it; `logprob_diff` over those that the very weights being trained have sampled, where only the numerics
    of two implementations can differ. `kl_mean` is the estimate of the divergence from the reference policy,
    there only with a reference. Everything is 0 where there is no token. Without GRPO there is what can be
    said of the distilled tokens (entropy and differences), and nothing where there are none.

    `dpo/accuracy` is the share of pairs with a margin above 0, and says nothing about the policy's health:
    `dpo/chosen`, the mean log-ratio of the chosen sides, falls when a policy collapses while its margins
    still grow.
    """

    def __init__(self, device: torch.device, *, with_kl: bool, with_grpo: bool = True) -> None:
        self.with_kl, self.with_grpo = with_kl, with_grpo
        self.paired = torch.zeros(len(_PAIRED) + 1, dtype=torch.float64, device=device)
        self.distilled = torch.zeros(len(_DISTILLED) + 1, dtype=torch.float64, device=device)
        self.sums = torch.zeros(len(_MEANS) + len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        terms: GRPOLoss | None,
        *,
        logprobs_N: Tensor,
        generator_logprobs_N: Tensor,
        entropy_N: Tensor,
        mask_N: Tensor,
        on_policy_N: Tensor,
    ) -> None:
        """Take in one micro-batch; `terms` is None with GRPO off."""
        difference_N = (logprobs_N.detach() - generator_logprobs_N).abs()
        on_policy_N = on_policy_N & mask_N
        if terms is None:
            terms = _no_terms(mask_N)
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

    @torch.no_grad()
    def add_pairs(self, terms: ReplayDPOLoss, mask_P: Tensor) -> None:
        """Take in the preference pairs of one forward pass, those inside the mask."""
        per_pair = (terms.margin_P, terms.margin_P > 0, terms.chosen_P, terms.rejected_P, terms.weight_P)
        totals = [_masked(values_P, mask_P).sum() for values_P in per_pair]
        self.paired += torch.stack([terms.loss.detach().double(), *totals])

    def reduce(
        self, group: dist.ProcessGroup | None, trained_tokens: int, distilled_tokens: int, pairs: int = 0
    ) -> dict[str, float]:
        """Metrics over all data-parallel ranks, the same on each. A collective over `group`.

        Args:
            group: the data-parallel ranks.
            trained_tokens: of the global batch; with GRPO off the distilled ones, each once.
            distilled_tokens: of the global batch; 0 leaves out the metrics of the SDPO channel.
            pairs: of the global batch; 0 leaves out the metrics of the replay channel.
        """
        if group is not None:
            dist.all_reduce(self.sums, op=dist.ReduceOp.SUM, group=group)
            dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX, group=group)
        sums = self.sums.tolist()
        count = max(1, trained_tokens)
        metrics = {name: total / count for name, total in zip(_MEANS, sums, strict=False)}
        metrics |= zip(_SUMS, sums[len(_MEANS) :], strict=True)
        metrics |= zip(_MAXIMA, self.maxima.tolist(), strict=True)
        if not self.with_kl:
            del metrics["train/kl_mean"]
        metrics["train/logprob_diff_mean"] /= max(1.0, metrics["train/tokens_on_policy"])
        if not self.with_grpo:
            metrics = {name: metrics[name] for name in _WITHOUT_GRPO} if trained_tokens else {}
        if distilled_tokens:
            metrics |= _channel("sdpo/loss", _DISTILLED, self.distilled, distilled_tokens, group)
        if pairs:
            metrics |= _channel("dpo/loss", _PAIRED, self.paired, pairs, group)
            metrics["dpo/pairs"] = float(pairs)
        return metrics


def _channel(
    loss_name: str, names: tuple[str, ...], sums: Tensor, count: int, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """A channel's loss and means over `count` items of all ranks."""
    if group is not None:
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    loss, *totals = sums.tolist()
    return {loss_name: loss} | {name: total / count for name, total in zip(names, totals, strict=True)}


def _no_terms(mask_N: Tensor) -> GRPOLoss:
    """What GRPO makes of nothing."""
    zeros_N = torch.zeros_like(mask_N, dtype=torch.float32)
    return GRPOLoss(zeros_N.sum(), *[zeros_N] * 7)


def _masked(values_N: Tensor, mask_N: Tensor) -> Tensor:
    return torch.where(mask_N, values_N.double(), 0.0)
