"""The SDPO loss: weights, cap, top-K and divisor by hand; the same from logits and from hidden states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.losses.config import SDPOConfig
from forge_composer.losses.sdpo import SDPOLoss, sdpo_loss, sdpo_loss_from_hidden, sdpo_token_weights


def logits(*rows: tuple[float, ...]) -> Tensor:
    """Logits of rows of probabilities."""
    return torch.tensor(rows).log()


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


STUDENT, TEACHER = (0.5, 0.3, 0.2), (0.1, 0.6, 0.3)


def loss_of(student: Tensor, teacher: Tensor, weight: Tensor | None = None, **options: Any) -> SDPOLoss:
    weight = torch.ones(len(student)) if weight is None else weight
    return sdpo_loss(student, teacher, weight, config=SDPOConfig(**options))


@pytest.mark.parametrize(
    ("beta", "value"),
    [
        (0.0, kl(TEACHER, STUDENT)),
        (1.0, kl(STUDENT, TEACHER)),
        (0.5, 0.5 * kl(TEACHER, (0.3, 0.45, 0.25)) + 0.5 * kl(STUDENT, (0.3, 0.45, 0.25))),
        (0.25, 0.25 * kl(TEACHER, (0.4, 0.375, 0.225)) + 0.75 * kl(STUDENT, (0.4, 0.375, 0.225))),
    ],
)
def test_divergence_by_hand(beta: float, value: float) -> None:
    result = loss_of(logits(STUDENT), logits(TEACHER), divergence_beta=beta)
    assert result.loss.item() == pytest.approx(value, rel=1e-5)
    assert result.per_token_N.item() == pytest.approx(value, rel=1e-5)


def test_weights_by_hand() -> None:
    """pi / pi_generator = 1.5, 8 (capped at 2), 0.25, masked; targets weigh 1, 1, 2, 1; four distilled
    tokens."""
    ratios = torch.tensor([1.5, 8.0, 0.25, math.nan])
    arguments = (ratios.log(), torch.zeros(4), torch.tensor([True, True, True, False]))
    extra = torch.tensor([1.0, 1.0, 2.0, 1.0])
    weights = sdpo_token_weights(*arguments, config=SDPOConfig(), divisor=4.0, extra_weight_N=extra)
    assert weights.tolist() == pytest.approx([1.5 / 4, 2.0 / 4, 0.5 / 4, 0.0])
    off = sdpo_token_weights(*arguments, config=SDPOConfig(is_clip=0.0), divisor=0.0)
    assert off.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_what_the_teacher_is_not_sure_of_counts_less() -> None:
    """exp(-2 H) at H = 0, log 2 and 1 nat."""
    arguments = (torch.zeros(3), torch.zeros(3), torch.ones(3, dtype=torch.bool))
    config = SDPOConfig(teacher_entropy_coef=2.0)
    entropies = torch.tensor([0.0, math.log(2.0), 1.0])
    weights = sdpo_token_weights(*arguments, config=config, divisor=1.0, teacher_entropy_N=entropies)
    assert weights.tolist() == pytest.approx([1.0, 0.25, math.exp(-2.0)])
    with pytest.raises(ValueError, match="entropies"):
        sdpo_token_weights(*arguments, config=config, divisor=1.0)


def test_weights_carry_no_gradient() -> None:
    student = torch.zeros(2, requires_grad=True)
    weights = sdpo_token_weights(
        student, torch.zeros(2), torch.ones(2, dtype=torch.bool), config=SDPOConfig(), divisor=1.0
    )
    assert not weights.requires_grad


def test_weighted_sum_and_its_gradient() -> None:
    """Two rows, weights 0.25 and 0: the second may hold NaN. At beta = 0 the gradient is w (p_S - p_T)."""
    student = torch.cat([logits(STUDENT), torch.full((1, 3), math.nan)]).requires_grad_()
    teacher = torch.cat([logits(TEACHER), torch.full((1, 3), math.nan)])
    result = loss_of(student, teacher, torch.tensor([0.25, 0.0]), divergence_beta=0.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.25 * kl(TEACHER, STUDENT), rel=1e-5)
    assert student.grad is not None
    expected = 0.25 * (torch.tensor(STUDENT) - torch.tensor(TEACHER))
    torch.testing.assert_close(student.grad, torch.stack([expected, torch.zeros(3)]))


def test_cap_by_hand() -> None:
    """One token below the cap, one above: it counts as the cap and gets no gradient."""
    student = logits(STUDENT, (0.98, 0.01, 0.01)).requires_grad_()
    teacher = logits(TEACHER, (0.01, 0.98, 0.01))
    plain = loss_of(student, teacher, divergence_beta=1.0).per_token_N
    assert plain[0] < 1.0 < plain[1]
    result = loss_of(student, teacher, divergence_beta=1.0, per_token_cap=1.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(plain[0].item() + 1.0)
    assert result.capped_N.tolist() == [False, True]
    assert student.grad is not None
    assert student.grad[0].abs().max() > 0.01
    assert student.grad[1].tolist() == [0.0, 0.0, 0.0]


def test_equal_contexts_give_exactly_nothing() -> None:
    """A hint that says nothing: value and gradient are 0, not merely small."""
    for beta in (0.0, 0.1, 0.5, 1.0):
        student = (torch.randn(5, 97, generator=torch.Generator().manual_seed(1)) * 9).requires_grad_()
        result = loss_of(student, student.detach().clone(), divergence_beta=beta)
        result.loss.backward()
        assert result.loss.item() == 0.0
        assert student.grad is not None
        assert (student.grad == 0).all()


@pytest.mark.parametrize(
    ("options", "value"),
    [
        # the student's two likeliest are 0 and 1; what is left is 0.2 for the student, 0.3 for the teacher
        ({"top_k": 2}, kl((0.1, 0.6, 0.3), (0.5, 0.3, 0.2))),
        # the teacher's two likeliest are 1 and 2; the tail is 0
        ({"top_k": 2, "top_k_support": "teacher"}, kl((0.6, 0.3, 0.1), (0.3, 0.2, 0.5))),
        ({"top_k": 1}, kl((0.1, 0.9), (0.5, 0.5))),
        ({"top_k": 2, "top_k_tail": False}, kl((1 / 7, 6 / 7), (5 / 8, 3 / 8))),
        ({"top_k": 2, "top_k_support": "teacher", "top_k_tail": False}, kl((2 / 3, 1 / 3), (3 / 5, 2 / 5))),
    ],
)
def test_top_k_by_hand(options: dict[str, Any], value: float) -> None:
    result = loss_of(logits(STUDENT), logits(TEACHER), divergence_beta=0.0, **options)
    assert result.loss.item() == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"divergence_beta": 0.0}, {"per_token_cap": 0.3}, {"temperature": 2.0}]
)
def test_from_hidden_states_is_the_same(options: dict[str, Any]) -> None:
    """Loss, divergences, and gradients of hidden states and head, in chunks of one token."""
    draw = torch.Generator().manual_seed(0)
    hidden, head, teacher_hidden, teacher_head = (
        torch.randn(*shape, generator=draw) for shape in ((6, 4), (11, 4), (6, 3), (11, 3))
    )
    weight = torch.tensor([0.1, 0.0, 0.3, 0.2, 1.0, 0.7])
    config = SDPOConfig(**options)
    results = []
    for fused in (False, True):
        inputs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        if fused:
            result = sdpo_loss_from_hidden(
                *inputs, teacher_hidden, teacher_head, weight, config=config, memory_budget=1
            )
        else:
            student, teacher = inputs[0] @ inputs[1].t(), teacher_hidden @ teacher_head.t()
            result = sdpo_loss(student, teacher, weight, config=config)
        result.loss.backward()
        results.append((result.loss.detach(), result.per_token_N, *(tensor.grad for tensor in inputs)))
    for plain, fused_value in zip(*results, strict=True):
        torch.testing.assert_close(fused_value, plain, atol=1e-6, rtol=1e-5)


def test_top_k_from_hidden_states_is_refused() -> None:
    hidden = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="top_k"):
        sdpo_loss_from_hidden(
            hidden, hidden, hidden, hidden, torch.ones(1), config=SDPOConfig(top_k=1), memory_budget=1
        )


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_distil_is_zero(rows: int) -> None:
    """No token, or only masked ones: loss 0 with a graph, gradient 0."""
    student = torch.full((rows, 5), math.nan, requires_grad=True)
    weight = torch.zeros(rows)
    result = loss_of(student, torch.full((rows, 5), math.nan), weight)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert student.grad is not None
    assert (student.grad == 0).all()
