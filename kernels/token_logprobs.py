"""Log-probability and entropy of chosen tokens, straight from logits.

Shape suffixes: N = tokens, V = vocabulary (this rank's part of it under tensor parallelism).

No [N, V] float32 copy of the logits ever exists: in PyTorch the float32 work is done a few rows at a time, in
Triton in registers. What the backward pass keeps is the logits themselves and two numbers a token. Under
tensor parallelism every rank reads only its part of the vocabulary: two all-reduces of [N] and [3, N]
forward, none backward.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_CHUNK_ELEMENTS = 1 << 23
"""Logits that are worked on at a time (32 MiB in float32)."""


def token_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    backend: Literal["torch", "triton"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token, and entropy, under softmax(logits / temperature).

    Args:
        logits_NV: [N, V] in any floating dtype; or a DTensor that is sharded over its last dimension on a
            one-dimensional mesh (tensor parallelism), in equal chunks but for the last ones, as
            `torch.chunk` makes them.
        targets_N: [N] token ids in the whole vocabulary.
        temperature: one for all tokens, or [N].
        backend: "torch" (any device) or "triton" (CUDA, or Triton's interpreter); None is "triton" for CUDA
            tensors where Triton is installed, else "torch". Float64 logits are always worked on by "torch".

    Returns:
        `logprobs_N` in nats, differentiable in the logits, and `entropy_N` in nats, without gradient; both
        float32 (float64 for float64 logits).

    Raises:
        ValueError: the logits are a DTensor with another layout, or the backend is unknown.
    """
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend must be 'torch', 'triton' or None, got {backend!r}")
    group: dist.ProcessGroup | None = None
    vocab_start = 0
    if isinstance(logits_NV, DTensor):
        logits_NV, vocab_start, group = _vocabulary_shard(logits_NV)
    work = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    scale_N = 1.0 / torch.as_tensor(temperature, dtype=work, device=logits_NV.device)
    scale_N = scale_N.expand(logits_NV.shape[0])
    if backend is None:
        backend = "triton" if logits_NV.is_cuda and _has_triton() else "torch"
    use_triton = backend == "triton" and work == torch.float32
    apply: Any = _TokenLogprobs.apply
    logprobs_N, entropy_N = apply(logits_NV, targets_N, scale_N, vocab_start, group, use_triton)
    return logprobs_N, entropy_N


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _vocabulary_shard(logits_NV: DTensor) -> tuple[Tensor, int, dist.ProcessGroup]:
    """This rank's columns, the id of the first of them, and the group that holds the others."""
    mesh, placements = logits_NV.device_mesh, logits_NV.placements
    last = logits_NV.ndim - 1
    if mesh.ndim != 1 or placements[0] not in (Shard(last), Shard(-1)):
        raise ValueError(
            f"token_logprobs needs logits sharded over the vocabulary on one mesh axis, got {placements} "
            f"on a mesh of {mesh.ndim} axes"
        )
    per_rank = -(-logits_NV.shape[-1] // mesh.size())
    return logits_NV.to_local(), mesh.get_local_rank() * per_rank, mesh.get_group()


def _chunks(logits_NV: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits_NV.shape[1]))
    for start in range(0, logits_NV.shape[0], rows):
        yield slice(start, min(start + rows, logits_NV.shape[0]))


def _local_targets(targets_N: Tensor, vocab_start: int, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this rank's part (0 if elsewhere), and whether it is in it."""
    columns_N = targets_N - vocab_start
    inside_N = (columns_N >= 0) & (columns_N < width)
    return torch.where(inside_N, columns_N, 0), inside_N


class _TokenLogprobs(torch.autograd.Function):
    """d logp / d z_v = ([v = target] - p_v) / temperature; the entropy is for watching only."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        scale_N: Tensor,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        use_triton: bool,
    ) -> tuple[Tensor, Tensor]:
        if use_triton:
            from forge_composer.kernels.triton_logprobs import logprob_statistics as statistics
        else:
            statistics = _statistics
        highest_N, sums_3N = statistics(logits_NV, targets_N, scale_N, vocab_start)
        if group is not None:
            highest_N, sums_3N = _combine(highest_N, sums_3N, group)
        log_sum_N = sums_3N[0].log()
        # Their sum would lose the last bits of the log-probabilities of large logits.
        ctx.save_for_backward(logits_NV, targets_N, scale_N, torch.stack((highest_N, log_sum_N)))
        ctx.vocab_start, ctx.use_triton = vocab_start, use_triton
        entropy_N = log_sum_N - sums_3N[1] / sums_3N[0]
        ctx.mark_non_differentiable(entropy_N)
        return sums_3N[2] - highest_N - log_sum_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.use_triton:
            from forge_composer.kernels.triton_logprobs import logprob_gradient as gradient
        else:
            gradient = _gradient
        logits_NV, targets_N, scale_N, norms_2N = ctx.saved_tensors
        grad_NV = gradient(logits_NV, targets_N, scale_N, norms_2N, grads[0], ctx.vocab_start)
        return grad_NV, None, None, None, None, None


def _statistics(
    logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, vocab_start: int
) -> tuple[Tensor, Tensor]:
    """Highest z = logits * scale, and sums of exp(z - highest) and of it times (z - highest), target's z."""
    count, width = logits_NV.shape
    highest_N = scale_N.new_full((count,), -torch.inf)
    sums_3N = scale_N.new_zeros((3, count))
    columns_N, inside_N = _local_targets(targets_N, vocab_start, width)
    for rows in _chunks(logits_NV) if width else ():
        z = logits_NV[rows] * scale_N[rows, None]
        at_target = z.gather(1, columns_N[rows, None])[:, 0]
        sums_3N[2, rows] = torch.where(inside_N[rows], at_target, 0.0)
        highest_N[rows] = z.amax(dim=1)
        z -= highest_N[rows, None]
        weights = z.exp()
        sums_3N[0, rows] = weights.sum(dim=1)
        # Logits of -inf have the weight 0, and 0 times a number is 0.
        sums_3N[1, rows] = weights.mul_(z.clamp_min_(-1e30)).sum(dim=1)
    return highest_N, sums_3N


def _gradient(
    logits_NV: Tensor,
    targets_N: Tensor,
    scale_N: Tensor,
    norms_2N: Tensor,
    grad_logprobs_N: Tensor,
    vocab_start: int,
) -> Tensor:
    """Gradient in the logits; `norms_2N` holds the highest z and log of the sum of exp(z - highest)."""
    grad_NV = torch.empty_like(logits_NV)
    columns_N, inside_N = _local_targets(targets_N, vocab_start, logits_NV.shape[1])
    grad_z_N = grad_logprobs_N * scale_N
    at_target_N = torch.where(inside_N, grad_z_N, 0.0)
    for rows in _chunks(logits_NV) if logits_NV.shape[1] else ():
        p = logits_NV[rows] * scale_N[rows, None]
        p.sub_(norms_2N[0, rows, None]).sub_(norms_2N[1, rows, None]).exp_().mul_(-grad_z_N[rows, None])
        p.scatter_add_(1, columns_N[rows, None], at_target_N[rows, None])
        grad_NV[rows] = p.to(grad_NV.dtype)
    return grad_NV


def _combine(highest_N: Tensor, sums_3N: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Sums over all parts of the vocabulary, relative to the highest logit of all parts."""
    overall_N = highest_N.clone()
    dist.all_reduce(overall_N, op=dist.ReduceOp.MAX, group=group)
    # A rank without columns (more ranks than chunks) has highest = -inf and sums 0: keep 0 * inf away.
    offset_N = torch.where(highest_N.isfinite(), highest_N - overall_N, 0.0)
    shrink_N = offset_N.exp()
    combined_3N = torch.stack(
        (sums_3N[0] * shrink_N, (sums_3N[1] + offset_N * sums_3N[0]) * shrink_N, sums_3N[2])
    )
    dist.all_reduce(combined_3N, op=dist.ReduceOp.SUM, group=group)
    return overall_N, combined_3N
