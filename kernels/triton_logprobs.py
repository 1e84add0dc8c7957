# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton compiles the kernels: Python's types mean nothing in them.
"""Log-probability and entropy of chosen tokens in Triton: what `token_logprobs` runs on CUDA devices.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism).

Forward, the logits are read once; backward, they are read once and the gradient is written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_composer.kernels.jsd_tiles import NEGATIVE_INFINITY, both_sums, load_tile, store_tile, store_zeros
from forge_composer.kernels.triton_launch import loop_shape, on_device_of, row_contiguous

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Stands for -inf where it is multiplied by a probability of 0."""


@triton.jit
def target_column(targets_N, row, vocab_start, width):
    """Column of a row's target in this part of the vocabulary; -1 if it is in another part."""
    column = tl.load(targets_N + row).to(tl.int64) - vocab_start
    return tl.where((column >= 0) & (column < width), column, -1).to(tl.int32)


@triton.jit
def statistics_kernel(
    logits_NV,
    targets_N,
    scale_N,
    highest_N,
    sums_3N,
    stride,
    count,
    width,
    vocab_start,
    BLOCK: tl.constexpr,
):
    """Per row of z = scale * logits: the highest h, sums of exp(z - h) and (z - h) exp(z - h), target's z."""
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_NV + row * stride
    scale = tl.load(scale_N + row)
    highest = tl.full((), NEGATIVE_INFINITY, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        z = load_tile(logits_V, start, width, BLOCK, True).to(tl.float32) * scale
        new = tl.maximum(highest, tl.max(z, axis=0))
        reference = tl.where(new == NEGATIVE_INFINITY, 0.0, new)
        # What the sums were relative to moves; before the first finite logit they are 0.
        move = tl.where(highest == NEGATIVE_INFINITY, 0.0, highest - reference)
        shrink = tl.exp2(move * LOG2_E)
        z -= reference
        exponentials = tl.exp2(z * LOG2_E)
        weighted = tl.fma(tl.fma(sums, move, weighted), shrink, tl.maximum(z, LOWEST) * exponentials)
        sums = tl.fma(sums, shrink, exponentials)
        highest = new
    total, total_weighted = both_sums(sums, weighted)
    column = target_column(targets_N, row, vocab_start, width)
    at_target = tl.load(logits_V + column, mask=column >= 0, other=0.0).to(tl.float32) * scale
    tl.store(highest_N + row, highest)
    tl.store(sums_3N + row, total)
    tl.store(sums_3N + count + row, total_weighted)
    tl.store(sums_3N + 2 * count + row, at_target)


@triton.jit
def gradient_kernel(
    logits_NV,
    targets_N,
    scale_N,
    norms_2N,
    grad_logprobs_N,
    gradient_NV,
    stride,
    stride_g,
    count,
    width,
    vocab_start,
    BLOCK: tl.constexpr,
):
    """([v = target] - p_v) * scale * upstream gradient; rows whose upstream gradient is 0 are not read."""
    row = tl.program_id(0).to(tl.int64)
    gradient_V = gradient_NV + row * stride_g
    scale = tl.load(scale_N + row)
    factor = tl.load(grad_logprobs_N + row) * scale
    if factor == 0.0:
        store_zeros(gradient_V, 0, width, BLOCK)
    else:
        highest = tl.load(norms_2N + row)
        log_sum = tl.load(norms_2N + count + row)
        column = target_column(targets_N, row, vocab_start, width)
        for start in range(0, width, BLOCK):
            z = load_tile(logits_NV + row * stride, start, width, BLOCK, True).to(tl.float32) * scale
            p = tl.exp2((z - highest - log_sum) * LOG2_E)
            chosen = start + tl.arange(0, BLOCK) == column
            store_tile(gradient_V, start, width, (tl.where(chosen, 1.0, 0.0) - p) * factor, BLOCK, True)


def logprob_statistics(
    logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, vocab_start: int
) -> tuple[Tensor, Tensor]:
    """What the log-probabilities and entropies of this part of the vocabulary are made of.

    Args:
        logits_NV: [N, V] bfloat16, float16 or float32.
        targets_N: [N] token ids in the whole vocabulary.
        scale_N: [N] float32, 1 / temperature.
        vocab_start: token id of the first column.

    Returns:
        `highest_N`, the highest of z = logits * scale, and `sums_3N`: the sums over the columns of
        exp(z - highest) and (z - highest) exp(z - highest), and z of the target, 0 if it is not among the
        columns. Both float32; -inf and 0 without columns.
    """
    count, width = logits_NV.shape
    highest_N = torch.full((count,), -torch.inf, dtype=torch.float32, device=logits_NV.device)
    sums_3N = torch.zeros((3, count), dtype=torch.float32, device=logits_NV.device)
    if not count or not width:
        return highest_N, sums_3N
    logits_NV = row_contiguous(logits_NV)
    with on_device_of(logits_NV):
        statistics_kernel[(count,)](
            logits_NV,
            targets_N.contiguous(),
            scale_N.contiguous(),
            highest_N,
            sums_3N,
            logits_NV.stride(0),
            count,
            width,
            vocab_start,
            **loop_shape(width),
        )
    return highest_N, sums_3N


def logprob_gradient(
    logits_NV: Tensor,
    targets_N: Tensor,
    scale_N: Tensor,
    norms_2N: Tensor,
    grad_logprobs_N: Tensor,
    vocab_start: int,
) -> Tensor:
    """Gradient of the log-probabilities in the logits, [N, V] in their dtype.

    Args:
        logits_NV: as for `logprob_statistics`, as the three others.
        targets_N: as there.
        scale_N: as there.
        norms_2N: [2, N] over the whole vocabulary: the highest of z, log of the sum of exp(z - highest).
        grad_logprobs_N: [N] upstream gradient. Rows where it is 0 get zeros and are not read.
        vocab_start: as there.
    """
    count, width = logits_NV.shape
    gradient_NV = torch.empty((count, width), dtype=logits_NV.dtype, device=logits_NV.device)
    if not count or not width:
        return gradient_NV
    logits_NV = row_contiguous(logits_NV)
    with on_device_of(logits_NV):
        gradient_kernel[(count,)](
            logits_NV,
            targets_N.contiguous(),
            scale_N.contiguous(),
            norms_2N.contiguous(),
            grad_logprobs_N.to(torch.float32).contiguous(),
            gradient_NV,
            logits_NV.stride(0),
            gradient_NV.stride(0),
            count,
            width,
            vocab_start,
            **loop_shape(width),
        )
    return gradient_NV
