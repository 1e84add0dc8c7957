"""The generalized JSD in plain PyTorch: the definition in float64, and a chunked form for any device.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism), R = the rows of
a chunk.

The chunked form works on a few rows at a time, in scratch tensors that are small enough for the processor's
cache, so no [N, V] copy of the logits in float32 exists. Per pair of logits it takes three exponentials and
one logarithm, gradient included. All exponents are in base 2, where the vectorised exponential is several
times as fast as in base e.

With p, q the probabilities of student and teacher, x = log(q / p) and m = beta q + (1 - beta) p:

    log(p / m) = -log(1 + beta (exp(x) - 1))        log(q / m) = x + log(p / m)

Two equal rows have x = 0 and so exactly zero divergence and gradient. x is cut off where p no longer counts
beside q, in both formulas at once, so that neither overflows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_composer.kernels.row_chunks import (
    LN_2,
    LOG2_E,
    RowChunk,
    chunk_elements,
    exponentials,
    is_synchronous,
    relative_exponentials,
    row_chunks,
    statistics,
    widened,
    work_dtype,
    zero_left_out,
)

# --- the definition ---------------------------------------------------------------------------------------


def jsd_reference(
    student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, *, beta: float, temperature: float
) -> Tensor:
    """Per-token divergence from the definition, in float64, with autograd's own gradient.

    Same arguments and same edge rules as `forge_composer.kernels.generalized_jsd`; a dozen [N, V] tensors in
    float64.

    Returns:
        `per_token_N`, float64.
    """
    student_NV, teacher_NV = student_NV.double() / temperature, teacher_NV.detach().double() / temperature
    masked_s_NV, masked_t_NV = student_NV.isneginf(), teacher_NV.isneginf()
    live_N = (weight_N != 0) & ~masked_s_NV.all(dim=1) & ~masked_t_NV.all(dim=1)
    # A large negative number has probability 0 as -inf has, but its products with 0 are 0 and not NaN. The
    # substitution comes before any arithmetic: the gradient of an unused NaN would be NaN.
    log_p_NV = F.log_softmax(_substitute(student_NV, masked_s_NV, live_N), dim=1)
    log_q_NV = F.log_softmax(_substitute(teacher_NV, masked_t_NV, live_N), dim=1)
    infinite_N = torch.zeros_like(live_N)
    if beta == 0.0:
        value_N = _kl(log_q_NV, log_p_NV)
        infinite_N = (masked_s_NV & ~masked_t_NV).any(dim=1)
    elif beta == 1.0:
        value_N = _kl(log_p_NV, log_q_NV)
        infinite_N = (masked_t_NV & ~masked_s_NV).any(dim=1)
    else:
        log_m_NV = torch.logaddexp(log_q_NV + math.log(beta), log_p_NV + math.log1p(-beta))
        value_N = beta * _kl(log_q_NV, log_m_NV) + (1.0 - beta) * _kl(log_p_NV, log_m_NV)
    # Equal rows are at distance 0, which the mixture's logarithm misses by a rounding.
    apart_N = live_N & (student_NV != teacher_NV).any(dim=1)
    value_N = torch.where(apart_N & ~infinite_N, value_N.clamp_min(0.0), 0.0)
    return value_N.masked_fill(live_N & infinite_N, math.inf)


def _substitute(logits_NV: Tensor, masked_NV: Tensor, live_N: Tensor) -> Tensor:
    return torch.where(live_N[:, None], logits_NV.masked_fill(masked_NV, -1e30), 0.0)


def _kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=1)


# --- one chunk of rows -------------------------------------------------------------------------------------


class _Norms(NamedTuple):
    """Per row: 1 / sum of exponentials, of student and teacher, and log2 of the first sum over the second."""

    student_R1: Tensor
    teacher_R1: Tensor
    log2_ratio_R1: Tensor


def _terms(scratch: list[Tensor], norms: _Norms, beta: float) -> tuple[Tensor, Tensor]:
    """Value and inner sum of each row, [R].

    The scratch tensors hold z and 2^z of the student, then of the teacher. What the gradient needs is left in
    them: the exponentials (the student's alone for a mixture), and in the first the summands of the inner
    sum before normalisation, for a mixture negated.
    """
    z_RV, p_RV, x_RV, q_RV = scratch
    work = torch.finfo(z_RV.dtype)
    if 0.0 < beta < 1.0:
        x_RV.clamp_min_(work.min / 4)  # so that -inf in both rows does not make x NaN
        x_RV.sub_(z_RV).add_(norms.log2_ratio_R1)
        # Beyond this, p is no part of m in this precision; nor may 2^x overflow.
        x_RV.clamp_max_(min(10 - math.log2(work.eps) - math.log2(beta), math.log2(work.max) - 1))
        torch.exp2(x_RV, out=z_RV).sub_(1.0).mul_(beta).log1p_()  # log(m / p)
        if 1.0 - beta < work.eps:  # beta may round to 1 there, and the logarithm to -inf
            z_RV.clamp_min_(math.log1p(-beta))
        x_RV.sub_(z_RV, alpha=LOG2_E)  # log2(q / m)
        teacher_R = q_RV.mul_(x_RV).sum(dim=1).mul_(LN_2) * norms.teacher_R1[:, 0]
        inner_R = -z_RV.mul_(p_RV).sum(dim=1) * norms.student_R1[:, 0]
        return beta * teacher_R + (1.0 - beta) * inner_R, inner_R
    own_RV, norm_R1, sign = (q_RV, norms.teacher_R1, 1.0) if beta == 0.0 else (p_RV, norms.student_R1, -1.0)
    x_RV.sub_(z_RV).add_(norms.log2_ratio_R1).mul_(sign * LN_2)  # log(own / other)
    # NaN: masked in both rows. -inf: masked in own, which counts 0. inf: masked in other only, which makes
    # the row infinite even if own has underflowed.
    x_RV.nan_to_num_(nan=0.0, posinf=math.inf, neginf=0.0)
    infinite_R = x_RV.amax(dim=1).isposinf()
    x_RV.nan_to_num_(nan=math.nan, posinf=0.0)
    inner_R = torch.mul(own_RV, x_RV, out=z_RV).sum(dim=1) * norm_R1[:, 0]
    return inner_R.masked_fill(infinite_R, math.inf), inner_R


def _write_gradient(
    chunk: RowChunk, norms: _Norms, inner_R: Tensor, factor_R: Tensor, beta: float, out_NV: Tensor
) -> None:
    """factor * d value / d (logits / temperature), from what `_terms` left."""
    summands_RV, p_RV, _, q_RV = chunk.scratch
    inner_R1, factor_R1 = inner_R[:, None], factor_R[:, None]
    if beta == 0.0:  # p - q
        grad_RV = p_RV.mul_(norms.student_R1).sub_(q_RV.mul_(norms.teacher_R1))
    elif beta == 1.0:  # p (log(p / q) - inner)
        grad_RV = torch.addcmul(summands_RV, p_RV, inner_R1, value=-1.0, out=p_RV)
        factor_R1 = factor_R1 * norms.student_R1
    else:  # (1 - beta) p (log(p / m) - inner)
        grad_RV = torch.addcmul(summands_RV, p_RV, inner_R1, out=p_RV)
        factor_R1 = factor_R1 * norms.student_R1 * (beta - 1.0)
    if isinstance(chunk.rows, slice) and out_NV.dtype == grad_RV.dtype:
        torch.mul(grad_RV, factor_R1, out=out_NV[chunk.rows])
    else:
        out_NV[chunk.rows] = grad_RV.mul_(factor_R1).to(out_NV.dtype)


# --- the functions of a backend ----------------------------------------------------------------------------


def jsd_torch(
    student_NV: Tensor,
    teacher_NV: Tensor,
    weight_N: Tensor,
    *,
    beta: float,
    temperature: float,
    need_grad: bool,
    grad_out: Tensor | None,
) -> Tensor:
    """Per-token divergence of whole rows, and its gradient in the same pass.

    Args:
        student_NV: [N, V], any floating dtype.
        teacher_NV: [N, V], any floating dtype.
        weight_N: rows of weight 0 are left out; the gradient is scaled by the weight.
        beta: 0 to 1, see `generalized_jsd`.
        temperature: divides the logits.
        need_grad: whether to make the gradient.
        grad_out: [N, V], takes weight * d value / d student; may be the student itself.

    Returns:
        `per_token_N`, float32 or float64.
    """
    per_token_N = torch.zeros(len(weight_N), dtype=work_dtype(student_NV, teacher_NV), device=weight_N.device)
    if need_grad and grad_out is not None:
        zero_left_out(grad_out, weight_N)
    for chunk in row_chunks((student_NV, teacher_NV), weight_N, scratch=4):
        sum_s_R, sum_t_R = (
            relative_exponentials(widened(logits_RV, scratch[0]), temperature, *scratch)[1]
            for logits_RV, scratch in zip(chunk.read, (chunk.scratch[:2], chunk.scratch[2:]), strict=True)
        )
        dead_R = (sum_s_R == 0) | (sum_t_R == 0)
        sum_s_R1, sum_t_R1 = (torch.where(dead_R, 1.0, total_R)[:, None] for total_R in (sum_s_R, sum_t_R))
        norms = _Norms(1.0 / sum_s_R1, 1.0 / sum_t_R1, sum_s_R1.log2() - sum_t_R1.log2())
        value_R, inner_R = _terms(chunk.scratch, norms, beta)
        value_R = value_R.clamp_min(0.0) + 0.0 * norms.log2_ratio_R1[:, 0]  # NaN if a logit is
        value_R = torch.where(dead_R, 0.0, value_R)
        per_token_N[chunk.rows] = value_R
        if need_grad and grad_out is not None:
            weight_R = weight_N[chunk.rows].to(value_R.dtype)
            factor_R = torch.where(dead_R | value_R.isinf(), 0.0, weight_R / temperature)
            _write_gradient(chunk, norms, inner_R, factor_R, beta, grad_out)
    return per_token_N


def row_statistics(student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, temperature: float) -> Tensor:
    """Per row of both: the highest of logits / temperature, and the sum of exponentials relative to it.

    Returns:
        `stats_4N`: student's highest and sum, teacher's highest and sum; -inf and 0 for rows that are left
        out or have no column.
    """
    stats_4N = weight_N.new_zeros((4, len(weight_N)), dtype=work_dtype(student_NV, teacher_NV))
    stats_4N[0::2] = -math.inf
    for chunk in row_chunks((student_NV, teacher_NV), weight_N, scratch=2):
        for first, logits_RV in ((0, chunk.read[0]), (2, chunk.read[1])):
            logits_RV = widened(logits_RV, chunk.scratch[0])
            highest_R, sum_R = statistics(logits_RV, temperature, *chunk.scratch)
            stats_4N[first, chunk.rows], stats_4N[first + 1, chunk.rows] = highest_R, sum_R
    return stats_4N


def row_sums(
    student_NV: Tensor,
    teacher_NV: Tensor,
    weight_N: Tensor,
    log_norm_2N: Tensor,
    beta: float,
    temperature: float,
) -> Tensor:
    """This shard's part of each row's value, and of the inner sum that the gradient subtracts.

    Args:
        student_NV: this shard's columns.
        teacher_NV: this shard's columns.
        weight_N: rows of weight 0 are left out.
        log_norm_2N: logsumexp of logits / temperature over the whole vocabulary, student's and teacher's, in
            float64.
        beta: as everywhere.
        temperature: as everywhere.

    Returns:
        `sums_2N`. The inner sum is that of p log(p / m), for beta = 1 of p log(p / q) where it is finite; for
        beta = 0 the gradient needs none.
    """
    sums_2N = torch.zeros_like(log_norm_2N, dtype=work_dtype(student_NV, teacher_NV))
    for chunk in row_chunks((student_NV, teacher_NV), weight_N, scratch=4):
        norms = _fill(chunk, log_norm_2N, temperature)
        sums_2N[0, chunk.rows], sums_2N[1, chunk.rows] = _terms(chunk.scratch, norms, beta)
    return sums_2N


def row_gradients(
    student_NV: Tensor,
    teacher_NV: Tensor,
    weight_N: Tensor,
    log_norm_2N: Tensor,
    inner_N: Tensor,
    value_N: Tensor,
    beta: float,
    temperature: float,
    out: Tensor,
) -> None:
    """Fill `out` with weight * d value / d student for this shard's columns.

    Args:
        student_NV: this shard's columns.
        teacher_NV: this shard's columns.
        weight_N: rows of weight 0 get a zero gradient and are not read.
        log_norm_2N: as for `row_sums`.
        inner_N: inner sum over the whole vocabulary.
        value_N: value over the whole vocabulary; rows where it is infinite get a zero gradient.
        beta: as everywhere.
        temperature: as everywhere.
        out: [N, V]; may be the student itself.
    """
    zero_left_out(out, weight_N)
    factor_N = torch.where(value_N.isinf(), 0.0, weight_N / temperature).to(value_N.dtype)
    for chunk in row_chunks((student_NV, teacher_NV), weight_N, scratch=4):
        norms = _fill(chunk, log_norm_2N, temperature)
        _terms(chunk.scratch, norms, beta)
        rows = chunk.rows
        _write_gradient(chunk, norms, inner_N[rows], factor_N[rows], beta, out)


def _fill(chunk: RowChunk, log_norm_2N: Tensor, temperature: float) -> _Norms:
    """z and 2^z of the student, then of the teacher, relative to the logarithm of the norm, rounded."""
    exact_2R1 = (log_norm_2N[:, chunk.rows] * temperature)[:, :, None]
    shift_2R1 = exact_2R1.to(chunk.scratch[0].dtype)
    for side, (z_RV, exp_RV) in enumerate((chunk.scratch[:2], chunk.scratch[2:])):
        exponentials(widened(chunk.read[side], z_RV), shift_2R1[side], temperature, z_RV, exp_RV)
    rest_2R1 = ((exact_2R1 - shift_2R1) / temperature).to(shift_2R1.dtype)
    inverse_2R1 = (-rest_2R1).exp()
    return _Norms(inverse_2R1[0], inverse_2R1[1], (rest_2R1[0] - rest_2R1[1]) * LOG2_E)


def scale_rows_(grad_NV: Tensor, factor_N: Tensor) -> None:
    """Multiply each row by its factor, in place; rows whose factor is exactly 1 are left alone.

    Where the host cannot see which they are without waiting, they are multiplied by 1.
    """
    count, width = grad_NV.shape
    if not count or not width:
        return
    if is_synchronous(grad_NV.device):
        factors = factor_N.tolist()
        for row in (factor_N != 1).nonzero()[:, 0].tolist():
            grad_NV[row].mul_(factors[row])
        return
    height = max(1, chunk_elements(grad_NV.device) // width)  # mixed dtypes: the product may make a copy
    for start in range(0, count, height):
        rows = slice(start, start + height)
        grad_NV[rows].mul_(factor_N[rows, None])
