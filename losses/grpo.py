"""The GRPO loss over a flat batch of sampled tokens.

Shape suffix: N = tokens. All functions have SUM semantics with a divisor that is global over data-parallel
ranks and micro-batches, so that summing losses (and gradients) over any split of a batch gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["constant", "token_mean", "sequence_mean"]

_MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this range, so that a broken token gives a large number and not an infinity."""


@dataclass(slots=True, frozen=True)
class GRPOLoss:
    """The loss and, per token, what it was made of. Everything but `loss` is detached, [N].

    Attributes:
        loss: scalar; this part of the batch's share of the global loss.
        ratio_N: pi_theta / pi_prox.
        importance_N: pi_prox / pi_generator, before the cap.
        weight_N: the importance weight that was applied: `min(importance, cap)`, or 1 without a cap.
        clipped_low_N: True where the lower clip removes the token's gradient (advantage < 0).
        clipped_high_N: True where the upper clip does (advantage > 0).
        capped_N: True where the cap applied.
    """

    loss: Tensor
    ratio_N: Tensor
    importance_N: Tensor
    weight_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    capped_N: Tensor


def grpo_loss(
    logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    generator_logprobs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    *,
    divisor: float,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
    weights_N: Tensor | None = None,
) -> GRPOLoss:
    """Clipped policy-gradient loss with a truncated importance weight, summed and divided by `divisor`.

    Per token, with `r = exp(logp - logp_prox)` (PPO, arXiv 1707.06347, equation 7, the two clip ranges of
    DAPO, arXiv 2503.14476, equation 8) and `w = min(exp(logp_prox - logp_generator), tis_cap)`, which
    corrects for the generator being another implementation, or an older version, of the policy:

        loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Args:
        logprobs_N: under the policy being trained; carries the gradient. Float32.
        prox_logprobs_N: under the policy at the start of the optimizer step; detached here.
        generator_logprobs_N: as reported by the generator that sampled the tokens; detached here.
        advantages_N: advantage of each token.
        mask_N: bool; tokens outside take no part, whatever values they have (also non-finite ones).
        divisor: global normaliser, see `aggregation_weights`; 0 counts as 1.
        clip_low: lower clip range of the ratio.
        clip_high: upper clip range of the ratio.
        tis_cap: cap of the importance weight; 0 switches the weight off.
        weights_N: weight of each token in the sum; None is 1.

    Returns:
        The loss and its parts. With no token inside the mask the loss is 0 with a zero gradient.
    """
    # Outside the mask a token becomes log-ratio 0 and advantage 0 before any arithmetic: masking the product
    # afterwards would turn a non-finite value into NaN in the gradient.
    logprobs_N = torch.where(mask_N, logprobs_N, 0.0)
    prox_N = torch.where(mask_N, prox_logprobs_N.detach(), 0.0)
    generator_N = torch.where(mask_N, generator_logprobs_N.detach(), 0.0)
    advantages_N = torch.where(mask_N, advantages_N, 0.0)

    ratio_N = (logprobs_N - prox_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    importance_N = (prox_N - generator_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    weight_N = importance_N.clamp(max=tis_cap) if tis_cap > 0 else torch.ones_like(importance_N)

    clipped_ratio_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token_N = -weight_N * torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
    if weights_N is not None:
        per_token_N = per_token_N * torch.where(mask_N, weights_N, 0.0)

    detached_N = ratio_N.detach()
    return GRPOLoss(
        loss=(per_token_N / (divisor or 1.0)).sum(),
        ratio_N=detached_N,
        importance_N=importance_N,
        weight_N=weight_N,
        clipped_low_N=(detached_N < 1.0 - clip_low) & (advantages_N < 0),
        clipped_high_N=(detached_N > 1.0 + clip_high) & (advantages_N > 0),
        capped_N=mask_N & (importance_N > tis_cap) if tis_cap > 0 else torch.zeros_like(mask_N),
    )


def aggregation_weights(
    aggregation: Aggregation,
    sequence_weights_N: Tensor,
    *,
    num_rollouts: int,
    trained_tokens: int,
    max_completion_tokens: int,
) -> tuple[Tensor | None, float]:
    """Token weights and the global divisor of an aggregation; the arguments of `grpo_loss`.

    - `constant`: sum over tokens / (rollouts x longest completion). Dr. GRPO, arXiv 2503.20783, section 3.2:
      a token weighs the same in a short and in a long completion, and in every batch.
    - `token_mean`: sum over tokens / trained tokens. DAPO, arXiv 2503.14476, section 3.3.
    - `sequence_mean`: mean over rollouts of the mean over their tokens. GRPO, arXiv 2402.03300, equation 3.

    Args:
        aggregation: which.
        sequence_weights_N: 1 / (trained tokens of the token's rollout).
        num_rollouts: rollouts with a trained token in the global batch.
        trained_tokens: trained tokens of the global batch, after all masks.
        max_completion_tokens: most tokens that a rollout may sample.
    """
    match aggregation:
        case "constant":
            return None, float(num_rollouts * max_completion_tokens)
        case "token_mean":
            return None, float(trained_tokens)
        case "sequence_mean":
            return sequence_weights_N, float(num_rollouts)
