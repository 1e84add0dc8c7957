"""Every path of the divergence against values and gradients that were made independently, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.kernels import generalized_jsd, linear_jsd, row_chunks
from tests.kernels.jsd_formulas import GoldenCase, gkd_jsd, golden_cases, scalar_jsd

CASES = golden_cases()
Path = Callable[[GoldenCase, torch.dtype], tuple[Tensor, Tensor]]


def from_logits(**options: Any) -> Path:
    def run(case: GoldenCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        student = case.student.to(dtype, copy=True).requires_grad_()
        weight = case.weight.to(dtype)
        per_token = generalized_jsd(
            student,
            case.teacher.to(dtype),
            beta=case.beta,
            temperature=case.temperature,
            token_weight_N=weight,
            **options,
        )
        (per_token * weight).sum().backward()
        assert student.grad is not None
        return per_token.detach(), student.grad

    return run


def from_identity_head(memory_budget: int, backend: Any = None) -> Path:
    """Hidden states that are the logits, behind a head that is the identity."""

    def run(case: GoldenCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        hidden = case.student.to(dtype, copy=True).requires_grad_()
        head = torch.eye(hidden.shape[1], dtype=dtype)
        result = linear_jsd(
            hidden,
            head,
            case.teacher.to(dtype),
            head,
            beta=case.beta,
            temperature=case.temperature,
            token_weight_N=case.weight.to(dtype),
            memory_budget=memory_budget,
            backend=backend,
        )
        result.loss.backward()
        expected = (case.weight * case.per_token).sum().item()
        assert result.loss.item() == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert hidden.grad is not None
        return result.per_token_N, hidden.grad

    return run


PATHS: dict[str, Path] = {
    "reference": from_logits(backend="reference"),
    "torch": from_logits(backend="torch"),
    "torch in place": from_logits(backend="torch", inplace_grad=True),
    "chosen by device": from_logits(),
    "linear": from_identity_head(1 << 20),
    "linear reference": from_identity_head(1 << 20, "reference"),
    "linear row by row": from_identity_head(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_golden(case: GoldenCase, path: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    per_token, gradient = PATHS[path](case, dtype)
    assert per_token.dtype == gradient.dtype == dtype
    torch.testing.assert_close(per_token.double(), case.per_token, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradient.double(), case.gradient, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("elements", [1, 40, 1 << 20])
def test_golden_in_any_chunks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CPU_CHUNK_ELEMENTS", elements)
    for case in CASES:
        test_golden(case, "torch", torch.float32)


def test_the_stored_gradients_are_the_definitions() -> None:
    """The stand-in for gradients that the generator could not make agrees where it could."""
    for case in CASES:
        for row in case.weight.nonzero()[:, 0].tolist():
            value, gradient = scalar_jsd(
                case.student[row].tolist(), case.teacher[row].tolist(), case.beta, case.temperature
            )
            assert value == pytest.approx(case.per_token[row].item(), abs=1e-12, rel=1e-12)
            expected = case.weight[row] * torch.tensor(gradient, dtype=torch.float64)
            torch.testing.assert_close(expected, case.gradient[row], atol=1e-12, rtol=1e-12)


def test_other_formulas_agree_with_the_golden_values() -> None:
    """The formula of TRL's GKD and OPSD has the same convention for beta."""
    for case in CASES:
        ours = gkd_jsd(case.student, case.teacher, beta=case.beta, temperature=case.temperature).sum(-1)
        torch.testing.assert_close(ours * (case.weight != 0), case.per_token, atol=1e-12, rtol=1e-12)
