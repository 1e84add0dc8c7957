"""What is compared: ways to the generalized JSD of two sets of logits, or of two LM heads, with gradient.

Each is a function of the tensors that learn and of those that do not, and returns the mean over the tokens,
so all are asked for the same scalar and the same gradients. beta is this project's: the teacher's share of
the mixture, with KL(teacher||student) at 0 and KL(student||teacher) at 1.

Shape suffixes: N = tokens, V = vocabulary, H = hidden size.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_composer.bench.machine import version
from forge_composer.kernels import generalized_jsd, linear_jsd

BETA = 0.5
MeanJSD = Callable[..., Tensor]
"""(student_NV, teacher_NV) or (student_hidden_NH, student_weight_VH, teacher_hidden_NH, teacher_weight_VH) ->
scalar. The teacher's tensors carry no gradient."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to the loss.

    Attributes:
        name: as it stands in the results.
        kind: what it starts from.
        mean_jsd: the loss itself.
        error_16bit: largest relative error of value and gradient that its arithmetic explains when the inputs
            are in bfloat16 or float16; in float32 it is 1e-4 for all.
        foreign: not this project's code, so that a failure is noted and not raised.
    """

    name: str
    kind: Literal["logits", "linear"]
    mean_jsd: MeanJSD
    error_16bit: float
    foreign: bool = False

    def error_allowed(self, dtype: torch.dtype) -> float:
        """Largest relative error for inputs of this dtype."""
        return 1e-4 if dtype in (torch.float32, torch.float64) else self.error_16bit


def contenders(device: torch.device) -> tuple[list[Contender], dict[str, str]]:
    """Those that can run on the device, and why the others cannot, by name."""
    found = [Contender("eager", "logits", eager_jsd, 0.1)]
    missing: dict[str, str] = {}
    reason = _no_compiler()
    if reason is None:
        found.append(Contender("compile", "logits", CompiledJSD(), 0.1, foreign=True))
    else:
        missing["compile"] = reason
    for backend, name in (("torch", "chunked"), ("triton", "triton")):
        names = {name: True, f"{name}_out_of_place": False}
        if backend == "triton" and device.type != "cuda":
            missing |= dict.fromkeys(names, "needs a CUDA device")
            continue
        for full_name, inplace in names.items():
            loss = partial(_ours, backend=backend, inplace_grad=inplace)
            found.append(Contender(full_name, "logits", loss, 0.01))
    found += [
        Contender("linear_eager", "linear", linear_eager_jsd, 0.1),
        Contender("linear_chunked", "linear", _linear_ours, 0.05),
    ]
    liger = _liger(device)
    if isinstance(liger, str):
        missing["liger"] = missing["linear_liger"] = liger
    else:
        found += liger
    return found, missing


def eager_jsd(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """The formula as TRL's GKD and OPSD compute it, in the dtype of the logits.

    Two log-softmaxes, the mixture as a logsumexp over a stack, an element-wise KL divergence each (TRL,
    `GKDTrainer.generalized_jsd_loss`; OPSD, `generalized_jsd_loss`).
    """
    student_NV = F.log_softmax(student_NV, dim=-1)
    teacher_NV = F.log_softmax(teacher_NV, dim=-1)
    parts = torch.stack([student_NV + math.log1p(-BETA), teacher_NV + math.log(BETA)])
    mixture_NV = torch.logsumexp(parts, dim=0)
    divergence_NV = BETA * F.kl_div(mixture_NV, teacher_NV, reduction="none", log_target=True)
    divergence_NV = divergence_NV + (1 - BETA) * F.kl_div(
        mixture_NV, student_NV, reduction="none", log_target=True
    )
    return divergence_NV.sum() / len(divergence_NV)


def linear_eager_jsd(
    student_hidden_NH: Tensor, student_weight_VH: Tensor, teacher_hidden_NH: Tensor, teacher_weight_VH: Tensor
) -> Tensor:
    """Both LM heads, then `eager_jsd`."""
    teacher_NV = F.linear(teacher_hidden_NH, teacher_weight_VH)
    return eager_jsd(F.linear(student_hidden_NH, student_weight_VH), teacher_NV)


def linear_full_jsd(
    student_hidden_NH: Tensor, student_weight_VH: Tensor, teacher_hidden_NH: Tensor, teacher_weight_VH: Tensor
) -> Tensor:
    """Both LM heads, then this project's kernel, which overwrites the student's logits."""
    teacher_NV = F.linear(teacher_hidden_NH, teacher_weight_VH)
    student_NV = F.linear(student_hidden_NH, student_weight_VH)
    return _ours(student_NV, teacher_NV, backend=None, inplace_grad=True)


def _ours(student_NV: Tensor, teacher_NV: Tensor, *, backend: Any, inplace_grad: bool) -> Tensor:
    weight_N = _mean_weights(student_NV)
    per_token_N = generalized_jsd(
        student_NV,
        teacher_NV,
        beta=BETA,
        token_weight_N=weight_N,
        inplace_grad=inplace_grad,
        backend=backend,
    )
    return (per_token_N * weight_N).sum()


def _linear_ours(
    student_hidden_NH: Tensor, student_weight_VH: Tensor, teacher_hidden_NH: Tensor, teacher_weight_VH: Tensor
) -> Tensor:
    return linear_jsd(
        student_hidden_NH,
        student_weight_VH,
        teacher_hidden_NH,
        teacher_weight_VH,
        beta=BETA,
        temperature=1.0,
        token_weight_N=_mean_weights(student_hidden_NH),
    ).loss


def _mean_weights(rows: Tensor) -> Tensor:
    return torch.full((len(rows),), 1 / max(1, len(rows)), dtype=torch.float32, device=rows.device)


class CompiledJSD:
    """`eager_jsd` under torch.compile, compiled for the shape that it is called with."""

    def __init__(self) -> None:
        self._compiled: MeanJSD = torch.compile(eager_jsd, dynamic=False, fullgraph=True)

    def __call__(self, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        """The loss."""
        return self._compiled(student_NV, teacher_NV)


def _no_compiler() -> str | None:
    """Why torch.compile would do nothing here; a missing compiler shows at the first call."""
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0"):
        return "TORCHDYNAMO_DISABLE is set"
    return None


def _liger(device: torch.device) -> list[Contender] | str:
    """Liger's two kernels, or why they cannot run.

    Liger's beta is this project's: beta times the teacher in the mixture, KL(teacher||student) at 0 and
    KL(student||teacher) at 1 (`_jsd_kernel` in liger_kernel/ops/jsd.py, where X is the student's
    log-probabilities and Y the teacher's; version 0.8.5 gives the same numbers). Both return the mean over
    the tokens.
    """
    if version("liger_kernel") is None:
        return "liger_kernel is not installed"
    if device.type != "cuda":
        return "needs a CUDA device"
    transformers = importlib.import_module("liger_kernel.transformers")
    jsd, fused = transformers.LigerJSD(beta=BETA), transformers.LigerFusedLinearJSD(jsd_beta=BETA)

    def liger_jsd(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        loss: Tensor = jsd(
            F.log_softmax(student_NV, dim=-1, dtype=torch.float32),
            F.log_softmax(teacher_NV, dim=-1, dtype=torch.float32),
        )
        return loss

    def liger_linear_jsd(*tensors: Tensor) -> Tensor:
        loss: Tensor = fused(*tensors, None)
        return loss

    return [
        Contender("liger", "logits", liger_jsd, 0.05, foreign=True),
        Contender("linear_liger", "linear", liger_linear_jsd, 0.1, foreign=True),
    ]
