"""The generalized JSD over the K likeliest tokens of one side, with or without a bucket for all others.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism), K = tokens of
the support, C = categories that are compared (K, or K + 1 with the bucket), R = the rows of a chunk.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from forge_composer.kernels.dispatch import check_arguments, generalized_jsd, vocabulary_shards
from forge_composer.kernels.jsd_autograd import log_sums
from forge_composer.kernels.row_chunks import (
    exponentials,
    row_chunks,
    statistics,
    work_dtype,
    zero_left_out,
)


def topk_jsd(
    student_NV: Tensor,
    teacher_NV: Tensor,
    *,
    k: int,
    support: Literal["student", "teacher"],
    tail: bool,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_weight_N: Tensor | None = None,
) -> Tensor:
    """Divergence, token by token, of two distributions that are known on K tokens only.

    The K tokens with the highest logits of the student or of the teacher are categories of their own. With
    `tail` all other tokens together are one more category, so the probabilities are those of the full softmax
    and the divergence is a lower bound of `generalized_jsd` (the data-processing inequality). Without it both
    distributions are renormalised over the K tokens.

    - SDPO (arXiv 2601.20802, code of the authors): support "student", K = 20 or 100, tail on or off. There
      the tail's probability is 1 minus the sum of the others, held above 1e-7; here it is a sum of its own,
      exact down to underflow.
    - OPSD (arXiv 2601.18734): support "teacher", tail off.

    Which tokens make up the support is not differentiated. With K >= V this is `generalized_jsd`.

    Args:
        student_NV: as for `generalized_jsd`; DTensors too, with two collectives of [N, K] and [N] forward and
            none backward.
        teacher_NV: as for `generalized_jsd`.
        k: K, at least 1.
        support: whose likeliest tokens.
        tail: whether the other tokens count, as one category.
        beta: as for `generalized_jsd`.
        temperature: as for `generalized_jsd`.
        token_weight_N: as for `generalized_jsd`.

    Returns:
        `per_token_N`, as `generalized_jsd` returns it.

    Raises:
        ValueError: arguments do not fit each other.
    """
    check_arguments(student_NV, teacher_NV, beta, temperature, token_weight_N)
    if k < 1 or support not in ("student", "teacher"):
        raise ValueError(f"topk_jsd needs k >= 1 and support 'student' or 'teacher', got {k}, {support!r}")
    if k >= student_NV.shape[1]:
        return generalized_jsd(
            student_NV, teacher_NV, beta=beta, temperature=temperature, token_weight_N=token_weight_N
        )
    group: dist.ProcessGroup | None = None
    teacher_NV = teacher_NV.detach()
    if isinstance(student_NV, DTensor) and isinstance(teacher_NV, DTensor):
        student_NV, teacher_NV, group = vocabulary_shards(student_NV, teacher_NV)
    weight_N = token_weight_N
    if weight_N is None:
        weight_N = torch.ones(len(student_NV), device=student_NV.device)
    settings = _Settings(k, support, tail, temperature, group)
    apply: Any = _Categories.apply
    student_NC, teacher_NC = apply(student_NV, teacher_NV, weight_N, settings)
    return generalized_jsd(student_NC, teacher_NC, beta=beta, token_weight_N=weight_N)


class _Settings(NamedTuple):
    k: int
    support: str
    tail: bool
    temperature: float
    group: dist.ProcessGroup | None


class _Support(NamedTuple):
    """The K tokens: the column of each among this rank's (any, if it is not here), and both sides' logits."""

    columns_NK: Tensor
    here_NK: Tensor
    logits_2NK: Tensor


class _Categories(torch.autograd.Function):
    """The logit of each category: logsumexp of logits / temperature over its tokens, less the highest one's.

    Their softmax is the softmax over the vocabulary, summed over the tokens of each category. The derivative
    with respect to the logit of a token is the token's share of its category: 1 for a token of the support.
    """

    @staticmethod
    def forward(
        ctx: Any, student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        """[N, C] of student and teacher."""
        chosen = _choose(student_NV, teacher_NV, settings)
        work = chosen.logits_2NK.dtype
        highest_2N1 = chosen.logits_2NK.amax(dim=2, keepdim=True).clamp_min(torch.finfo(work).min)
        categories_2NC = (chosen.logits_2NK - highest_2N1) / settings.temperature
        tail_N = None
        if settings.tail:
            tail_2N = _tails(student_NV, teacher_NV, weight_N, chosen, settings)
            tail_N = tail_2N[0].to(work)
            relative_2N1 = tail_2N[:, :, None] - highest_2N1.double() / settings.temperature
            categories_2NC = torch.cat((categories_2NC, relative_2N1.to(work)), dim=2)
        student_NC, teacher_NC = categories_2NC.unbind()
        ctx.save_for_backward(student_NV, weight_N, chosen.columns_NK, chosen.here_NK, tail_N)
        ctx.temperature = settings.temperature
        ctx.mark_non_differentiable(teacher_NC)
        return student_NC, teacher_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """A token of the support takes its category's gradient, another one its share of the tail's."""
        student_NV, weight_N, columns_NK, here_NK, tail_N = ctx.saved_tensors
        grad_NC = grads[0].to(work_dtype(student_NV)) / ctx.temperature
        grad_NK = torch.where(here_NK, grad_NC[:, : here_NK.shape[1]], 0.0)
        grad_NV = torch.empty_like(student_NV)
        zero_left_out(grad_NV, weight_N)
        for chunk in row_chunks((student_NV,), weight_N, scratch=2):
            z_RV, grad_RV = chunk.scratch
            rows, columns_RK = chunk.rows, columns_NK[chunk.rows]
            if tail_N is None:
                grad_RV.zero_()
            else:
                # A tail without any token has no share to give: keep -inf minus -inf away.
                tail_R1 = tail_N[rows, None]
                shift_R1 = torch.where(tail_R1.isinf(), 0.0, tail_R1) * ctx.temperature
                _outside(chunk.read[0], columns_RK, here_NK[rows], out=z_RV)
                exponentials(z_RV, shift_R1, ctx.temperature, z_RV, grad_RV)
                grad_RV.mul_(grad_NC[rows, -1:])
            grad_NV[rows] = grad_RV.scatter_add_(1, columns_RK, grad_NK[rows]).to(grad_NV.dtype)
        return grad_NV, None, None, None


def _choose(student_NV: Tensor, teacher_NV: Tensor, settings: _Settings) -> _Support:
    """The K likeliest tokens of one side; every rank offers its own K, and all choose alike among them."""
    leader = 0 if settings.support == "student" else 1
    sides = (student_NV, teacher_NV)
    work = work_dtype(*sides)
    count, width = student_NV.shape
    offered = min(settings.k, width)
    columns_NK = sides[leader].topk(offered, dim=1).indices
    logits_2NK = torch.stack([side.gather(1, columns_NK).to(work) for side in sides])
    if settings.group is None:
        return _Support(columns_NK, torch.ones_like(columns_NK, dtype=torch.bool), logits_2NK)
    missing = settings.k - offered
    columns_NK = F.pad(columns_NK, (0, missing))
    logits_2NK = F.pad(logits_2NK, (0, missing), value=-torch.inf)
    world = dist.get_world_size(settings.group)
    all_WX = logits_2NK.new_empty((world, logits_2NK.numel()))
    dist.all_gather_into_tensor(all_WX, logits_2NK.flatten()[None], group=settings.group)
    all_2NWK = all_WX.view(world, 2, count, settings.k).permute(1, 2, 0, 3)
    offers_2NX = all_2NWK.reshape(2, count, world * settings.k)
    slots_NK = offers_2NX[leader].topk(settings.k, dim=1).indices
    owner_NK, slot_NK = slots_NK // settings.k, slots_NK % settings.k
    here_NK = (owner_NK == dist.get_rank(settings.group)) & (slot_NK < offered)
    chosen_2NK = offers_2NX.gather(2, slots_NK.expand(2, -1, -1))
    return _Support(columns_NK.gather(1, slot_NK), here_NK, chosen_2NK)


def _tails(
    student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, chosen: _Support, settings: _Settings
) -> Tensor:
    """logsumexp of logits / temperature over the tokens outside the support, [2, N]."""
    stats_4N = weight_N.new_zeros((4, len(weight_N)), dtype=work_dtype(student_NV, teacher_NV))
    for chunk in row_chunks((student_NV, teacher_NV), weight_N, scratch=2):
        z_RV, exp_RV = chunk.scratch
        rows = chunk.rows
        for first, logits_RV in ((0, chunk.read[0]), (2, chunk.read[1])):
            _outside(logits_RV, chosen.columns_NK[rows], chosen.here_NK[rows], out=z_RV)
            stats = statistics(z_RV, settings.temperature, z_RV, exp_RV)
            stats_4N[first, rows], stats_4N[first + 1, rows] = stats
    return log_sums(stats_4N, settings.group)


def _outside(logits_RV: Tensor, columns_RK: Tensor, here_RK: Tensor, out: Tensor) -> None:
    """The logits with -inf for the tokens of the support that are here."""
    # Adding leaves a column as it is if only tokens that are elsewhere point to it.
    out.copy_(logits_RV).scatter_add_(1, columns_RK, torch.where(here_RK, -torch.inf, 0.0).to(out.dtype))
