"""The divergence as others define it, written out for comparison; and the cases of `golden_jsd.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def scalar_jsd(
    student: list[float], teacher: list[float], beta: float, temperature: float
) -> tuple[float, list[float]]:
    """Value and gradient of one row, number by number, with 0 log 0 = 0."""
    p, q = _softmax(student, temperature), _softmax(teacher, temperature)
    if beta == 0.0:
        value = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True) if b)
        return value, [(a - b) / temperature for a, b in zip(p, q, strict=True)]
    if beta == 1.0:
        log_ratio = [math.log(a / b) if a else 0.0 for a, b in zip(p, q, strict=True)]
        value = sum(a * ratio for a, ratio in zip(p, log_ratio, strict=True))
        return value, [a * (ratio - value) / temperature for a, ratio in zip(p, log_ratio, strict=True)]
    m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
    log_p_m = [math.log(a / c) if a else 0.0 for a, c in zip(p, m, strict=True)]
    log_q_m = [math.log(b / c) if b else 0.0 for b, c in zip(q, m, strict=True)]
    inner = sum(a * ratio for a, ratio in zip(p, log_p_m, strict=True))
    value = beta * sum(b * ratio for b, ratio in zip(q, log_q_m, strict=True)) + (1 - beta) * inner
    scale = (1 - beta) / temperature
    return value, [scale * a * (ratio - inner) for a, ratio in zip(p, log_p_m, strict=True)]


def _softmax(logits: list[float], temperature: float) -> list[float]:
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


def gkd_jsd(student_NV: Tensor, teacher_NV: Tensor, *, beta: float, temperature: float) -> Tensor:
    """Element by element, as TRL's GKD and OPSD: KL divergences of log-softmaxes to their mixture."""
    log_p, log_q = F.log_softmax(student_NV / temperature, -1), F.log_softmax(teacher_NV / temperature, -1)
    if beta == 0:
        return F.kl_div(log_p, log_q, reduction="none", log_target=True)
    if beta == 1:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True)
    log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
    to_teacher = F.kl_div(log_m, log_q, reduction="none", log_target=True)
    to_student = F.kl_div(log_m, log_p, reduction="none", log_target=True)
    return beta * to_teacher + (1 - beta) * to_student


def opsd_loss(
    student_NV: Tensor,
    teacher_NV: Tensor,
    labels_N: Tensor,
    *,
    beta: float,
    temperature: float,
    top_k: int | None = None,
) -> Tensor:
    """OPSD's `generalized_jsd_loss` with "batchmean": top-K of the teacher, mean over labelled tokens."""
    if top_k is not None:
        columns = teacher_NV.topk(top_k, dim=-1).indices
        student_NV, teacher_NV = student_NV.gather(-1, columns), teacher_NV.gather(-1, columns)
    mask = labels_N != -100
    divergence = gkd_jsd(student_NV, teacher_NV, beta=beta, temperature=temperature)
    return divergence[mask].sum() / mask.sum()


def sdpo_topk_jsd(
    student_NV: Tensor, teacher_NV: Tensor, *, k: int, alpha: float, temperature: float, add_tail: bool
) -> Tensor:
    """SDPO's divergence on the student's top-K: true log-probabilities, a tail of at least 1e-7."""
    student_NV, teacher_NV = student_NV / temperature, teacher_NV / temperature
    columns = student_NV.topk(k, dim=-1).indices
    both = []
    for logits in (student_NV, teacher_NV):
        logp = logits.gather(-1, columns) - torch.logsumexp(logits, -1, keepdim=True)
        if add_tail:
            covered = torch.logsumexp(logp, -1, keepdim=True).clamp(max=-1e-7)
            logp = torch.cat([logp, torch.log(-torch.expm1(covered))], -1)
        else:
            logp = logp - torch.logsumexp(logp, -1, keepdim=True)
        both.append(logp)
    # Logits that are log-probabilities already: their softmax is themselves.
    return gkd_jsd(both[0], both[1], beta=alpha, temperature=1.0).sum(-1)


@dataclass(frozen=True)
class GoldenCase:
    """One case in float64. Rows of weight 0 are expected to give value 0."""

    name: str
    beta: float
    temperature: float
    student: Tensor
    teacher: Tensor
    weight: Tensor
    per_token: Tensor
    gradient: Tensor


def golden_cases() -> list[GoldenCase]:
    """The stored cases. Where their generator met 0 / 0, a row's gradient comes from `scalar_jsd`."""
    path = Path(__file__).with_name("golden_jsd.json")
    return [_golden_case(case) for case in json.loads(path.read_text())["cases"]]


def _golden_case(case: dict[str, Any]) -> GoldenCase:
    beta, temperature, weights = case["beta"], case["temperature"], case["token_weight"]
    gradient = np.array(case["grad_student"])
    for row in np.flatnonzero(np.isnan(gradient).any(axis=1)):
        _, exact = scalar_jsd(case["student"][row], case["teacher"][row], beta, temperature)
        gradient[row] = weights[row] * np.array(exact)
    weight = torch.tensor(weights, dtype=torch.float64)
    return GoldenCase(
        name=case["name"],
        beta=beta,
        temperature=temperature,
        student=torch.tensor(case["student"], dtype=torch.float64),
        teacher=torch.tensor(case["teacher"], dtype=torch.float64),
        weight=weight,
        per_token=torch.tensor(case["per_token"], dtype=torch.float64) * (weight != 0),
        gradient=torch.tensor(gradient),
    )


def recomputed(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function with a forward pass of its own for each backward pass, as gradcheck needs it."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            ctx.save_for_backward(logits)
            return function(logits)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = ctx.saved_tensors[0].detach().requires_grad_()
                return torch.autograd.grad(function(leaf), leaf, grad)[0]

    apply: Any = Recomputed.apply
    return apply  # type: ignore[no-any-return]


def random_logits(
    n: int, v: int, seed: int = 0, dtype: torch.dtype = torch.float32, gap: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Student and teacher logits and positive weights; `gap` is the deviation of their difference."""
    draw = torch.Generator().manual_seed(seed)
    student = 3 * torch.randn(n, v, generator=draw, dtype=torch.float64)
    teacher = student + gap * torch.randn(n, v, generator=draw, dtype=torch.float64)
    weight = 0.1 + torch.rand(n, generator=draw, dtype=torch.float64)
    return student.to(dtype), teacher.to(dtype), weight.to(torch.promote_types(dtype, torch.float32))
