"""Masked vocabularies, one-hot rows, infinite divergences, empty shapes, low precision, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.kernels import generalized_jsd, row_chunks
from tests.kernels.jsd_formulas import random_logits, scalar_jsd

INF = math.inf
BACKENDS = ["reference", "torch"]
BETAS = [0.0, 0.1, 0.5, 1.0]


def run(student: Any, teacher: Any, **options: Any) -> tuple[Tensor, Tensor]:
    student = torch.as_tensor(student).clone().requires_grad_()
    value = generalized_jsd(student, torch.as_tensor(teacher), **options)
    value.sum().backward()
    assert student.grad is not None
    return value.detach(), student.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mask", [-INF, -1e30, torch.finfo(torch.float32).min])
def test_columns_masked_in_both_take_no_part(backend: str, beta: float, mask: float) -> None:
    student, teacher, _ = random_logits(3, 10)
    masked = torch.zeros(10, dtype=torch.bool).index_fill(0, torch.tensor([0, 4, 9]), True)
    value, gradient = run(
        student.masked_fill(masked, mask), teacher.masked_fill(masked, mask), beta=beta, backend=backend
    )
    expected, expected_gradient = run(student[:, ~masked], teacher[:, ~masked], beta=beta, backend=backend)
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient[:, ~masked], expected_gradient, atol=1e-6, rtol=1e-6)
    assert not gradient[:, masked].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("beta", "student", "teacher", "expected"),
    [
        (0.0, [0.0, -INF, 0.0], [0.0, 0.0, 0.0], INF),
        (0.0, [0.0, 0.0, 0.0], [0.0, -INF, 0.0], math.log(1.5)),
        (0.0, [0.0, -INF, 0.0], [1e4, 0.0, 0.0], INF),  # the teacher's probability underflows, and is not 0
        (1.0, [0.0, 0.0, 0.0], [0.0, -INF, 0.0], INF),
        (1.0, [0.0, -INF, 0.0], [0.0, 0.0, 0.0], math.log(1.5)),
        (0.5, [0.0, -INF], [-INF, 0.0], math.log(2.0)),
        (0.1, [0.0, -INF], [-INF, 0.0], -0.1 * math.log(0.1) - 0.9 * math.log(0.9)),
        (0.0, [-INF, -INF, -INF], [0.0, 0.0, 0.0], 0.0),
        (0.5, [0.0, 0.0, 0.0], [-INF, -INF, -INF], 0.0),
        (1.0, [-INF, -INF, -INF], [-INF, -INF, -INF], 0.0),
    ],
)
def test_masked_on_one_side(
    backend: str, beta: float, student: list[float], teacher: list[float], expected: float
) -> None:
    """Infinite where it is infinite; then, and for rows without any probability, the gradient is 0."""
    value, gradient = run([student, student], [teacher, teacher], beta=beta, backend=backend)
    assert value.tolist() == pytest.approx([expected, expected], rel=1e-6)
    assert gradient.isfinite().all()
    if expected in (0.0, INF):
        assert not gradient.any()
    elif -INF not in student:
        _, exact = scalar_jsd(student, teacher, beta, 1.0)
        assert gradient[0].tolist() == pytest.approx(exact, abs=1e-6)


def test_an_infinite_row_does_not_disturb_its_neighbours() -> None:
    student, teacher, _ = random_logits(3, 6)
    expected, expected_gradient = run(student, teacher, beta=1.0)
    teacher[1, 2] = -INF
    value, gradient = run(student, teacher, beta=1.0)
    assert value.tolist() == [expected[0].item(), INF, expected[2].item()]
    assert torch.equal(gradient[0::2], expected_gradient[0::2])
    assert not gradient[1].any()


@pytest.mark.parametrize("beta", BETAS)
def test_nan_in_a_row_that_counts_is_not_hidden(beta: float) -> None:
    student, teacher, _ = random_logits(3, 6)
    student[1, 2] = math.nan
    value, gradient = run(student, teacher, beta=beta)
    assert value.isnan().tolist() == [False, True, False]
    assert gradient[1].isnan().any()
    assert gradient[0::2].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta", BETAS)
def test_far_apart_rows(backend: str, beta: float) -> None:
    """Logits of +-1e4 and one-hot rows: right values and gradients, in float32."""
    rows = [[1e4, 0.0, -1e4], [-1e4, 1e4, 0.0], [50.0, 0.0, 1.0], [0.0, 0.5, 1.0], [-300.0, 300.0, 299.0]]
    for student in rows:
        for teacher in rows:
            if beta in (0.0, 1.0) and max(map(abs, student + teacher)) == 1e4:
                continue  # a probability of e^-10000 under a logarithm: not for the numbers of this test
            value, gradient = run([student], [teacher], beta=beta, backend=backend)
            exact, exact_gradient = scalar_jsd(student, teacher, beta, 1.0)
            assert value.item() == pytest.approx(exact, rel=1e-5, abs=1e-6)
            assert gradient[0].tolist() == pytest.approx(exact_gradient, rel=1e-5, abs=2e-5)


@pytest.mark.parametrize("beta", [1e-300, 1e-30, 1 - 1e-16])
def test_a_beta_next_to_its_limits_stays_finite(beta: float) -> None:
    for dtype in (torch.float32, torch.float64):
        rows = torch.tensor([[1e4, 0.0, -1e4], [0.0, 1e4, 3.0], [1.0, 2.0, 3.0]], dtype=dtype)
        value, gradient = run(rows, rows.flip(0), beta=beta, backend="torch")
        exact, _ = run(rows, rows.flip(0), beta=beta, backend="reference")
        torch.testing.assert_close(value, exact, atol=1e-6, rtol=1e-6)
        assert gradient.isfinite().all()


def test_kl_of_one_hot_rows() -> None:
    value, gradient = run([[1e4, 0.0]], [[0.0, 1e4]], beta=0.0)
    assert value.tolist() == [1e4]
    assert gradient.tolist() == [[1.0, -1.0]]
    value, gradient = run([[1e4, 0.0]], [[0.0, 1e4]], beta=1.0)
    assert value.tolist() == [1e4]
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (3, 1)])
def test_small_shapes(backend: str, shape: tuple[int, int]) -> None:
    for inplace in (False, True):
        leaf = torch.randn(shape, requires_grad=True)
        value = generalized_jsd(leaf * 1.0, torch.randn(shape), inplace_grad=inplace, backend=backend)  # type: ignore[arg-type]
        value.sum().backward()
        assert value.tolist() == [0.0] * shape[0]
        assert leaf.grad is not None
        assert leaf.grad.shape == shape
        assert not leaf.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", BETAS)
def test_low_precision_is_worked_on_in_float32(dtype: torch.dtype, beta: float) -> None:
    """The value has float32's error only, the gradient in addition one rounding to its own dtype."""
    student, teacher, _ = random_logits(5, 300, dtype=dtype)
    value, gradient = run(student, teacher, beta=beta, backend="torch")
    exact, exact_gradient = run(student.double(), teacher.double(), beta=beta, backend="reference")
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value.double(), exact, atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(
        gradient.double(), exact_gradient, atol=1e-7, rtol=1.01 * torch.finfo(dtype).eps / 2 + 1e-4
    )


def test_mixed_dtypes_and_strided_rows() -> None:
    student, teacher, _ = random_logits(4, 20)
    wide = torch.zeros(8, 33)
    wide[::2, 5:25] = student
    value, gradient = run(student, teacher.bfloat16(), beta=0.3)
    leaf = wide.requires_grad_()
    strided = generalized_jsd(leaf[::2, 5:25], teacher.bfloat16(), beta=0.3)
    strided.sum().backward()
    assert torch.equal(strided.detach(), value)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad[::2, 5:25], gradient)
    assert leaf.grad.count_nonzero() == gradient.count_nonzero()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student_NV": torch.randn(2, 3, 4)}, r"\[N, V\]"),
        ({"teacher_NV": torch.randn(2, 5)}, r"\[N, V\]"),
        ({"student_NV": torch.ones(2, 4, dtype=torch.long)}, "floating point"),
        ({"teacher_NV": torch.randn(2, 4, device="meta")}, "on meta"),
        ({"beta": -0.1}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"token_weight_N": torch.ones(3)}, "token_weight_N"),
        ({"token_weight_N": torch.ones(2, 1)}, "token_weight_N"),
        ({"token_weight_N": torch.ones(2, device="meta")}, "token_weight_N"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"student_NV": torch.randn(2, 4), "teacher_NV": torch.randn(2, 4)}
    with pytest.raises(ValueError, match=message):
        generalized_jsd(**(arguments | change))


def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="interpreter"):
        generalized_jsd(torch.randn(2, 4), torch.randn(2, 4), backend="triton")


def test_where_the_host_does_not_wait_rows_of_weight_zero_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where leaving them out would need their number; tried here on the CPU."""
    student, teacher, _ = random_logits(6, 9, dtype=torch.bfloat16)
    weight = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0])

    def result() -> tuple[Tensor, Tensor]:
        leaf = student.clone().requires_grad_()
        value = generalized_jsd(leaf, teacher, beta=0.3, token_weight_N=weight, backend="torch")
        (value * torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 3.0])).sum().backward()
        assert leaf.grad is not None
        return value.detach(), leaf.grad

    expected, expected_gradient = result()
    student[1], teacher[3] = math.nan, math.nan
    monkeypatch.setattr(row_chunks, "SYNCHRONOUS_DEVICES", frozenset())
    value, gradient = result()
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)
