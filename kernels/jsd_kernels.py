# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton compiles these functions: Python's types mean nothing in them, and it has no (*items, item).
"""The Triton kernels of the generalized JSD; `jsd` launches them, docs/kernels.md explains the design.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism), B = columns of a
tile, P = programs of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forge_composer.kernels.jsd_tiles import (
    LN_2,
    NEGATIVE_INFINITY,
    both_max,
    both_sums,
    exponentials,
    finished_value,
    gradient_factor,
    gradients,
    inner_of,
    load_tile,
    log2_of_sum,
    log2_probabilities,
    online,
    pair_terms,
    shift_of,
    store_tile,
    store_zeros,
    value_of_sums,
)

# --- staged: three kernels, one program a row -------------------------------------------------------------


@triton.jit
def statistics_kernel(
    student_NV,
    teacher_NV,
    weight_N,
    norms_4N,
    stride_s,
    stride_t,
    count,
    width,
    scale,
    BLOCK: tl.constexpr,
):
    """Per row: shift and sum of the student, shift and sum of the teacher. 0 for rows of weight 0."""
    row = tl.program_id(0).to(tl.int64)
    highest_s = tl.full((), NEGATIVE_INFINITY, tl.float32)
    highest_t = tl.full((), NEGATIVE_INFINITY, tl.float32)
    sums_s = tl.zeros((BLOCK,), tl.float32)
    sums_t = tl.zeros((BLOCK,), tl.float32)
    if tl.load(weight_N + row) != 0.0:
        for start in range(0, width, BLOCK):
            tile_s = load_tile(student_NV + row * stride_s, start, width, BLOCK, True)
            tile_t = load_tile(teacher_NV + row * stride_t, start, width, BLOCK, True)
            highest_s, sums_s = online(highest_s, sums_s, tile_s, scale)
            highest_t, sums_t = online(highest_t, sums_t, tile_t, scale)
    total_s, total_t = both_sums(sums_s, sums_t)
    tl.store(norms_4N + row, shift_of(highest_s, scale))
    tl.store(norms_4N + count + row, total_s)
    tl.store(norms_4N + 2 * count + row, shift_of(highest_t, scale))
    tl.store(norms_4N + 3 * count + row, total_t)


@triton.jit
def load_norms(norms_4N, count, row):
    """What `statistics_kernel` stored for a row."""
    return (
        tl.load(norms_4N + row),
        tl.load(norms_4N + count + row),
        tl.load(norms_4N + 2 * count + row),
        tl.load(norms_4N + 3 * count + row),
    )


@triton.jit
def sums_kernel(
    student_NV,
    teacher_NV,
    weight_N,
    norms_4N,
    sums_2N,
    stride_s,
    stride_t,
    count,
    width,
    scale,
    share_s,
    share_t,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    WHOLE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Per row: value (of whole rows finished, else this shard's part) and inner sum, in nats."""
    row = tl.program_id(0).to(tl.int64)
    shift_s, total_s, shift_t, total_t = load_norms(norms_4N, count, row)
    log2_sum_s = log2_of_sum(total_s)
    log2_sum_t = log2_of_sum(total_t)
    values = tl.zeros((BLOCK,), tl.float32)
    inners = tl.zeros((BLOCK,), tl.float32)
    if tl.load(weight_N + row) != 0.0:
        for start in range(0, width, BLOCK):
            tile_s = load_tile(student_NV + row * stride_s, start, width, BLOCK, True)
            tile_t = load_tile(teacher_NV + row * stride_t, start, width, BLOCK, True)
            log_s = log2_probabilities(tile_s, scale, shift_s, log2_sum_s)
            log_t = log2_probabilities(tile_t, scale, shift_t, log2_sum_t)
            value_B, _, term_B = pair_terms(log_s, log_t, share_s, share_t, MODE, HARDWARE)
            values += value_B
            inners += term_B
    value, inner = both_sums(values, inners)
    value = value_of_sums(value, inner, share_s, share_t, MODE)
    if WHOLE:
        value = finished_value(value, total_s, total_t)
    tl.store(sums_2N + row, value)
    tl.store(sums_2N + count + row, inner * LN_2)


@triton.jit
def gradients_kernel(
    student_NV,
    teacher_NV,
    weight_N,
    norms_4N,
    inner_N,
    value_N,
    gradient_NV,
    stride_s,
    stride_t,
    stride_g,
    count,
    width,
    scale,
    slope,
    share_s,
    share_t,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """weight * slope * (term - p_s * inner). It may go into the student: a tile is read, then written."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_N + row)
    gradient_V = gradient_NV + row * stride_g
    if weight == 0.0:
        store_zeros(gradient_V, 0, width, BLOCK)
    else:
        shift_s, total_s, shift_t, total_t = load_norms(norms_4N, count, row)
        log2_sum_s = log2_of_sum(total_s)
        log2_sum_t = log2_of_sum(total_t)
        value = tl.load(value_N + row)
        factor = gradient_factor(weight, slope, value, total_s, total_t)
        inner = inner_of(tl.load(inner_N + row) / LN_2, value, MODE)
        for start in range(0, width, BLOCK):
            tile_s = load_tile(student_NV + row * stride_s, start, width, BLOCK, True)
            tile_t = load_tile(teacher_NV + row * stride_t, start, width, BLOCK, True)
            log_s = log2_probabilities(tile_s, scale, shift_s, log2_sum_s)
            log_t = log2_probabilities(tile_t, scale, shift_t, log2_sum_t)
            _, p_s, term = pair_terms(log_s, log_t, share_s, share_t, MODE, HARDWARE)
            gradient = gradients(p_s, term, inner, factor, MODE)
            store_tile(gradient_V, start, width, gradient, BLOCK, True)


# --- resident, cluster, cooperative: each logit is loaded once --------------------------------------------


@triton.jit
def wait_for_all(arrived, PROGRAMS: tl.constexpr):
    """Publish what this program has stored, and wait until all programs of the row have done so.

    The barriers order the stores and loads of all threads with the one thread that does the atomics.
    """
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(arrived, 0, sem="acq_rel", scope="gpu") < PROGRAMS:
        pass
    tl.debug_barrier()


@triton.jit
def merged(partials_6P, first: tl.constexpr, scale, PROGRAMS: tl.constexpr, PADDED: tl.constexpr):
    """Highest and sum of a whole row from those of its parts."""
    parts = tl.arange(0, PADDED)
    inside = parts < PROGRAMS
    highest_P = tl.load(
        partials_6P + first * PROGRAMS + parts, mask=inside, other=NEGATIVE_INFINITY, volatile=True
    )
    sum_P = tl.load(partials_6P + (first + 1) * PROGRAMS + parts, mask=inside, other=0.0, volatile=True)
    highest = tl.max(highest_P, axis=0)
    rescale_P = tl.exp2(shift_of(highest_P, scale) - shift_of(highest, scale))
    return highest, tl.sum(tl.where(highest_P == NEGATIVE_INFINITY, 0.0, sum_P * rescale_P), axis=0)


@triton.jit
def row_kernel(
    student_NV,
    teacher_NV,
    weight_N,
    value_N,
    gradient_NV,
    counters,
    partials_N6P,
    stride_s,
    stride_t,
    stride_g,
    width,
    scale,
    slope,
    share_s,
    share_t,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PADDED: tl.constexpr,
    COOPERATIVE: tl.constexpr,
    MODE: tl.constexpr,
    GRADIENT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Value and gradient of a row whose logits stay in registers from the one load to the end.

    Resident: one program a row. Cluster: one program too, which Triton spreads over a thread block cluster;
    its reductions then go through distributed shared memory. Cooperative: PROGRAMS programs a row, which
    reduce through global memory. There a program learns its place from a ticket, so programs start in
    order of place: those that it waits for have started before it, or start as soon as a complete row ends.
    """
    if COOPERATIVE:
        place = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
        row = (place // PROGRAMS).to(tl.int64)
        part = place % PROGRAMS
        arrived = counters + 1 + 2 * row
        partials_6P = partials_N6P + row * (6 * PROGRAMS)
    else:
        row = tl.program_id(0).to(tl.int64)
        part = 0
    first = part * (BLOCK * TILES)
    weight = tl.load(weight_N + row)
    gradient_V = gradient_NV + row * stride_g
    if weight == 0.0:
        tl.store(value_N + row, 0.0, mask=part == 0)
        if GRADIENT:
            store_zeros(gradient_V, first, tl.minimum(first + BLOCK * TILES, width), BLOCK)
    else:
        tiles_s = ()
        tiles_t = ()
        for i in tl.static_range(TILES):
            start = first + i * BLOCK
            tiles_s = tiles_s + (
                load_tile(student_NV + row * stride_s, start, width, BLOCK, COOPERATIVE or i == TILES - 1),
            )
            tiles_t = tiles_t + (
                load_tile(teacher_NV + row * stride_t, start, width, BLOCK, COOPERATIVE or i == TILES - 1),
            )

        # Statistics.
        highest_s = tiles_s[0].to(tl.float32)
        highest_t = tiles_t[0].to(tl.float32)
        for i in tl.static_range(1, TILES):
            highest_s = tl.maximum(highest_s, tiles_s[i].to(tl.float32))
            highest_t = tl.maximum(highest_t, tiles_t[i].to(tl.float32))
        highest_s, highest_t = both_max(highest_s, highest_t)
        shift_s = shift_of(highest_s, scale)
        shift_t = shift_of(highest_t, scale)
        sums_s = tl.zeros((BLOCK,), tl.float32)
        sums_t = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(TILES):
            sums_s += exponentials(tiles_s[i], scale, shift_s)
            sums_t += exponentials(tiles_t[i], scale, shift_t)
        total_s, total_t = both_sums(sums_s, sums_t)
        if COOPERATIVE:
            tl.store(partials_6P + part, highest_s)
            tl.store(partials_6P + PROGRAMS + part, total_s)
            tl.store(partials_6P + 2 * PROGRAMS + part, highest_t)
            tl.store(partials_6P + 3 * PROGRAMS + part, total_t)
            wait_for_all(arrived, PROGRAMS)
            highest_s, total_s = merged(partials_6P, 0, scale, PROGRAMS, PADDED)
            highest_t, total_t = merged(partials_6P, 2, scale, PROGRAMS, PADDED)
            shift_s = shift_of(highest_s, scale)
            shift_t = shift_of(highest_t, scale)
        log2_sum_s = log2_of_sum(total_s)
        log2_sum_t = log2_of_sum(total_t)

        # Sums.
        values = tl.zeros((BLOCK,), tl.float32)
        inners = tl.zeros((BLOCK,), tl.float32)
        probabilities = ()
        terms = ()
        for i in tl.static_range(TILES):
            log_s = log2_probabilities(tiles_s[i], scale, shift_s, log2_sum_s)
            log_t = log2_probabilities(tiles_t[i], scale, shift_t, log2_sum_t)
            value_B, p_s, term_B = pair_terms(log_s, log_t, share_s, share_t, MODE, HARDWARE)
            values += value_B
            inners += term_B
            probabilities = probabilities + (p_s,)
            terms = terms + (term_B,)
        value, inner = both_sums(values, inners)
        if COOPERATIVE:
            tl.store(partials_6P + 4 * PROGRAMS + part, value)
            tl.store(partials_6P + 5 * PROGRAMS + part, inner)
            wait_for_all(arrived + 1, PROGRAMS)
            parts = tl.arange(0, PADDED)
            inside = parts < PROGRAMS
            value_P = tl.load(partials_6P + 4 * PROGRAMS + parts, mask=inside, other=0.0, volatile=True)
            inner_P = tl.load(partials_6P + 5 * PROGRAMS + parts, mask=inside, other=0.0, volatile=True)
            value, inner = both_sums(value_P, inner_P)
        value = value_of_sums(value, inner, share_s, share_t, MODE)
        value = finished_value(value, total_s, total_t)
        tl.store(value_N + row, value, mask=part == 0)

        # Gradient.
        if GRADIENT:
            factor = gradient_factor(weight, slope, value, total_s, total_t)
            inner = inner_of(inner, value, MODE)
            for i in tl.static_range(TILES):
                gradient = gradients(probabilities[i], terms[i], inner, factor, MODE)
                store_tile(
                    gradient_V, first + i * BLOCK, width, gradient, BLOCK, COOPERATIVE or i == TILES - 1
                )


# --- afterwards -------------------------------------------------------------------------------------------


@triton.jit
def scale_kernel(gradient_NV, factor_N, stride, width, BLOCK: tl.constexpr):
    """Multiply each row by its factor; rows whose factor is 1 are neither read nor written."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_N + row)
    if factor != 1.0:
        gradient_V = gradient_NV + row * stride
        columns = tl.arange(0, BLOCK)
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            tile = tl.load(gradient_V + start + columns, mask=inside, other=0.0).to(tl.float32)
            store_tile(gradient_V, start, width, tile * factor, BLOCK, True)
