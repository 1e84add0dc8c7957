"""The divergence on K tokens: SDPO's and OPSD's formulas, and where this project differs from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.bench.memory import peak_extra_bytes
from forge_composer.kernels import generalized_jsd, row_chunks, topk_jsd
from tests.kernels.jsd_formulas import opsd_loss, random_logits, recomputed, sdpo_topk_jsd

BETAS = [0.0, 0.3, 0.5, 1.0]


def gradient_of(value: Tensor, leaf: Tensor, upstream: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(value, leaf, upstream.to(value.dtype))
    return gradient


@pytest.mark.parametrize("chunk", [1, 1 << 18])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_sdpo(beta: float, tail: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student's K likeliest tokens with true log-probabilities, and a bucket for the rest or none."""
    monkeypatch.setattr(row_chunks, "CPU_CHUNK_ELEMENTS", chunk)
    student, teacher, weight = random_logits(7, 60)
    leaf = student.clone().requires_grad_()
    options: dict[str, Any] = {"k": 5, "temperature": 0.8}
    ours = topk_jsd(leaf, teacher, support="student", tail=tail, beta=beta, token_weight_N=weight, **options)
    exact_leaf = student.double().requires_grad_()
    exact = sdpo_topk_jsd(exact_leaf, teacher.double(), alpha=beta, add_tail=tail, **options)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=2e-6)
    gradient = gradient_of(ours, leaf, weight).double()
    torch.testing.assert_close(gradient, gradient_of(exact, exact_leaf, weight), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_opsd(beta: float) -> None:
    """The teacher's K likeliest tokens, renormalised; their mean over labelled tokens is our weighted sum."""
    student, teacher, _ = random_logits(7, 60)
    labels = torch.tensor([3, -100, 0, 1, -100, 2, 9])
    exact_leaf, leaf = student.double().requires_grad_(), student.clone().requires_grad_()
    exact = opsd_loss(exact_leaf, teacher.double(), labels, beta=beta, temperature=1.1, top_k=5)
    weight = (labels != -100).float() / (labels != -100).sum()
    ours = topk_jsd(
        leaf,
        teacher,
        k=5,
        support="teacher",
        tail=False,
        beta=beta,
        temperature=1.1,
        token_weight_N=weight,
    )
    loss = (ours * weight).sum()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    gradient = gradient_of(loss, leaf, torch.ones(())).double()
    expected = gradient_of(exact, exact_leaf, torch.ones(()))
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_opsd_and_gkd_over_the_whole_vocabulary(beta: float) -> None:
    student, teacher, _ = random_logits(7, 60)
    labels = torch.tensor([3, -100, 0, 1, -100, 2, 9])
    exact = opsd_loss(student.double(), teacher.double(), labels, beta=beta, temperature=1.1)
    weight = (labels != -100).float() / (labels != -100).sum()
    ours = generalized_jsd(student, teacher, beta=beta, temperature=1.1, token_weight_N=weight)
    assert (ours * weight).sum().item() == pytest.approx(exact.item(), rel=1e-5)


def test_with_nothing_labelled_opsd_is_nan_and_ours_is_zero() -> None:
    student, teacher, _ = random_logits(3, 20)
    assert opsd_loss(student, teacher, torch.full((3,), -100), beta=0.5, temperature=1.0).isnan()
    leaf = student.requires_grad_()
    for loss in (
        generalized_jsd(leaf, teacher, token_weight_N=torch.zeros(3)),
        topk_jsd(leaf, teacher, k=4, support="teacher", tail=False, token_weight_N=torch.zeros(3)),
        topk_jsd(leaf, teacher, k=4, support="student", tail=True, token_weight_N=torch.zeros(3)),
    ):
        assert loss.tolist() == [0.0] * 3
        assert not gradient_of(loss, leaf, torch.ones(3)).any()


def test_renormalising_hides_what_lies_outside_the_support() -> None:
    """Two distributions that differ only in how much they put on the K tokens: 0 without the tail."""
    student = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    teacher = torch.tensor([[2.0, 1.0, 1.0, 1.0]])
    options: dict[str, Any] = {"k": 2, "support": "student"}
    renormalised = topk_jsd(student, teacher, tail=False, **options)
    with_tail = topk_jsd(student, teacher, tail=True, **options)
    assert renormalised.item() == pytest.approx(0.0, abs=1e-7)
    assert with_tail.item() == pytest.approx(generalized_jsd(student, teacher).item(), rel=1e-5)


def test_a_tail_below_sdpos_bound_is_exact() -> None:
    """The authors' code holds the tail above 1e-7; here a tail of 1e-12 keeps its size, in float32."""
    student = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 0.0, 0.0]])
    options: dict[str, Any] = {"k": 1, "support": "student", "tail": True}
    rest = 2 * math.exp(-30) / (1 + 2 * math.exp(-30))
    ours = topk_jsd(student, teacher, beta=0.0, **options)
    exact = math.log(1 / 3) / 3 + 2 / 3 * math.log(2 / 3 / rest)
    assert ours.item() == pytest.approx(exact, rel=1e-6)
    bounded = sdpo_topk_jsd(student.detach(), teacher, k=1, alpha=0.0, temperature=1.0, add_tail=True)
    assert bounded.item() == pytest.approx(math.log(1 / 3) / 3 + 2 / 3 * math.log(2 / 3 / 1e-7), rel=1e-3)
    # Each of the two tokens takes half of the bucket's gradient, p - q.
    assert gradient_of(ours, student, torch.ones(1)).tolist()[0] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("k", [60, 61, 1000])
def test_the_whole_vocabulary_as_support(support: Any, tail: bool, k: int) -> None:
    student, teacher, weight = random_logits(7, 60)
    leaf = student.clone().requires_grad_()
    ours = topk_jsd(leaf, teacher, k=k, support=support, tail=tail, beta=0.3, token_weight_N=weight)
    full = generalized_jsd(leaf, teacher, beta=0.3, token_weight_N=weight)
    assert torch.equal(ours, full)
    assert torch.equal(gradient_of(ours, leaf, weight), gradient_of(full, leaf, weight))


def test_with_the_tail_it_is_a_lower_bound_that_grows_with_k() -> None:
    student, teacher, _ = random_logits(20, 60, dtype=torch.float64)
    full = generalized_jsd(student, teacher)
    values = [topk_jsd(student, teacher, k=k, support="teacher", tail=True) for k in (1, 4, 16, 59)]
    for smaller, larger in zip(values, [*values[1:], full], strict=True):
        assert (smaller <= larger + 1e-12).all()
    torch.testing.assert_close(values[-1], full, rtol=1e-9, atol=0)  # one token is left for the bucket


@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradcheck(support: Any, tail: bool, beta: float) -> None:
    student, teacher, _ = random_logits(3, 9, dtype=torch.float64)

    def jsd(logits: Tensor) -> Tensor:
        return topk_jsd(logits, teacher, k=3, support=support, tail=tail, beta=beta, temperature=0.7)

    assert torch.autograd.gradcheck(recomputed(jsd), student.requires_grad_())


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("tail", [True, False])
def test_equal_rows_and_rows_of_weight_zero(
    tail: bool, synchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not synchronous:
        monkeypatch.setattr(row_chunks, "SYNCHRONOUS_DEVICES", frozenset())
    student, teacher, weight = random_logits(5, 30)
    teacher[4] = student[4]
    options: dict[str, Any] = {"k": 4, "support": "student", "tail": tail}
    expected_leaf = student.clone().requires_grad_()
    expected = topk_jsd(expected_leaf, teacher, **options)
    weight[1:3] = 0.0
    student[1], student[2], teacher[2] = math.nan, math.inf, math.nan
    leaf = student.requires_grad_()
    value = topk_jsd(leaf, teacher, token_weight_N=weight, **options)
    gradient = gradient_of(value, leaf, weight)
    kept = [0, 3, 4]
    assert torch.equal(value[kept], expected[kept])
    assert value[[1, 2, 4]].tolist() == [0.0] * 3
    assert not gradient[[1, 2, 4]].any()
    torch.testing.assert_close(gradient[kept], gradient_of(expected, expected_leaf, weight)[kept])


def test_masked_vocabulary() -> None:
    """Fewer tokens than K, and nothing in the tail."""
    student, teacher, _ = random_logits(4, 10)
    expected = generalized_jsd(student[:, :3], teacher[:, :3])
    student[:, 3:], teacher[:, 3:] = -math.inf, -math.inf
    student.requires_grad_()
    for tail in (True, False):
        value = topk_jsd(student, teacher, k=5, support="student", tail=tail)
        torch.testing.assert_close(value.detach(), expected, atol=1e-6, rtol=1e-6)
        gradient = gradient_of(value, student, torch.ones(4))
        assert gradient.isfinite().all()
        assert not gradient[:, 3:].any()


@pytest.mark.parametrize("tail", [True, False])
def test_no_float32_copy_of_the_logits(tail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, v, k, elements = 256, 2048, 8, 4 * 2048
    monkeypatch.setattr(row_chunks, "CPU_CHUNK_ELEMENTS", elements)
    student, teacher, weight = random_logits(n, v, dtype=torch.bfloat16)
    student.requires_grad_()

    def work() -> None:
        value = topk_jsd(student, teacher, k=k, support="student", tail=tail, token_weight_N=weight)
        (value * weight).sum().backward()

    work()
    # The gradient in bfloat16, and the categories: some dozen numbers for each.
    allowed = n * v * 2 + 3 * elements * 4 + 32 * n * (k + 1) * 8
    assert peak_extra_bytes(work, torch.device("cpu")) < allowed < n * v * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [({"k": 0}, "k >= 1"), ({"support": "both"}, "support"), ({"beta": 2.0}, "beta")],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    student, teacher, _ = random_logits(3, 9)
    options: dict[str, Any] = {"k": 2, "support": "student", "tail": True} | change
    with pytest.raises(ValueError, match=message):
        topk_jsd(student, teacher, **options)
