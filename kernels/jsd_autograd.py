"""The generalized JSD as a differentiable function, over any backend, on one rank or vocabulary-parallel.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism).

The gradient is made in the forward pass, while the logits are at hand, for the upstream gradient that the
caller announces as a weight per token. It then takes the place of the logits as what is kept for the backward
pass, which has nothing to do if the announcement was right.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _WholeRows(Protocol):
    def __call__(
        self,
        student_NV: Tensor,
        teacher_NV: Tensor,
        weight_N: Tensor,
        *,
        beta: float,
        temperature: float,
        need_grad: bool,
        grad_out: Tensor | None,
    ) -> Tensor: ...


class _RowStatistics(Protocol):
    def __call__(
        self, student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, temperature: float, /
    ) -> Tensor: ...


class _RowSums(Protocol):
    def __call__(
        self,
        student_NV: Tensor,
        teacher_NV: Tensor,
        weight_N: Tensor,
        log_norm_2N: Tensor,
        beta: float,
        temperature: float,
        /,
    ) -> Tensor: ...


class _RowGradients(Protocol):
    def __call__(
        self,
        student_NV: Tensor,
        teacher_NV: Tensor,
        weight_N: Tensor,
        log_norm_2N: Tensor,
        inner_N: Tensor,
        value_N: Tensor,
        beta: float,
        temperature: float,
        out: Tensor,
        /,
    ) -> None: ...


class _ScaleRows(Protocol):
    def __call__(self, grad_NV: Tensor, factor_N: Tensor, /) -> None: ...


class Backend(NamedTuple):
    """What a backend computes; `forge_composer.kernels.jsd_torch` documents each of the five."""

    whole_rows: _WholeRows
    row_statistics: _RowStatistics
    row_sums: _RowSums
    row_gradients: _RowGradients
    scale_rows_: _ScaleRows


class Divergence(NamedTuple):
    """Which divergence, and how it is computed."""

    backend: Backend
    beta: float
    temperature: float
    group: dist.ProcessGroup | None
    """The ranks that hold the other columns; None: the rows are whole."""

    def __call__(
        self, student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, grad_out: Tensor | None
    ) -> Tensor:
        """`per_token_N`; fills `grad_out` (or the student itself) with weight * d value / d student.

        Vocabulary-parallel: one all-gather of [4, N] and one all-reduce of [2, N].
        """
        need_grad = grad_out is not None
        if self.group is None:
            return self.backend.whole_rows(
                student_NV,
                teacher_NV,
                weight_N,
                beta=self.beta,
                temperature=self.temperature,
                need_grad=need_grad,
                grad_out=grad_out,
            )
        stats_4N = self.backend.row_statistics(student_NV, teacher_NV, weight_N, self.temperature)
        log_norm_2N = log_sums(stats_4N, self.group)
        live_N = ~log_norm_2N.isneginf().any(dim=0)
        weight_N = torch.where(live_N, weight_N, 0.0)
        log_norm_2N = torch.where(live_N, log_norm_2N, 0.0)
        inputs = (student_NV, teacher_NV, weight_N, log_norm_2N)
        sums_2N = self.backend.row_sums(*inputs, self.beta, self.temperature)
        dist.all_reduce(sums_2N, group=self.group)
        value_N = torch.where(weight_N != 0, sums_2N[0].clamp_min(0.0), 0.0)
        value_N = value_N.masked_fill(log_norm_2N.isnan().any(dim=0), torch.nan)  # a logit is
        if grad_out is not None:
            self.backend.row_gradients(*inputs, sums_2N[1], value_N, self.beta, self.temperature, grad_out)
        return value_N


def log_sums(stats_4N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """logsumexp over all shards of student and teacher, [2, N], from `row_statistics`; -inf for sums of 0.

    In float64: in float32 large logits would leave no bits for the logarithm.
    """
    stats_4N = stats_4N.double()
    shards_W4N = stats_4N[None]
    if group is not None:
        shards_W4N = stats_4N.new_empty((dist.get_world_size(group), *stats_4N.shape))
        dist.all_gather_into_tensor(shards_W4N.flatten(0, 1), stats_4N, group=group)
    # The lowest number instead of -inf, of ranks without columns and rows that are -inf everywhere.
    highest_W2N = shards_W4N[:, 0::2].clamp_min(torch.finfo(stats_4N.dtype).min)
    overall_2N = highest_W2N.amax(dim=0)
    return overall_2N + (shards_W4N[:, 1::2] * (highest_W2N - overall_2N).exp()).sum(dim=0).log()


class GeneralizedJSD(torch.autograd.Function):
    """Differentiable in its first argument: see `forge_composer.kernels.generalized_jsd`."""

    @staticmethod
    def forward(
        ctx: Any,
        student_NV: Tensor,
        teacher_NV: Tensor,
        weight_N: Tensor,
        divergence: Divergence,
        need_grad: bool,
        inplace_grad: bool,
    ) -> Tensor:
        """`per_token_N`, and the gradient for an upstream gradient of `weight_N`."""
        student_NV = student_NV.detach()
        grad_NV = None
        if need_grad:
            grad_NV = student_NV if inplace_grad else torch.empty_like(student_NV)
        per_token_N = divergence(student_NV, teacher_NV, weight_N, grad_NV)
        if need_grad and inplace_grad:
            torch.autograd.graph.increment_version(student_NV)
        ctx.grad_NV, ctx.weight_N, ctx.scale_rows_ = grad_NV, weight_N, divergence.backend.scale_rows_
        return per_token_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_per_token_N: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient that is there, for rows whose upstream gradient differs multiplied by the ratio."""
        if ctx.grad_NV is None:
            raise RuntimeError(
                "the gradient of generalized_jsd is made once, in the forward pass, and was given away by an "
                "earlier backward pass; run the forward pass again"
            )
        grad_NV, ctx.grad_NV = ctx.grad_NV, None
        factor_N = torch.where(ctx.weight_N == 0, 1.0, grad_per_token_N / ctx.weight_N)
        ctx.scale_rows_(grad_NV, factor_N)
        return grad_NV, None, None, None, None, None
