"""What holds for any logits."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as npst
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_composer.kernels import generalized_jsd
from tests.kernels.jsd_formulas import random_logits, recomputed

BACKENDS = ["reference", "torch"]
BETAS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two sets of float32 logits, 1 to 4 rows of 1 to 40 columns, of any magnitude up to 1e4."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 40)))
    magnitude = draw(st.sampled_from([1e-3, 1.0, 30.0, 1e4]))
    logits = npst.arrays("float32", shape, elements=st.floats(-1.0, 1.0, width=32))
    return torch.from_numpy(draw(logits)) * magnitude, torch.from_numpy(draw(logits)) * magnitude


def value_and_gradient(
    student: Tensor, teacher: Tensor, beta: float, backend: str, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    student = student.detach().clone().requires_grad_()
    value = generalized_jsd(student, teacher, beta=beta, temperature=temperature, backend=backend)  # type: ignore[arg-type]
    value.sum().backward()
    assert student.grad is not None
    return value.detach(), student.grad


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=200, deadline=None)
@given(pair=pairs(), beta=BETAS)
def test_not_negative_and_finite_and_gradient_sums_to_zero(
    backend: str, pair: tuple[Tensor, Tensor], beta: float
) -> None:
    value, gradient = value_and_gradient(*pair, beta, backend)
    assert (value >= 0).all()
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    # Rounding of the probabilities, times the largest logarithm in the sum.
    largest = max(1.0, value.max().item())
    assert gradient.double().sum(dim=1).abs().max() < 1e-5 * largest


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(pair=pairs(), beta=BETAS)
def test_equal_rows_give_exactly_zero(backend: str, pair: tuple[Tensor, Tensor], beta: float) -> None:
    value, gradient = value_and_gradient(pair[0], pair[0].clone(), beta, backend)
    assert not value.any()
    assert not gradient.any()


@settings(max_examples=100, deadline=None)
@given(pair=pairs(), beta=BETAS)
def test_different_rows_give_more_than_zero(pair: tuple[Tensor, Tensor], beta: float) -> None:
    student, teacher = (logits.double() for logits in pair)
    apart = (student.softmax(1) - teacher.softmax(1)).abs().amax(dim=1) > 1e-3
    value, _ = value_and_gradient(student, teacher, beta, "torch")
    assert (value[apart] > 1e-8).all()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(pair=pairs())
def test_symmetric_and_bounded_at_one_half(backend: str, pair: tuple[Tensor, Tensor]) -> None:
    value, _ = value_and_gradient(*pair, 0.5, backend)
    swapped, _ = value_and_gradient(pair[1], pair[0], 0.5, backend)
    torch.testing.assert_close(value, swapped, atol=3e-6, rtol=0)
    assert (value <= math.log(2) + 1e-6).all()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(pair=pairs(), beta=BETAS, constant=st.floats(-1e4, 1e4))
def test_a_constant_added_to_a_row_changes_nothing(
    backend: str, pair: tuple[Tensor, Tensor], beta: float, constant: float
) -> None:
    student, teacher = (logits.double() for logits in pair)
    value, gradient = value_and_gradient(student, teacher, beta, backend)
    shifted, shifted_gradient = value_and_gradient(student + constant, teacher - 2 * constant, beta, backend)
    torch.testing.assert_close(shifted, value, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(shifted_gradient, gradient, atol=1e-6, rtol=1e-9)


@settings(max_examples=100, deadline=None)
@given(pair=pairs(), beta=BETAS, temperature=st.floats(0.25, 4.0))
def test_temperature_divides_both_logits(
    pair: tuple[Tensor, Tensor], beta: float, temperature: float
) -> None:
    """And nothing else: no factor temperature^2; the gradient is with respect to the logits before."""
    student, teacher = (logits.double() for logits in pair)
    value, gradient = value_and_gradient(student, teacher, beta, "torch", temperature)
    plain, plain_gradient = value_and_gradient(student / temperature, teacher / temperature, beta, "torch")
    torch.testing.assert_close(value, plain, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradient * temperature, plain_gradient, atol=1e-6, rtol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(pair=pairs(), beta=BETAS, data=st.data())
def test_rows_of_weight_zero_leave_no_trace(
    backend: str, pair: tuple[Tensor, Tensor], beta: float, data: st.DataObject
) -> None:
    """Nor do they if they hold NaN or infinities, and the other rows are as they are without them."""
    count = len(pair[0])
    dropped = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    poison = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    student = torch.where(dropped[:, None], poison, pair[0]).requires_grad_()
    teacher = torch.where(dropped[:, None], poison, pair[1])
    weight = (~dropped).float()
    value = generalized_jsd(student, teacher, beta=beta, token_weight_N=weight, backend=backend)  # type: ignore[arg-type]
    (value * weight).sum().backward()
    assert student.grad is not None
    assert not value[dropped].any()
    assert not student.grad[dropped].any()
    kept = ~dropped
    alone, gradient = value_and_gradient(pair[0][kept], pair[1][kept], beta, backend)
    torch.testing.assert_close(value[kept].detach(), alone, atol=0, rtol=0)
    torch.testing.assert_close(student.grad[kept], gradient, atol=0, rtol=0)


def test_the_limits_of_beta_are_not_the_divergences_at_its_ends() -> None:
    """As beta goes to 0 the mixture form goes to 0, and divided by beta to the KL divergence at 0."""
    student, teacher, _ = random_logits(4, 50, dtype=torch.float64)
    forward_kl, _ = value_and_gradient(student, teacher, 0.0, "torch")
    nearly, _ = value_and_gradient(student, teacher, 1e-7, "torch")
    assert (nearly < 1e-4 * forward_kl).all()
    torch.testing.assert_close(nearly / 1e-7, forward_kl, rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(beta: float, temperature: float) -> None:
    student, teacher, _ = random_logits(3, 7, dtype=torch.float64)

    def jsd(logits: Tensor) -> Tensor:
        return generalized_jsd(logits, teacher, beta=beta, temperature=temperature)

    assert torch.autograd.gradcheck(recomputed(jsd), student.requires_grad_())
