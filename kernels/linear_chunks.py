"""What the functions that start from hidden states and an LM head share: chunks, and the head's gradient.

Shape suffixes: N = tokens, R = tokens of a chunk, H = hidden size, V = vocabulary (this rank's part of it).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MEMORY_BUDGET = 256 << 20
"""Bytes that a chunk of logits may take, by default."""
_PRODUCT_ELEMENTS = 1 << 23
"""Elements of the head's gradient that are multiplied at a time where they need another precision."""


def chunk_height(bytes_per_row: int, memory_budget: int) -> int:
    """Rows of logits that fit the budget; at least one.

    Raises:
        ValueError: the budget is not positive.
    """
    if memory_budget <= 0:
        raise ValueError(f"memory_budget must be a positive number of bytes, got {memory_budget}")
    return max(1, memory_budget // max(1, bytes_per_row))


def row_slices(count: int, height: int) -> Iterator[slice]:
    """Slices of `height` rows that cover `count` rows, the last one shorter."""
    for start in range(0, count, height):
        yield slice(start, min(start + height, count))


class WeightGradient:
    """Sum over chunks of d loss / d weight, [V, H]; float32 for weights of lower precision."""

    def __init__(self, weight_VH: Tensor) -> None:
        self._dtype = weight_VH.dtype
        wide = weight_VH.dtype if weight_VH.dtype == torch.float64 else torch.float32
        self._sum_VH = torch.zeros_like(weight_VH, dtype=wide)

    def add(self, grad_RV: Tensor, hidden_RH: Tensor) -> None:
        """Add grad^T hidden. In low precision the product of one chunk is rounded, their sum is not."""
        if grad_RV.dtype == self._sum_VH.dtype:
            self._sum_VH.addmm_(grad_RV.t(), hidden_RH)
            return
        columns = max(1, _PRODUCT_ELEMENTS // max(1, hidden_RH.shape[1]))
        for part in row_slices(grad_RV.shape[1], columns):
            self._sum_VH[part] += grad_RV[:, part].t() @ hidden_RH

    def total(self, factor: Tensor | None = None) -> Tensor:
        """The sum, times a factor, in the weight's dtype. Ends the use of this object."""
        if factor is not None:
            self._sum_VH.mul_(factor)
        return self._sum_VH.to(self._dtype)
