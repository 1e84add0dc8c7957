"""What the launches of the Triton kernels have in common.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's GPU the current one: Triton launches on the current one, wherever the tensors are."""
    if not tensor.is_cuda:
        return nullcontext()
    guard: AbstractContextManager[Any] = torch.cuda.device(tensor.device)
    return guard


def row_contiguous(tensor_NV: Tensor) -> Tensor:
    """The tensor, or a copy if the columns of a row do not lie side by side; rows may have any stride."""
    return tensor_NV if tensor_NV.stride(1) == 1 or tensor_NV.shape[1] == 1 else tensor_NV.contiguous()


def loop_shape(width: int) -> dict[str, Any]:
    """Columns of a tile, and warps, for kernels that loop over a row: 16 columns a thread."""
    block = min(4096, max(512, triton.next_power_of_2(width)))
    return {"BLOCK": block, "num_warps": block // 512, "enable_fp_fusion": False}
