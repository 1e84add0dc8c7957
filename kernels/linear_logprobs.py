"""Log-probability and entropy of chosen tokens from hidden states and an LM head, in chunks of tokens.

Shape suffixes: N = tokens, R = tokens of a chunk, H = hidden size, V = vocabulary (this rank's part of it
under tensor parallelism).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_composer.kernels.linear_chunks import MEMORY_BUDGET, WeightGradient, chunk_height, row_slices
from forge_composer.kernels.token_logprobs import _combine, _local_targets

_LOG2_E = 1.0 / math.log(2.0)


def linear_token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    memory_budget: int = MEMORY_BUDGET,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of logits = hidden @ weight^T, which are made in chunks and never held for all tokens.

    The backward pass makes them a second time: four matrix products where a linear layer has three, and no
    [N, V] logits and gradient in between.

    Memory: a chunk has `memory_budget // (V * bytes per token and column)` tokens, at least one, where a
    column takes the logit in the dtype of the weight and two float32 (float64) numbers. Beyond it there are
    the gradients: [N, H] in the dtype of the hidden states, [V, H] in float32.

    Args:
        hidden_NH: [N, H], same dtype as the weight. May be frozen.
        weight_VH: [V, H]. Read again in the backward pass, like a linear layer's. Its gradient is accumulated
            in float32 and returned in its own dtype; none is made if it is frozen.
        targets_N: [N] token ids in the whole vocabulary.
        temperature: one for all tokens, or [N].
        memory_budget: bytes for a chunk.
        group: tensor parallelism: `weight_VH` has this rank's rows of the vocabulary, the hidden states are
            the same on all ranks. The gradient of `hidden_NH` is then THIS RANK'S PART OF A SUM over the
            group.
        vocab_start: token id of the weight's first row.

    Returns:
        `logprobs_N` in nats, differentiable in hidden states and weight, and `entropy_N` in nats, without
        gradient; both float32 (float64 for float64 inputs).

    Raises:
        ValueError: arguments do not fit each other.
    """
    count = len(hidden_NH)
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden states must be [N, H] and the weight [V, H], got {tuple(hidden_NH.shape)} and "
            f"{tuple(weight_VH.shape)}"
        )
    if hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden states are {hidden_NH.dtype}, the weight {weight_VH.dtype}")
    if targets_N.shape != (count,):
        raise ValueError(f"targets_N must be [N] = [{count}], got {tuple(targets_N.shape)}")
    work = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
    scale_N = 1.0 / torch.as_tensor(temperature, dtype=work, device=hidden_NH.device)
    column_bytes = weight_VH.dtype.itemsize + 2 * work.itemsize
    height = chunk_height(len(weight_VH) * column_bytes, memory_budget)
    apply: Any = _LinearTokenLogprobs.apply
    logprobs_N, entropy_N = apply(
        hidden_NH, weight_VH, targets_N, scale_N.expand(count), height, vocab_start, group
    )
    return logprobs_N, entropy_N


class _Logits:
    """Makes scaled logits chunk by chunk, always in the same memory."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, scale_N: Tensor, height: int) -> None:
        self.hidden_NH, self.weight_VH, self.scale_N = hidden_NH, weight_VH, scale_N
        self.height = max(1, min(height, len(hidden_NH)))
        shape = (self.height, len(weight_VH))
        self.logits_RV = hidden_NH.new_empty(shape)
        self.z_RV = self.logits_RV if scale_N.dtype == hidden_NH.dtype else scale_N.new_empty(shape)

    def chunks(self) -> list[slice]:
        """The rows of each chunk; none if this rank has no columns."""
        return list(row_slices(len(self.hidden_NH), self.height)) if len(self.weight_VH) else []

    def scaled(self, rows: slice) -> Tensor:
        """logits / temperature in the working precision, in scratch memory."""
        size = rows.stop - rows.start
        logits_RV = torch.mm(self.hidden_NH[rows], self.weight_VH.t(), out=self.logits_RV[:size])
        return self.z_RV[:size].copy_(logits_RV).mul_(self.scale_N[rows, None])

    def narrowed(self, grad_RV: Tensor) -> Tensor:
        """A gradient in the dtype of the logits, in their memory."""
        return self.logits_RV[: len(grad_RV)].copy_(grad_RV)


class _LinearTokenLogprobs(torch.autograd.Function):
    """d logp / d z_v = ([v = target] - p_v) / temperature, taken on to hidden states and weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        scale_N: Tensor,
        height: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        count, width = len(hidden_NH), len(weight_VH)
        highest_N = scale_N.new_full((count,), -torch.inf)
        # Rows: sum of exp(z - highest), the same weighted by (z - highest), z of the target.
        sums_3N = scale_N.new_zeros((3, count))
        columns_N, inside_N = _local_targets(targets_N, vocab_start, width)
        logits = _Logits(hidden_NH, weight_VH, scale_N, height)
        exp_RV = torch.empty_like(logits.z_RV)
        for rows in logits.chunks():
            z_RV = logits.scaled(rows)
            at_target_R = z_RV.gather(1, columns_N[rows, None])[:, 0]
            sums_3N[2, rows] = torch.where(inside_N[rows], at_target_R, 0.0)
            highest_N[rows] = z_RV.amax(dim=1)
            z_RV.sub_(highest_N[rows, None])
            exps_RV = torch.mul(z_RV, _LOG2_E, out=exp_RV[: len(z_RV)]).exp2_()
            sums_3N[0, rows] = exps_RV.sum(dim=1)
            sums_3N[1, rows] = exps_RV.mul_(z_RV).sum(dim=1)
        if group is not None:
            highest_N, sums_3N = _combine(highest_N, sums_3N, group)
        log_sum_N = sums_3N[0].log()
        log_normaliser_N = highest_N + log_sum_N
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, scale_N, log_normaliser_N)
        ctx.height, ctx.vocab_start = height, vocab_start
        entropy_N = log_sum_N - sums_3N[1] / sums_3N[0]
        ctx.mark_non_differentiable(entropy_N)
        return sums_3N[2] - log_normaliser_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, scale_N, log_normaliser_N = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.zeros_like(hidden_NH) if need_hidden else None
        grad_weight = WeightGradient(weight_VH) if need_weight else None
        columns_N, inside_N = _local_targets(targets_N, ctx.vocab_start, len(weight_VH))
        grad_z_N = grads[0] * scale_N
        at_target_N = torch.where(inside_N, grad_z_N, 0.0)
        logits = _Logits(hidden_NH, weight_VH, scale_N, ctx.height)
        for rows in logits.chunks():
            p_RV = logits.scaled(rows).sub_(log_normaliser_N[rows, None]).mul_(_LOG2_E).exp2_()
            p_RV.mul_(-grad_z_N[rows, None])
            p_RV.scatter_add_(1, columns_N[rows, None], at_target_N[rows, None])
            grad_RV = logits.narrowed(p_RV)
            if grad_hidden_NH is not None:
                torch.mm(grad_RV, weight_VH, out=grad_hidden_NH[rows])
            if grad_weight is not None:
                grad_weight.add(grad_RV, hidden_NH[rows])
        grad_weight_VH = None if grad_weight is None else grad_weight.total()
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None
