"""The GRPO loss over a flat batch of sampled tokens, and its relatives.

Shape suffixes: N = tokens, S = sequences. All functions have SUM semantics with a divisor that is global over
data-parallel ranks and micro-batches, so that summing losses (and gradients) over any split of a batch gives
the same. One mask, made once, rules numerator, divisor and metrics.

Per token, with `r = pi / pi_old`, the advantage A and the importance weight `w`:

    clip    -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    cispo   -w sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi

(PPO, arXiv 1707.06347, equation 7, with the two ranges of DAPO, arXiv 2503.14476, equation 8; MiniMax-M1,
arXiv 2506.13585, equation 4.)

`pi_old` is the policy as the optimizer step begins and `w = min(pi_old / pi_generator, tis_cap)` the
truncated importance weight for a generator that is another implementation, or an older version; or `pi_old`
is the generator itself and `w = 1`. Under `ratio = "sequence"` the log-ratio of every token is the mean over
its sequence (GSPO, arXiv 2507.18071, equation 7): the mean and not the sum, so that equal policies give
exactly 1 at any length.

Against others: TRL and verl divide by what their `loss_type` / `loss_agg_mode` says within a micro-batch
unless told otherwise; here every divisor is global. TRL's default applies k3 in the loss; the default here is
k1 in the reward, as in the Composer 2 report. CISPO in TRL clips only above; a `clip_low` near 1 gives that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forge_composer.losses.config import Aggregation, GRPOConfig, KLEstimator

_MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this range, so that a broken token gives a large number and not an infinity."""


@dataclass(slots=True, frozen=True)
class GRPOLoss:
    """The loss and, per token, what it was made of. Everything but `loss` is detached, [N].

    Attributes:
        loss: scalar; this part of the batch's share of the global loss.
        ratio_N: pi / pi_old, of the token or of its sequence.
        importance_N: pi_prox / pi_generator, before the cap.
        weight_N: the importance weight that was applied: `min(importance, cap)`, or 1.
        clipped_low_N: True where the lower clip acts: it removes the gradient (`clip`, advantage < 0) or
            raises the weight (`cispo`).
        clipped_high_N: True where the upper clip acts (`clip`: advantage > 0).
        capped_N: True where the cap applied.
        kl_N: the estimator of the divergence from the reference; 0 without one.
    """

    loss: Tensor
    ratio_N: Tensor
    importance_N: Tensor
    weight_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    capped_N: Tensor
    kl_N: Tensor


def grpo_loss(
    logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    generator_logprobs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    *,
    config: GRPOConfig,
    divisor: float,
    weights_N: Tensor | None = None,
    sequence_N: Tensor | None = None,
    reference_logprobs_N: Tensor | None = None,
) -> GRPOLoss:
    """The policy-gradient loss of the module's docstring, summed and divided by `divisor`.

    Args:
        logprobs_N: under the policy being trained; carries the gradient. Float32.
        prox_logprobs_N: under the policy at the start of the optimizer step; detached here.
        generator_logprobs_N: as reported by the generator that sampled the tokens; detached here.
        advantages_N: advantage of each token.
        mask_N: bool; tokens outside take no part, whatever values they have (also non-finite ones).
        config: the options.
        divisor: global normaliser, see `aggregation_weights`; 0 counts as 1.
        weights_N: weight of each token in the sum; None is 1.
        sequence_N: int64, sequence of each token, in [0, N); for `ratio = "sequence"`.
        reference_logprobs_N: under the frozen reference policy; for `kl_coef` above 0.

    Returns:
        The loss and its parts. With no token inside the mask the loss is 0 with a zero gradient.

    Raises:
        ValueError: the options need an argument that is None.
    """
    # Outside the mask a token becomes log-ratio 0 and advantage 0 before any arithmetic: masking the product
    # afterwards would turn a non-finite value into NaN in the gradient.
    logprobs_N = torch.where(mask_N, logprobs_N, 0.0)
    prox_N = torch.where(mask_N, prox_logprobs_N.detach(), 0.0)
    generator_N = torch.where(mask_N, generator_logprobs_N.detach(), 0.0)
    advantages_N = torch.where(mask_N, advantages_N, 0.0)

    importance_N = _exp(prox_N - generator_N)
    decoupled = config.old_policy == "trainer"
    capped = decoupled and config.tis_cap > 0
    weight_N = importance_N.clamp(max=config.tis_cap) if capped else torch.ones_like(importance_N)

    log_ratio_N = logprobs_N - (prox_N if decoupled else generator_N)
    if config.ratio == "sequence":
        if sequence_N is None:
            raise ValueError("grpo_loss: ratio = 'sequence' needs sequence_N")
        log_ratio_N = _sequence_mean(log_ratio_N, mask_N, sequence_N)
    ratio_N = _exp(log_ratio_N)

    kl_N = torch.zeros_like(logprobs_N)
    if config.kl_coef > 0:
        if reference_logprobs_N is None:
            raise ValueError("grpo_loss: kl_coef above 0 needs reference_logprobs_N")
        reference_N = torch.where(mask_N, reference_logprobs_N.detach(), 0.0)
        kl_N = kl_estimate(logprobs_N, reference_N, config.kl_estimator)
        if config.kl_placement == "reward":
            advantages_N = advantages_N - config.kl_coef * kl_N.detach()

    per_token_N = -weight_N * _surrogate(ratio_N, logprobs_N, advantages_N, config)
    if config.kl_coef > 0 and config.kl_placement == "loss":
        per_token_N = per_token_N + config.kl_coef * kl_N
    if weights_N is not None:
        per_token_N = per_token_N * torch.where(mask_N, weights_N, 0.0)

    detached_N = ratio_N.detach()
    both = config.objective == "cispo"
    return GRPOLoss(
        loss=(per_token_N / (divisor or 1.0)).sum(),
        ratio_N=detached_N,
        importance_N=importance_N,
        weight_N=weight_N,
        clipped_low_N=(detached_N < 1.0 - config.clip_low) & mask_N & (both | (advantages_N < 0)),
        clipped_high_N=(detached_N > 1.0 + config.clip_high) & mask_N & (both | (advantages_N > 0)),
        capped_N=mask_N & (importance_N > config.tis_cap) if capped else torch.zeros_like(mask_N),
        kl_N=kl_N.detach(),
    )


def _exp(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _surrogate(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, config: GRPOConfig) -> Tensor:
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    if config.objective == "cispo":
        return clipped_N.detach() * advantages_N * logprobs_N
    return torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def _sequence_mean(values_N: Tensor, mask_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each token's mean over the tokens of its sequence that are inside the mask; 0 outside."""
    counts_S = torch.zeros_like(values_N).index_add(0, sequence_N, mask_N.to(values_N.dtype))
    sums_S = torch.zeros_like(values_N).index_add(0, sequence_N, torch.where(mask_N, values_N, 0.0))
    return torch.where(mask_N, (sums_S / counts_S.clamp(min=1.0))[sequence_N], 0.0)


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimates of KL(pi || pi_ref) from tokens sampled from pi, in nats, differentiable in `logprobs_N`.

    With d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL
    divergence", 2020). k1 and k3 are unbiased; k3 is never negative, and its variance explodes where the two
    policies have drifted apart. As a loss, k2 has the gradient of the divergence, k1 has none on average.
    """
    difference_N = logprobs_N - reference_logprobs_N
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return 0.5 * difference_N.square()
        case "k3":
            return _exp(-difference_N) - 1.0 + difference_N


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
