"""The generalized JSD from hidden states and LM heads, without ever holding the logits of all tokens.

Shape suffixes: N = tokens, R = tokens of a chunk, H = hidden size (the teacher's may differ), V = vocabulary
(this rank's part of it under tensor parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_composer.kernels.dispatch import (
    BackendName,
    check_divergence,
    check_token_weight,
    find_backend,
    generalized_jsd,
)
from forge_composer.kernels.jsd_autograd import Divergence
from forge_composer.kernels.linear_chunks import MEMORY_BUDGET, WeightGradient, chunk_height, row_slices
from forge_composer.kernels.row_chunks import is_synchronous, work_dtype


@dataclass(slots=True, frozen=True)
class LinearJSD:
    """Weighted sum of divergences.

    Attributes:
        loss: scalar, sum over tokens of weight x min(divergence, cap); carries the gradient. Float32, or
            float64 for float64 inputs.
        per_token_N: the divergences without weight and cap, detached; 0 where the weight is 0.
    """

    loss: Tensor
    per_token_N: Tensor


def linear_jsd(
    student_hidden_NH: Tensor,
    student_weight_VH: Tensor,
    teacher_hidden_NH: Tensor,
    teacher_weight_VH: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_weight_N: Tensor | None = None,
    per_token_cap: float | None = None,
    memory_budget: int = MEMORY_BUDGET,
    group: dist.ProcessGroup | None = None,
    backend: BackendName | None = None,
) -> LinearJSD:
    """Sum of `weight * min(generalized_jsd, cap)` over tokens, with logits = hidden @ weight^T.

    The tokens are taken in chunks: logits of both sides, divergence, gradient over the student's logits, and
    from it the gradients of hidden states and weight, all in the forward pass (the approach of Liger's fused
    linear losses, arXiv 2410.10989, section 3.2). The backward pass multiplies them by the upstream scalar.

    Memory: a chunk has `memory_budget // (V * (bytes per student logit + bytes per teacher logit))` tokens,
    at least one; its two sets of logits are the only large tensors with V columns. Beyond it there are a few
    MiB of scratch space on CPU, and the gradients: [N, H] in the dtype of the hidden states, [V, H] in
    float32.

    Args:
        student_hidden_NH: [N, H], same dtype as `student_weight_VH`. May be frozen.
        student_weight_VH: [V, H]. Its gradient is accumulated in float32 and returned in its own dtype; none
            is made if it is frozen.
        teacher_hidden_NH: [N, H'], without gradient.
        teacher_weight_VH: [V, H'], without gradient; may be the student's own weight.
        beta: see `generalized_jsd`.
        temperature: see `generalized_jsd`.
        token_weight_N: [N]; None is 1. Rows of weight 0 leave no trace, even if their hidden states hold NaN,
            and on CPU take no work.
        per_token_cap: tokens with a larger divergence count as this much, and have no gradient.
        memory_budget: bytes for the logits of a chunk; under tensor parallelism the same on all ranks.
        group: tensor parallelism: the weights are this rank's rows of the vocabulary (any number of them,
            also none), hidden states and weights of tokens are the same on all ranks. Loss and divergences
            then cover the whole vocabulary, while the gradient of `student_hidden_NH` is THIS RANK'S PART OF
            A SUM over the group: the caller adds the parts up.
        backend: see `generalized_jsd`; "reference" holds the logits of all tokens, in float64.

    Raises:
        ValueError: arguments do not fit each other.
    """
    _check(student_hidden_NH, student_weight_VH, teacher_hidden_NH, teacher_weight_VH)
    check_divergence(beta, temperature)
    count, device = len(student_hidden_NH), student_hidden_NH.device
    check_token_weight(token_weight_N, count, device)
    work = work_dtype(student_weight_VH, teacher_weight_VH)
    rows = _LiveRows(token_weight_N)
    if token_weight_N is None:
        weight_N = torch.ones(count, dtype=work, device=device)
    else:
        weight_N = rows.select(token_weight_N.detach().to(work))
    student_hidden_NH, teacher_hidden_NH = map(rows.select, (student_hidden_NH, teacher_hidden_NH.detach()))
    teacher_weight_VH = teacher_weight_VH.detach()
    inputs = (student_hidden_NH, student_weight_VH, teacher_hidden_NH, teacher_weight_VH)
    if backend == "reference":
        loss, per_token_N = _reference(*inputs, weight_N, beta, temperature, per_token_cap, group)
        return LinearJSD(loss, rows.spread(per_token_N, count))
    width = _widest(len(student_weight_VH), device, group)
    row_bytes = width * (student_weight_VH.dtype.itemsize + teacher_weight_VH.dtype.itemsize)
    functions = find_backend(backend, device, work)
    settings = _Settings(
        divergence=Divergence(functions, float(beta), float(temperature), group),
        cap=per_token_cap,
        height=chunk_height(row_bytes, memory_budget),
        grad_hidden=student_hidden_NH.requires_grad and torch.is_grad_enabled(),
        grad_weight=student_weight_VH.requires_grad and torch.is_grad_enabled(),
    )
    apply: Any = _LinearJSD.apply
    loss, per_token_N = apply(*inputs, weight_N, settings)
    return LinearJSD(loss, rows.spread(per_token_N, count))


class _LiveRows:
    """The rows whose weight is not 0.

    Where the host would have to wait to know them, all rows, with zeros for the others.
    """

    def __init__(self, weight_N: Tensor | None) -> None:
        self._live_N = None if weight_N is None else weight_N.detach() != 0
        self._index_M: Tensor | None = None
        if self._live_N is not None and is_synchronous(self._live_N.device):
            if not self._live_N.all():
                self._index_M = self._live_N.nonzero()[:, 0]
            self._live_N = None

    def select(self, values: Tensor) -> Tensor:
        """The rows of [N] or [N, H]; differentiable."""
        if self._index_M is not None:
            return values[self._index_M]
        if self._live_N is not None:
            return torch.where(self._live_N.view(-1, *[1] * (values.ndim - 1)), values, 0.0)
        return values

    def spread(self, per_token_M: Tensor, count: int) -> Tensor:
        """[N] from the selected rows' results, with 0 for the others."""
        if self._index_M is None:
            return per_token_M
        return per_token_M.new_zeros(count).index_copy_(0, self._index_M, per_token_M)


def _check(
    student_hidden_NH: Tensor, student_weight_VH: Tensor, teacher_hidden_NH: Tensor, teacher_weight_VH: Tensor
) -> None:
    tensors = (student_hidden_NH, student_weight_VH, teacher_hidden_NH, teacher_weight_VH)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    fits = (
        all(tensor.ndim == 2 for tensor in tensors)
        and len(student_hidden_NH) == len(teacher_hidden_NH)
        and len(student_weight_VH) == len(teacher_weight_VH)
        and student_hidden_NH.shape[1] == student_weight_VH.shape[1]
        and teacher_hidden_NH.shape[1] == teacher_weight_VH.shape[1]
    )
    if not fits:
        raise ValueError(f"linear_jsd needs [N, H], [V, H], [N, H'], [V, H'], got {shapes}")
    for hidden, weight in (tensors[:2], tensors[2:]):
        if hidden.dtype != weight.dtype:
            raise ValueError(f"hidden states and weight differ in dtype: {hidden.dtype}, {weight.dtype}")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"tensors are on several devices: {[str(tensor.device) for tensor in tensors]}")


def _widest(width: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Columns of the widest shard: chunks are exchanged in step, so all ranks need the same."""
    if group is None:
        return width
    widest = torch.tensor(width, device=device)
    dist.all_reduce(widest, op=dist.ReduceOp.MAX, group=group)
    return int(widest)


def _reference(
    student_hidden_NH: Tensor,
    student_weight_VH: Tensor,
    teacher_hidden_NH: Tensor,
    teacher_weight_VH: Tensor,
    weight_N: Tensor,
    beta: float,
    temperature: float,
    cap: float | None,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Two linear layers and the definition, all tokens at once."""
    if group is not None:
        raise ValueError("the reference works on the whole vocabulary, not on a part of it")
    per_token_N = generalized_jsd(
        F.linear(student_hidden_NH, student_weight_VH),
        F.linear(teacher_hidden_NH, teacher_weight_VH),
        beta=beta,
        temperature=temperature,
        token_weight_N=weight_N,
        backend="reference",
    )
    capped_N = per_token_N if cap is None else per_token_N.clamp_max(cap)
    return (capped_N * weight_N).sum(), per_token_N.detach()


class _Settings(NamedTuple):
    divergence: Divergence
    cap: float | None
    height: int
    grad_hidden: bool
    grad_weight: bool


class _LinearJSD(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_hidden_NH: Tensor,
        student_weight_VH: Tensor,
        teacher_hidden_NH: Tensor,
        teacher_weight_VH: Tensor,
        weight_N: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        count, width = len(student_hidden_NH), len(student_weight_VH)
        height = min(settings.height, max(1, count))
        student_RV = student_hidden_NH.new_empty((height, width))
        teacher_RV = teacher_hidden_NH.new_empty((height, width))
        grad_hidden_NH = torch.zeros_like(student_hidden_NH) if settings.grad_hidden else None
        grad_weight = WeightGradient(student_weight_VH) if settings.grad_weight else None
        need_grad = settings.grad_hidden or settings.grad_weight
        per_token_N = torch.zeros_like(weight_N)
        for rows in row_slices(count, height):
            size = rows.stop - rows.start
            logits_RV = torch.mm(student_hidden_NH[rows], student_weight_VH.t(), out=student_RV[:size])
            torch.mm(teacher_hidden_NH[rows], teacher_weight_VH.t(), out=teacher_RV[:size])
            grad_RV = logits_RV if need_grad else None
            per_token_R = settings.divergence(logits_RV, teacher_RV[:size], weight_N[rows], grad_RV)
            per_token_N[rows] = per_token_R
            if grad_RV is None:
                continue
            if settings.cap is not None:
                factor_R = (per_token_R <= settings.cap).to(per_token_R.dtype)
                settings.divergence.backend.scale_rows_(grad_RV, factor_R)
            if grad_hidden_NH is not None:
                torch.mm(grad_RV, student_weight_VH, out=grad_hidden_NH[rows])
            if grad_weight is not None:
                grad_weight.add(grad_RV, student_hidden_NH[rows])
        ctx.grads = (grad_hidden_NH, grad_weight)
        ctx.mark_non_differentiable(per_token_N)
        capped_N = per_token_N if settings.cap is None else per_token_N.clamp_max(settings.cap)
        return (capped_N * weight_N).sum(), per_token_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "the gradients of linear_jsd are made once, in the forward pass, and were given away by an "
                "earlier backward pass; run the forward pass again"
            )
        (grad_hidden_NH, grad_weight), ctx.grads = ctx.grads, None
        if grad_hidden_NH is not None:
            grad_hidden_NH.mul_(grads[0])
        grad_weight_VH = None if grad_weight is None else grad_weight.total(grads[0])
        return grad_hidden_NH, grad_weight_VH, None, None, None, None
