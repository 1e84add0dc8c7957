"""Self-distillation from a hinted context: SDPO on targeted turns.

The policy reads the context of a turn with a hint in it and is the teacher; without the hint it is the
student. Over the tokens of the targeted turns, as the student sampled them,

    loss = sum_n w_n JSD_beta(p_T,n || p_S,n) / distilled tokens
    w_n  = min(pi(y_n) / pi_generator(y_n), is_clip) x exp(-teacher_entropy_coef H_T,n)

(SDPO, arXiv 2601.20802; OPSD, arXiv 2601.18734; the divergence is `forge_composer.kernels.generalized_jsd`).
The weight is detached, the teacher gets no gradient, and the divisor counts the distilled tokens of the
global batch: this channel's own, so that neither it nor GRPO thins the other out.

Against others:

- SDPO's authors' code: the same divergence (its `alpha` is `divergence_beta`), top-K on the student's support
  with a tail bucket, and importance clip 2.0. It replaces the policy gradient instead of joining it, distils
  whole responses, and averages over samples within a micro-batch, where samples without a teacher thin the
  mean.
- OPSD: the same `beta`; its top-K is the teacher's, renormalised, without a tail; it has no importance
  weight, and an all-masked batch gives 0/0. Here that is 0.
- TRL's SDPOTrainer: (1 - w) policy + w distillation, a convex blend; here the sum is grpo + alpha sdpo. Its
  default is the sampled token only, and a mean per sequence before the mean over sequences.
- verl has no such loss.

Shape suffixes: N = distilled tokens, V = vocabulary, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forge_composer.kernels import generalized_jsd, linear_jsd, topk_jsd
from forge_composer.kernels.dispatch import BackendName
from forge_composer.losses.config import SDPOConfig

_MAX_LOG_RATIO = 20.0


@dataclass(slots=True, frozen=True)
class SDPOLoss:
    """The loss, and per token what it was made of (detached, [N]).

    Attributes:
        loss: scalar; this part of the batch's share of the global loss.
        per_token_N: divergence in nats, before weight and cap; 0 outside the mask.
        weight_N: importance weight x target's weight / divisor.
        capped_N: True where the cap removed the gradient.
    """

    loss: Tensor
    per_token_N: Tensor
    weight_N: Tensor
    capped_N: Tensor


def sdpo_token_weights(
    student_logprobs_N: Tensor,
    generator_logprobs_N: Tensor,
    mask_N: Tensor,
    *,
    config: SDPOConfig,
    divisor: float,
    extra_weight_N: Tensor | None = None,
    teacher_entropy_N: Tensor | None = None,
) -> Tensor:
    """Detached weight of each token: 0 outside the mask, else
    min(ratio, is_clip) x extra x exp(-teacher_entropy_coef H_T) / divisor.

    Args:
        student_logprobs_N: log-probability of the sampled token under the student.
        generator_logprobs_N: under the generator that sampled it.
        mask_N: bool; tokens outside take no part, whatever values they have.
        config: the options.
        divisor: distilled tokens of the global batch; 0 counts as 1.
        extra_weight_N: weight of each token's target; None is 1.
        teacher_entropy_N: entropy of the teacher, nats.

    Raises:
        ValueError: `teacher_entropy_coef` is set and the entropies are missing.
    """
    weight_N = torch.ones_like(student_logprobs_N)
    if config.is_clip > 0:
        log_ratio_N = torch.where(mask_N, (student_logprobs_N - generator_logprobs_N).detach(), 0.0)
        weight_N = log_ratio_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp().clamp(max=config.is_clip)
    if extra_weight_N is not None:
        weight_N = weight_N * extra_weight_N
    if config.teacher_entropy_coef > 0:
        if teacher_entropy_N is None:
            raise ValueError("teacher_entropy_coef needs the teacher's entropies")
        weight_N = weight_N * torch.exp(-config.teacher_entropy_coef * teacher_entropy_N.detach())
    return torch.where(mask_N, weight_N / (divisor or 1.0), 0.0)


def sdpo_loss(
    student_logits_NV: Tensor,
    teacher_logits_NV: Tensor,
    weight_N: Tensor,
    *,
    config: SDPOConfig,
    inplace_grad: bool = False,
    backend: BackendName | None = None,
) -> SDPOLoss:
    """The loss from logits.

    Args:
        student_logits_NV: carries the gradient.
        teacher_logits_NV: detached here.
        weight_N: from `sdpo_token_weights`; rows of weight 0 are not read.
        config: the options.
        inplace_grad: see `generalized_jsd`.
        backend: see `generalized_jsd`.
    """
    if config.top_k:
        per_token_N = topk_jsd(
            student_logits_NV,
            teacher_logits_NV,
            k=config.top_k,
            support=config.top_k_support,
            tail=config.top_k_tail,
            beta=config.divergence_beta,
            temperature=config.temperature,
            token_weight_N=weight_N,
        )
    else:
        per_token_N = generalized_jsd(
            student_logits_NV,
            teacher_logits_NV,
            beta=config.divergence_beta,
            temperature=config.temperature,
            token_weight_N=weight_N,
            inplace_grad=inplace_grad,
            backend=backend,
        )
    kept_N = per_token_N.clamp(max=config.per_token_cap) if config.per_token_cap > 0 else per_token_N
    return _result((kept_N * weight_N).sum(), per_token_N, weight_N, config)


def sdpo_loss_from_hidden(
    student_hidden_NH: Tensor,
    student_head_VH: Tensor,
    teacher_hidden_NH: Tensor,
    teacher_head_VH: Tensor,
    weight_N: Tensor,
    *,
    config: SDPOConfig,
    memory_budget: int,
    group: dist.ProcessGroup | None = None,
    backend: BackendName | None = None,
) -> SDPOLoss:
    """The same loss from hidden states and LM heads; logits of either side exist for one chunk at a time.

    Raises:
        ValueError: top-K is configured, which needs whole logits.
    """
    if config.top_k:
        raise ValueError("sdpo_loss_from_hidden works on the whole vocabulary: set top_k = 0")
    result = linear_jsd(
        student_hidden_NH,
        student_head_VH,
        teacher_hidden_NH,
        teacher_head_VH,
        beta=config.divergence_beta,
        temperature=config.temperature,
        token_weight_N=weight_N,
        per_token_cap=config.per_token_cap or None,
        memory_budget=memory_budget,
        group=group,
        backend=backend,
    )
    return _result(result.loss, result.per_token_N, weight_N, config)


def _result(loss: Tensor, per_token_N: Tensor, weight_N: Tensor, config: SDPOConfig) -> SDPOLoss:
    per_token_N = per_token_N.detach()
    capped = config.per_token_cap > 0
    capped_N = (
        per_token_N > config.per_token_cap if capped else torch.zeros_like(per_token_N, dtype=torch.bool)
    )
    return SDPOLoss(loss, per_token_N, weight_N, capped_N)
