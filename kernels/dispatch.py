"""The public generalized JSD: checks its arguments, finds the backend, lays out the vocabulary.

Shape suffixes: N = tokens, V = vocabulary.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from forge_composer.kernels import jsd_torch
from forge_composer.kernels.jsd_autograd import Backend, Divergence, GeneralizedJSD
from forge_composer.kernels.row_chunks import work_dtype

BackendName = Literal["reference", "torch", "triton"]


def generalized_jsd(
    student_NV: Tensor,
    teacher_NV: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_weight_N: Tensor | None = None,
    inplace_grad: bool = False,
    backend: BackendName | None = None,
) -> Tensor:
    """Generalized Jensen-Shannon divergence between two sets of logits, token by token.

    With p, q the softmax of student and teacher logits over the temperature, and m = beta q + (1 - beta) p:

        beta = 0:      KL(q || p)           "forward" KL, teacher to student
        beta = 1:      KL(p || q)           "reverse" KL, student to teacher
        otherwise:     beta KL(q || m) + (1 - beta) KL(p || m)

    the convention of TRL's GKD and of OPSD, and of `alpha` in SDPO (arXiv 2601.20802); Agarwal et al.,
    arXiv 2306.13649, equation 2. There is no factor temperature^2, and the divergence is not continuous at
    the ends: as beta goes to 0 the mixture form goes to 0, not to a KL divergence.

    The gradient, (1 - beta) p (log(p / m) - sum p log(p / m)) / temperature (its limits: p - q at 0,
    p (log(p / q) - KL) at 1), is made in the forward pass for the upstream gradient `token_weight_N`. A
    caller who computes `(per_token_N * token_weight_N).sum()` thus pays for no second pass; any other
    upstream gradient is honoured too, at the price of scaling the rows that differ.

    Args:
        student_NV: [N, V] in any floating dtype; carries the gradient. Or a DTensor that is sharded over its
            last dimension on a one-dimensional mesh (tensor parallelism), the teacher likewise: then every
            rank reads only its part of the vocabulary.
        teacher_NV: [N, V] in any floating dtype; detached here.
        beta: 0 to 1, the teacher's share of the mixture.
        temperature: divides both sets of logits.
        token_weight_N: [N], at least 0: weight of each token in the sum that the caller is going to form;
            None is 1. Rows of weight 0 are not read (they may hold NaN), and give 0 and no gradient.
        inplace_grad: the gradient may take the place of the student's logits, which are lost. Autograd then
            reports an error to others who need the old values for their own backward pass. "reference" makes
            no use of it.
        backend: "torch" (chunks, any device), "triton" (CUDA, or Triton's interpreter), "reference" (the
            definition in float64, slow); None is "triton" for CUDA tensors where Triton is installed, else
            "torch".

    Returns:
        `per_token_N` in nats, at least 0, not multiplied by the weights; float32, or float64 if either set of
        logits is. Equal rows give exactly 0. Columns that are -inf in both rows take no part. Infinite only
        at beta = 0 (beta = 1) where the student (teacher) alone is -inf; such a row has a zero gradient.
        Rows that are -inf everywhere count as 0.

    Raises:
        ValueError: arguments do not fit each other, or the backend cannot work on them.
    """
    check_arguments(student_NV, teacher_NV, beta, temperature, token_weight_N)
    need_grad = student_NV.requires_grad and torch.is_grad_enabled()
    group: dist.ProcessGroup | None = None
    teacher_NV = teacher_NV.detach()
    if isinstance(student_NV, DTensor) and isinstance(teacher_NV, DTensor):
        whole = student_NV
        student_NV, teacher_NV, group = vocabulary_shards(student_NV, teacher_NV)
        if need_grad and inplace_grad:
            # The local tensor and the DTensor around it count their versions separately.
            torch.autograd.graph.increment_version(whole)
    weight_N = token_weight_N
    work = work_dtype(student_NV, teacher_NV)
    if weight_N is None:
        weight_N = torch.ones(len(student_NV), device=student_NV.device)
    weight_N = weight_N.detach().to(work)
    if backend == "reference":
        if group is not None:
            raise ValueError("the reference works on whole rows, not on a sharded vocabulary")
        value_N = jsd_torch.jsd_reference(
            student_NV, teacher_NV, weight_N, beta=beta, temperature=temperature
        )
        return value_N.to(work)
    if need_grad and inplace_grad:
        _check_overwritable(student_NV, teacher_NV)
    functions = find_backend(backend, student_NV.device, work)
    divergence = Divergence(functions, float(beta), float(temperature), group)
    apply: Any = GeneralizedJSD.apply
    per_token_N: Tensor = apply(student_NV, teacher_NV, weight_N, divergence, need_grad, inplace_grad)
    return per_token_N


def check_arguments(
    student_NV: Tensor, teacher_NV: Tensor, beta: float, temperature: float, weight_N: Tensor | None
) -> None:
    """Raise ValueError unless the arguments of a divergence of logits fit each other."""
    if student_NV.ndim != 2 or student_NV.shape != teacher_NV.shape:
        raise ValueError(
            f"logits must both be [N, V], got {tuple(student_NV.shape)} for the student and "
            f"{tuple(teacher_NV.shape)} for the teacher"
        )
    if not student_NV.is_floating_point() or not teacher_NV.is_floating_point():
        raise ValueError(f"logits must be floating point, got {student_NV.dtype} and {teacher_NV.dtype}")
    if student_NV.device != teacher_NV.device:
        raise ValueError(f"student is on {student_NV.device}, teacher on {teacher_NV.device}")
    if isinstance(student_NV, DTensor) != isinstance(teacher_NV, DTensor):
        raise ValueError("student and teacher must both be DTensors, or neither")
    check_divergence(beta, temperature)
    check_token_weight(weight_N, len(student_NV), student_NV.device)


def check_divergence(beta: float, temperature: float) -> None:
    """Raise ValueError unless 0 <= beta <= 1 and temperature > 0."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must lie between 0 and 1, got {beta}")
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")


def check_token_weight(weight_N: Tensor | None, count: int, device: torch.device) -> None:
    """Raise ValueError unless there is one weight per token, on the tokens' device."""
    if weight_N is None:
        return
    if weight_N.shape != (count,):
        raise ValueError(f"token_weight_N must be [N] = [{count}], got {tuple(weight_N.shape)}")
    if weight_N.device != device:
        raise ValueError(f"token_weight_N is on {weight_N.device}, the logits on {device}")


def _check_overwritable(student_NV: Tensor, teacher_NV: Tensor) -> None:
    if not student_NV.numel():
        return
    if any(student_NV.stride(axis) == 0 and student_NV.shape[axis] > 1 for axis in (0, 1)):
        raise ValueError("inplace_grad: the student's rows or columns share memory (an expanded tensor)")
    if student_NV.untyped_storage().data_ptr() == teacher_NV.untyped_storage().data_ptr():
        raise ValueError("inplace_grad: the teacher's logits share memory with the student's")


def vocabulary_shards(student_NV: DTensor, teacher_NV: DTensor) -> tuple[Tensor, Tensor, dist.ProcessGroup]:
    """This rank's columns of both, and the group that holds the others.

    Raises:
        ValueError: they are laid out in another way.
    """
    mesh = student_NV.device_mesh
    sharded = all(
        tensor.device_mesh == mesh and mesh.ndim == 1 and tensor.placements[0] in (Shard(1), Shard(-1))
        for tensor in (student_NV, teacher_NV)
    )
    if not sharded:
        raise ValueError(
            "logits must be sharded over the vocabulary on one mesh axis, the same for both, got "
            f"{student_NV.placements} on {mesh} and {teacher_NV.placements} on {teacher_NV.device_mesh}"
        )
    return student_NV.to_local(), teacher_NV.to_local(), mesh.get_group()


def find_backend(name: BackendName | None, device: torch.device, work: torch.dtype) -> Backend:
    """The functions of a backend other than "reference", or ValueError if it cannot work there."""
    if name is None:
        usable = device.type == "cuda" and work == torch.float32 and _has_triton()
        name = "triton" if usable else "torch"
    if name == "torch":
        return Backend(
            jsd_torch.jsd_torch,
            jsd_torch.row_statistics,
            jsd_torch.row_sums,
            jsd_torch.row_gradients,
            jsd_torch.scale_rows_,
        )
    if name != "triton":
        raise ValueError(f"backend must be 'reference', 'torch', 'triton' or None, got {name!r}")
    if not _has_triton():
        raise ValueError("backend 'triton': Triton is not installed")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend 'triton' works on CUDA tensors, got one on {device}; on others only under Triton's "
            "interpreter (TRITON_INTERPRET=1)"
        )
    if work == torch.float64:
        raise ValueError("backend 'triton' works in float32; use 'torch' for float64 logits")
    from forge_composer.kernels import jsd

    return Backend(jsd.jsd_triton, jsd.row_statistics, jsd.row_sums, jsd.row_gradients, jsd.scale_rows_)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
