"""Work on [N, V] tensors a few rows at a time, in scratch tensors of the working precision.

Shape suffixes: N = tokens, V = vocabulary, R = the rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CPU_CHUNK_ELEMENTS = 1 << 18
"""Elements of a scratch tensor on CPU (1 MiB in float32): a few of them stay in the processor's cache."""
DEVICE_CHUNK_ELEMENTS = 1 << 24
"""Elements of a scratch tensor elsewhere (64 MiB in float32): enough to keep a large device busy."""
SYNCHRONOUS_DEVICES = frozenset({"cpu"})
LOG2_E = 1.0 / math.log(2.0)
LN_2 = math.log(2.0)


def work_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def is_synchronous(device: torch.device) -> bool:
    """Whether the host sees values, such as which rows to leave out, without waiting for the device."""
    return device.type in SYNCHRONOUS_DEVICES


def chunk_elements(device: torch.device) -> int:
    """Elements of a scratch tensor."""
    return CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS


class RowChunk(NamedTuple):
    """Some rows: their place, what the tensors hold there (to be read), scratch tensors [R, V]."""

    rows: slice | Tensor
    read: list[Tensor]
    scratch: list[Tensor]


def row_chunks(tensors_NV: Sequence[Tensor], weight_N: Tensor, scratch: int) -> Iterator[RowChunk]:
    """Chunks of the rows whose weight is not 0; none if there is no column.

    On CPU the other rows are left out. On devices that the host does not wait for, they appear as rows of
    zeros.
    """
    first_NV = tensors_NV[0]
    count, width = first_NV.shape
    if not count or not width:
        return
    live_N = weight_N != 0
    leave_out = is_synchronous(first_NV.device)
    index_M = live_N.nonzero()[:, 0] if leave_out else None
    if index_M is not None and len(index_M) == count:
        index_M = None
    total = count if index_M is None else len(index_M)
    height = min(total, max(1, chunk_elements(first_NV.device) // width))
    dtype = work_dtype(*tensors_NV)
    buffers = [first_NV.new_empty((height, width), dtype=dtype) for _ in range(scratch)]
    for start in range(0, total, height or 1):
        part = slice(start, min(start + height, total))
        rows = part if index_M is None else index_M[part]
        read = [tensor_NV[rows] for tensor_NV in tensors_NV]
        if not leave_out:
            read = [torch.where(live_N[part, None], tensor_RV, 0.0) for tensor_RV in read]
        yield RowChunk(rows, read, [buffer_RV[: part.stop - start] for buffer_RV in buffers])


def zero_left_out(out_NV: Tensor, weight_N: Tensor) -> None:
    """Write zeros into the rows that `row_chunks` leaves out."""
    if is_synchronous(out_NV.device):
        out_NV[(weight_N == 0).nonzero()[:, 0]] = 0.0


def widened(logits_RV: Tensor, scratch_RV: Tensor) -> Tensor:
    """The logits in the working precision; copied into the scratch tensor only if they are in another."""
    return logits_RV if logits_RV.dtype == scratch_RV.dtype else scratch_RV.copy_(logits_RV)


def exponentials(
    logits_RV: Tensor, shift_R1: Tensor, temperature: float, z_RV: Tensor, exp_RV: Tensor
) -> None:
    """Fill z with log2(e) (logits - shift) / temperature and exp with 2^z."""
    torch.sub(logits_RV, shift_R1, out=z_RV).mul_(LOG2_E / temperature)
    torch.exp2(z_RV, out=exp_RV)


def relative_exponentials(
    logits_RV: Tensor, temperature: float, z_RV: Tensor, exp_RV: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill z and exp relative to the highest logit of each row; returns that, and the sum of exp, [R].

    A row that is -inf everywhere has the sum 0.
    """
    highest_R1 = logits_RV.amax(dim=1, keepdim=True).clamp_min_(torch.finfo(z_RV.dtype).min)
    exponentials(logits_RV, highest_R1, temperature, z_RV, exp_RV)
    return highest_R1[:, 0], exp_RV.sum(dim=1)


def statistics(logits_RV: Tensor, temperature: float, z_RV: Tensor, exp_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Highest of logits / temperature of each row, and the sum of exponentials relative to it, [R]."""
    highest_R, sum_R = relative_exponentials(logits_RV, temperature, z_RV, exp_RV)
    exact_R = highest_R.double() / temperature
    rounded_R = exact_R.to(sum_R.dtype)
    # The sum makes up for the rounding.
    return rounded_R, torch.where(sum_R == 0, 0.0, sum_R * (exact_R - rounded_R).exp().to(sum_R.dtype))
