"""The generalized JSD in Triton: one interface, several schedules of the same arithmetic.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism).

docs/kernels.md explains the schedules and what limits them. The kernels run on CUDA devices, and on CPU in
Triton's interpreter if `TRITON_INTERPRET=1` was set before this module was imported.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from forge_composer.kernels import jsd_kernels
from forge_composer.kernels.jsd_schedules import LOG2_E, Schedule, constants, plan_row
from forge_composer.kernels.triton_launch import loop_shape, on_device_of, row_contiguous

HARDWARE = isinstance(jsd_kernels.row_kernel, triton.JITFunction) and torch.version.hip is None
"""Whether the kernels may use NVIDIA's instructions: they are compiled, not interpreted, and not for AMD."""


def jsd_triton(
    student_NV: Tensor,
    teacher_NV: Tensor,
    weight_N: Tensor,
    *,
    beta: float,
    temperature: float,
    need_grad: bool,
    grad_out: Tensor | None,
    schedule: Schedule = "auto",
) -> Tensor:
    """Per-token divergence of whole rows, and its gradient.

    Args:
        student_NV: [N, V] bfloat16, float16 or float32. Rows may have any stride; if the columns of a row do
            not lie side by side, a copy is made.
        teacher_NV: [N, V], likewise; may differ in dtype.
        weight_N: rows of weight 0 are not read; the gradient is scaled by the weight.
        beta: 0 to 1, see `generalized_jsd`.
        temperature: divides the logits.
        need_grad: whether to make the gradient.
        grad_out: [N, V], takes weight * d value / d student; may be the student itself.
        schedule: "staged": three passes over device memory. "resident": one pass, one program a row, up to
            16,384 columns. "cluster": one pass, one thread block cluster a row, up to 327,680 columns, on
            compute capability 9 or 10. "cooperative": one pass, several programs a row that wait for each
            other. "auto" is "resident" where it fits, else "staged".

    Returns:
        `per_token_N`, float32.

    Raises:
        ValueError: the schedule cannot work on these rows or on this device.
    """
    count, width = student_NV.shape
    if not count or not width:
        return torch.zeros(count, dtype=torch.float32, device=student_NV.device)
    plan = plan_row(schedule, width, student_NV.device)
    out = grad_out if need_grad else None
    student_NV, teacher_NV = row_contiguous(student_NV), row_contiguous(teacher_NV)
    if plan is None:
        norms_4N = _norms(student_NV, teacher_NV, weight_N, LOG2_E / temperature)
        sums_2N = _sums(student_NV, teacher_NV, weight_N, norms_4N, beta, temperature, whole=True)
        if out is not None:
            _gradients(
                student_NV, teacher_NV, weight_N, norms_4N, sums_2N[1], sums_2N[0], beta, temperature, out
            )
        return sums_2N[0]
    gradient_NV = student_NV if out is None else row_contiguous(out)  # the student is never written then
    value_N = torch.empty(count, dtype=torch.float32, device=student_NV.device)
    counters = partials_N6P = None
    if plan.cooperative:
        counters = torch.zeros(1 + 2 * count, dtype=torch.int32, device=student_NV.device)
        partials_N6P = torch.empty((count, 6, plan.programs), dtype=torch.float32, device=student_NV.device)
    divergence = constants(beta, temperature)
    with on_device_of(student_NV):
        jsd_kernels.row_kernel[(count * plan.programs,)](
            student_NV,
            teacher_NV,
            _vector(weight_N),
            value_N,
            gradient_NV,
            counters,
            partials_N6P,
            student_NV.stride(0),
            teacher_NV.stride(0),
            gradient_NV.stride(0),
            width,
            *divergence[1:],
            MODE=divergence.mode,
            GRADIENT=out is not None,
            HARDWARE=HARDWARE,
            **plan.options(),
        )
    if out is not None and gradient_NV is not out:
        out.copy_(gradient_NV)
    return value_N


# --- vocabulary-parallel -----------------------------------------------------------------------------------


def row_statistics(student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, temperature: float) -> Tensor:
    """Per row of both: the highest of logits / temperature, and the sum of exponentials relative to it.

    Returns:
        `stats_4N` float32: student's highest and sum, teacher's highest and sum; -inf and 0 for rows that are
        left out or have no column.
    """
    norms_4N = _norms(student_NV, teacher_NV, weight_N, LOG2_E / temperature)
    shift_2N, total_2N = norms_4N[0::2].double(), norms_4N[1::2]
    empty_2N = total_2N == 0.0
    highest_2N = torch.where(empty_2N, -math.inf, shift_2N / LOG2_E).float()
    # The shift is a float32 number in base 2, the highest logit one in base e: what rounding did to each.
    correction_2N = torch.exp2(shift_2N - highest_2N.double() * LOG2_E).float()
    sum_2N = torch.where(empty_2N, 0.0, total_2N * correction_2N)
    return torch.stack((highest_2N, sum_2N), dim=1).flatten(0, 1)


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
        log_norm_2N: logsumexp of logits / temperature over the whole vocabulary, student's and teacher's.
            float32, or float64 for full precision with logits in the thousands.
        beta: as everywhere.
        temperature: as everywhere.

    Returns:
        `sums_2N` float32. The inner sum is that of p log(p / m), for beta = 1 of p log(p / q); for beta = 0
        the gradient uses none.
    """
    norms_4N = _norms_of_logarithms(log_norm_2N)
    return _sums(student_NV, teacher_NV, weight_N, norms_4N, beta, temperature, whole=False)


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
    norms_4N = _norms_of_logarithms(log_norm_2N)
    _gradients(student_NV, teacher_NV, weight_N, norms_4N, inner_N, value_N, beta, temperature, out)


def scale_rows_(grad_NV: Tensor, factor_N: Tensor) -> None:
    """Multiply each row by its factor, in place; rows whose factor is exactly 1 are not touched."""
    count, width = grad_NV.shape
    if not count or not width:
        return
    rows_NV = row_contiguous(grad_NV)
    with on_device_of(rows_NV):
        jsd_kernels.scale_kernel[(count,)](
            rows_NV, _vector(factor_N), rows_NV.stride(0), width, **loop_shape(width)
        )
    if rows_NV is not grad_NV:
        grad_NV.copy_(rows_NV)


# --- the three passes of the staged schedule ---------------------------------------------------------------


def _vector(numbers_N: Tensor) -> Tensor:
    return numbers_N.to(torch.float32).contiguous()


def _norms_of_logarithms(log_norm_2N: Tensor) -> Tensor:
    """Shift and sum of student and teacher, as `_norms` makes them, from natural logarithms of the sums."""
    exact_2N = log_norm_2N.double() * LOG2_E
    empty_2N = exact_2N == -math.inf
    shift_2N = torch.where(empty_2N, 0.0, exact_2N).float()
    total_2N = torch.where(empty_2N, 0.0, torch.exp2(exact_2N - shift_2N.double())).float()
    return torch.stack((shift_2N, total_2N), dim=1).flatten(0, 1)


def _norms(student_NV: Tensor, teacher_NV: Tensor, weight_N: Tensor, scale: float) -> Tensor:
    count, width = student_NV.shape
    norms_4N = torch.zeros((4, count), dtype=torch.float32, device=student_NV.device)
    if not count or not width:
        return norms_4N
    student_NV, teacher_NV = row_contiguous(student_NV), row_contiguous(teacher_NV)
    with on_device_of(student_NV):
        jsd_kernels.statistics_kernel[(count,)](
            student_NV,
            teacher_NV,
            _vector(weight_N),
            norms_4N,
            student_NV.stride(0),
            teacher_NV.stride(0),
            count,
            width,
            scale,
            **loop_shape(width),
        )
    return norms_4N


def _sums(
    student_NV: Tensor,
    teacher_NV: Tensor,
    weight_N: Tensor,
    norms_4N: Tensor,
    beta: float,
    temperature: float,
    *,
    whole: bool,
) -> Tensor:
    count, width = student_NV.shape
    sums_2N = torch.zeros((2, count), dtype=torch.float32, device=student_NV.device)
    if not count or not width:
        return sums_2N
    student_NV, teacher_NV = row_contiguous(student_NV), row_contiguous(teacher_NV)
    divergence = constants(beta, temperature)
    with on_device_of(student_NV):
        jsd_kernels.sums_kernel[(count,)](
            student_NV,
            teacher_NV,
            _vector(weight_N),
            norms_4N,
            sums_2N,
            student_NV.stride(0),
            teacher_NV.stride(0),
            count,
            width,
            divergence.scale,
            divergence.share_s,
            divergence.share_t,
            MODE=divergence.mode,
            WHOLE=whole,
            HARDWARE=HARDWARE,
            **loop_shape(width),
        )
    return sums_2N


def _gradients(
    student_NV: Tensor,
    teacher_NV: Tensor,
    weight_N: Tensor,
    norms_4N: Tensor,
    inner_N: Tensor,
    value_N: Tensor,
    beta: float,
    temperature: float,
    out: Tensor,
) -> None:
    count, width = student_NV.shape
    if not count or not width:
        return
    student_NV, teacher_NV = row_contiguous(student_NV), row_contiguous(teacher_NV)
    gradient_NV = row_contiguous(out)
    divergence = constants(beta, temperature)
    with on_device_of(student_NV):
        jsd_kernels.gradients_kernel[(count,)](
            student_NV,
            teacher_NV,
            _vector(weight_N),
            norms_4N,
            _vector(inner_N),
            _vector(value_N),
            gradient_NV,
            student_NV.stride(0),
            teacher_NV.stride(0),
            gradient_NV.stride(0),
            count,
            width,
            *divergence[1:],
            MODE=divergence.mode,
            HARDWARE=HARDWARE,
            **loop_shape(width),
        )
    if gradient_NV is not out:
        out.copy_(gradient_NV)
