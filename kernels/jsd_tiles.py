# mypy: ignore-errors
# Triton compiles these functions; Python's types mean nothing in them.
"""The arithmetic of the generalized JSD on tiles of a row, shared by the Triton kernels in `jsd_kernels`.

Shape suffix: B = columns of a tile.

Every schedule computes the same numbers with these functions. Exponents are in base 2, as in the hardware. Of
a row of logits x with the highest h and the sum S of 2^(scale x - shift):

    scale = log2(e) / temperature        shift = scale h        log2 p = (scale x - shift) - log2 S

`shift` and log2 S stay apart: their sum would lose the last bits of log2 p for logits of +-1e4. Products and
sums are contracted by explicit `tl.fma` only, so that student and teacher get bitwise the same treatment, and
equal rows come out exactly equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
FAR = tl.constexpr(1e30)
"""Stands for an infinite distance between two log-probabilities: 2^-FAR is 0, and 0 * FAR is 0."""

# --- tiles -------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(row, start, width, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Logits [B] in their own dtype; -inf beyond the last column, which then counts for nothing."""
    columns = start + tl.arange(0, BLOCK)
    if MASKED:
        return tl.load(row + columns, mask=columns < width, other=NEGATIVE_INFINITY)
    return tl.load(row + columns)


@triton.jit
def store_tile(row, start, width, values, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Write [B] into a row, in the row's dtype."""
    columns = start + tl.arange(0, BLOCK)
    values = values.to(row.dtype.element_ty)
    if MASKED:
        tl.store(row + columns, values, mask=columns < width)
    else:
        tl.store(row + columns, values)


@triton.jit
def store_zeros(row, start, stop, BLOCK: tl.constexpr):
    """Write 0 into the columns from start to stop of a row."""
    for first in range(start, stop, BLOCK):
        store_tile(row, first, stop, tl.zeros((BLOCK,), tl.float32), BLOCK, True)


@triton.jit
def shift_of(highest, scale):
    """What is subtracted from scale * x; 0 for a row that is -inf everywhere."""
    shift = highest * scale
    return tl.where(shift == NEGATIVE_INFINITY, 0.0, shift)


@triton.jit
def exponentials(tile, scale, shift):
    """2^(scale x - shift), float32."""
    return tl.exp2(tl.fma(tile.to(tl.float32), scale, -shift))


@triton.jit
def log2_probabilities(tile, scale, shift, log2_sum):
    """log2 p, float32; -inf for -inf."""
    return tl.fma(tile.to(tl.float32), scale, -shift) - log2_sum


@triton.jit
def log2_of_sum(total):
    """log2 S of a row; 0 for a row without any probability, which thus makes no NaN."""
    return tl.where(total == 0.0, 0.0, tl.log2(total))


@triton.jit
def log2_tile(x, HARDWARE: tl.constexpr):
    """log2 of numbers in (0, 1], exactly 0 at 1, within 2^-21.

    `tl.log2` is a polynomial of twenty instructions, half of what a pair of logits can afford at the memory's
    speed; the hardware's own logarithm is one. Its value at 1 is not documented: it is subtracted.
    """
    if HARDWARE:
        one = tl.full((1,), 1.0, tl.float32)
        at_x = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        at_1 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [one], tl.float32, True, 1)
        return at_x - at_1
    return tl.log2(x)


@triton.jit
def both_max(student, teacher):
    """Highest of each of two tiles, in one reduction."""
    return tl.split(tl.max(tl.join(student, teacher), axis=0))


@triton.jit
def both_sums(first, second):
    """Sum of each of two tiles, in one reduction."""
    return tl.split(tl.sum(tl.join(first, second), axis=0))


@triton.jit
def pair_terms(
    log_s,
    log_t,
    share_s,
    share_t,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Of a pair of log2-probabilities: a term of the value, p_s, a term g of the gradient.

    `value_of_sums` makes the value of the sums of both terms. The gradient is proportional to g - p_s inner,
    where inner is the sum of g over the vocabulary, or -1 for `teacher_kl`. Logarithms are in base 2.
    """
    if MODE == "mixture":
        # With hi the more probable of the two and d the distance, log(p_hi / m) = -log(1 + w_lo (2^-d - 1)).
        # -inf in both rows gives d = NaN, which the minimum drops (it returns the number), and p_hi = 0.
        distance = tl.minimum(tl.abs(log_s - log_t), FAR)
        student_high = log_s >= log_t
        p_high = tl.exp2(tl.maximum(log_s, log_t))
        low_over_high = tl.exp2(-distance)
        share_high = tl.where(student_high, share_s, share_t)
        share_low = tl.where(student_high, share_t, share_s)
        # share_high + share_low is exactly 1 in float32, see `jsd_schedules.mixture_shares`.
        log_high = -log2_tile(tl.fma(share_low, low_over_high, share_high), HARDWARE)
        p_low = p_high * low_over_high
        high = p_high * log_high
        low = p_low * (log_high - distance)
        term_t = tl.where(student_high, low, high)
        term_s = tl.where(student_high, high, low)
        return term_t, tl.where(student_high, p_high, p_low), term_s
    p_s = tl.exp2(log_s)
    p_t = tl.exp2(log_t)
    if MODE == "teacher_kl":
        value = kl_term(p_t, log_t, log_s)
        return value, p_s, -p_t
    value = kl_term(p_s, log_s, log_t)
    return value, p_s, value


@triton.jit
def kl_term(p, log_p, log_q):
    """p log2(p / q): 0 where p is 0; inf where only q is 0, even if p has underflowed."""
    gap = log_p - log_q
    term = tl.where(log_p == NEGATIVE_INFINITY, 0.0, p * gap)
    return tl.where(gap == INFINITY, INFINITY, term)


@triton.jit
def value_of_sums(value, inner, share_s, share_t, MODE: tl.constexpr):
    """Value in nats, of a row or a part of it, from the sums of what `pair_terms` returned."""
    if MODE == "mixture":
        value = share_t * value + share_s * inner
    return value * LN_2


# --- rows --------------------------------------------------------------------------------------------------


@triton.jit
def finished_value(value, total_s, total_t):
    """A row's value: at least 0, 0 without any probability, NaN if there was a NaN."""
    value = tl.maximum(value, 0.0)
    value = tl.where((total_s == 0.0) | (total_t == 0.0), 0.0, value)
    return tl.where((total_s != total_s) | (total_t != total_t), float("nan"), value)


@triton.jit
def gradient_factor(weight, slope, value, total_s, total_t):
    """Factor of a row's gradient: 0 where the value is infinite or there is no probability."""
    dead = (value == INFINITY) | (total_s == 0.0) | (total_t == 0.0)
    return tl.where(dead, 0.0, weight * slope)


@triton.jit
def gradients(p_s, term, inner, factor, MODE: tl.constexpr):
    """factor * (term - p_s * inner). A row of factor 0 may have infinite terms, except in a mixture."""
    gradient = tl.fma(-p_s, inner, term) * factor
    if MODE != "mixture":
        gradient = tl.where(factor == 0.0, 0.0, gradient)
    return gradient


@triton.jit
def inner_of(inner, value, MODE: tl.constexpr):
    """The number that `gradients` multiplies p_s with; NaN in a row whose value is NaN."""
    if MODE == "teacher_kl":
        inner = -1.0
    return tl.where(value != value, float("nan"), inner)


@triton.jit
def online(highest, sums_B, tile, scale):
    """Take a tile into a running maximum (a scalar) and running sums relative to it, one a lane."""
    tile = tile.to(tl.float32)
    new = tl.maximum(highest, tl.max(tile, axis=0))
    shift = shift_of(new, scale)
    rescale = tl.where(highest == NEGATIVE_INFINITY, 0.0, tl.exp2(shift_of(highest, scale) - shift))
    return new, tl.fma(sums_B, rescale, exponentials(tile, scale, shift))
