"""The divergence from hidden states and LM heads: equal to that of the logits, in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.bench.memory import peak_extra_bytes
from forge_composer.kernels import generalized_jsd, linear_jsd, row_chunks

N, H, H_TEACHER, V = 11, 6, 4, 37
BUDGETS = {"a row": 1, "ragged chunks": 4 * V * 2 * 4, "one chunk": 1 << 28}


def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    weight = 0.1 + torch.rand(N, generator=draw)
    weight[3] = 0.0
    return {
        "hidden": normal(N, H),
        "head": 1.5 * normal(V, H),
        "teacher_hidden": normal(N, H_TEACHER),
        "teacher_head": 1.5 * normal(V, H_TEACHER),
        "weight": weight,
    }


def from_logits(given: dict[str, Tensor], cap: float | None = None, **options: Any) -> dict[str, Tensor]:
    """By the reference, in float64, with a plain clamp for the cap."""
    hidden, head = (given[name].detach().double().requires_grad_() for name in ("hidden", "head"))
    teacher = given["teacher_hidden"].double() @ given["teacher_head"].detach().double().t()
    weight = given["weight"].double()
    per_token = generalized_jsd(
        hidden @ head.t(), teacher, backend="reference", token_weight_N=weight, **options
    )
    loss = (weight * (per_token if cap is None else per_token.clamp(max=cap))).sum()
    loss.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return {
        "loss": loss.detach(),
        "per_token": per_token.detach(),
        "hidden": hidden.grad,
        "head": head.grad,
    }


def run(given: dict[str, Tensor], upstream: float = 1.0, **options: Any) -> dict[str, Tensor]:
    hidden, head = (given[name].clone().requires_grad_() for name in ("hidden", "head"))
    result = linear_jsd(
        hidden,
        head,
        given["teacher_hidden"],
        given["teacher_head"],
        token_weight_N=given["weight"],
        **options,
    )
    assert not result.per_token_N.requires_grad
    (result.loss * upstream).backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return {
        "loss": result.loss.detach(),
        "per_token": result.per_token_N,
        "hidden": hidden.grad,
        "head": head.grad,
    }


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(ours[name].double(), value, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 0.7), (0.5, 1.0), (1.0, 2.0)])
def test_equals_the_divergence_of_the_logits(
    budget: int, capped: bool, beta: float, temperature: float
) -> None:
    given = make()
    cap = None
    if capped:  # half of the tokens
        cap = from_logits(given, beta=beta, temperature=temperature)["per_token"].median().item() + 1e-4
    expected = from_logits(given, cap, beta=beta, temperature=temperature)
    ours = run(given, beta=beta, temperature=temperature, per_token_cap=cap, memory_budget=budget)
    assert_same(ours, expected)
    if cap is not None:
        over = expected["per_token"] > cap
        assert over.sum() == N // 2
        assert not ours["hidden"][over].any()
    assert not ours["hidden"][3].any()


def test_the_reference_for_comparison() -> None:
    given = make()
    for cap in (None, 0.4):
        options: dict[str, Any] = {"beta": 0.3, "temperature": 0.7}
        ours = run(given, per_token_cap=cap, backend="reference", **options)
        assert_same(ours, from_logits(given, cap, **options))


def test_chunks_follow_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """V * 8 bytes a row in float32 for the two sets of logits: four rows in 4 * V * 8 bytes."""
    heights: list[int] = []
    real_mm = torch.mm

    def mm(*args: Any, **kwargs: Any) -> Tensor:
        out = real_mm(*args, **kwargs)
        if out.shape[1] == V:
            heights.append(len(out))
        return out

    monkeypatch.setattr(torch, "mm", mm)
    given = make()
    given["weight"][3] = 1.0
    run(given, memory_budget=4 * V * 8 + 7)
    assert heights == [4, 4, 4, 4, 3, 3]
    with pytest.raises(ValueError, match="memory_budget"):
        run(given, memory_budget=0)


@pytest.mark.parametrize("upstream", [0.0, -2.5])
def test_scaled_upstream_gradient(upstream: float) -> None:
    given = make()
    plain, scaled = run(given), run(given, upstream)
    torch.testing.assert_close(scaled["hidden"], upstream * plain["hidden"])
    torch.testing.assert_close(scaled["head"], upstream * plain["head"])


def test_gradients_by_finite_differences() -> None:
    given = make(torch.float64)
    ours = run(given, beta=0.3, temperature=0.7, memory_budget=3 * V * 16)
    for name in ("hidden", "head"):
        for row, column in ((0, 0), (4, 3), (10, 5)):
            values = []
            for step in (1e-6, -1e-6):
                moved = given | {name: given[name].clone()}
                moved[name][row, column] += step
                values.append(from_logits(moved, beta=0.3, temperature=0.7)["loss"])
            slope = (values[0] - values[1]) / 2e-6
            assert ours[name][row, column].item() == pytest.approx(slope.item(), abs=1e-8)


def test_bfloat16_with_a_float32_sum_over_chunks() -> None:
    """Many chunks give the head the gradient that one gives, and not a sum that stalls in bfloat16."""
    draw = torch.Generator().manual_seed(0)
    n = 512
    given = {
        "hidden": (1 + 0.1 * torch.randn(n, H, generator=draw)).bfloat16(),
        "head": torch.randn(V, H, generator=draw).bfloat16(),
        "teacher_hidden": (1 + 0.1 * torch.randn(n, H_TEACHER, generator=draw)).bfloat16(),
        "teacher_head": torch.randn(V, H_TEACHER, generator=draw).bfloat16(),
        "weight": torch.full((n,), 1.0),
    }
    expected = from_logits(given)
    ours = run(given, memory_budget=1)
    assert ours["loss"].dtype == ours["per_token"].dtype == torch.float32
    assert ours["hidden"].dtype == ours["head"].dtype == torch.bfloat16
    assert ours["loss"].item() == pytest.approx(expected["loss"].item(), rel=2e-3)
    for name in ("hidden", "head"):
        error = (ours[name].double() - expected[name]).norm() / expected[name].norm()
        assert error < 0.01, name


def test_frozen_head_and_frozen_hidden_states() -> None:
    given = make()
    expected = from_logits(given)
    for learns in ("hidden", "head"):
        leaves = {name: given[name].clone().requires_grad_(name == learns) for name in ("hidden", "head")}
        result = linear_jsd(
            leaves["hidden"],
            leaves["head"],
            given["teacher_hidden"],
            given["teacher_head"],
            token_weight_N=given["weight"],
        )
        result.loss.backward()
        gradient = leaves[learns].grad
        assert gradient is not None
        torch.testing.assert_close(gradient.double(), expected[learns], atol=1e-5, rtol=1e-5)
    frozen = linear_jsd(given["hidden"], given["head"], given["teacher_hidden"], given["teacher_head"])
    assert not frozen.loss.requires_grad


def test_no_gradient_of_the_head_is_made_if_it_is_frozen() -> None:
    n, v, h = 4, 1000, 512
    head, hidden = torch.randn(v, h), torch.randn(n, h, requires_grad=True)

    def work() -> None:
        linear_jsd(hidden, head, torch.randn(n, h), head).loss.backward()

    work()
    assert peak_extra_bytes(work, torch.device("cpu")) < v * h * 4 / 4


def test_a_head_that_is_also_the_teachers() -> None:
    """Self-distillation with the live head: its gradient comes from the student's side only."""
    given = make()
    given["teacher_hidden"] = given["hidden"] + 0.3
    given["teacher_head"] = given["head"]
    expected = from_logits(given)
    hidden, head = given["hidden"].clone().requires_grad_(), given["head"].clone().requires_grad_()
    teacher_hidden = given["teacher_hidden"].clone().requires_grad_()
    result = linear_jsd(hidden, head, teacher_hidden, head, token_weight_N=given["weight"])
    result.loss.backward()
    assert head.grad is not None
    torch.testing.assert_close(head.grad.double(), expected["head"], atol=1e-5, rtol=1e-5)
    assert teacher_hidden.grad is None


def test_an_equal_teacher_gives_exactly_zero() -> None:
    given = make()
    given |= {"teacher_hidden": given["hidden"], "teacher_head": given["head"]}
    for result in run(given, memory_budget=BUDGETS["ragged chunks"]).values():
        assert not result.any()


@pytest.mark.parametrize("synchronous", [True, False])
def test_rows_of_weight_zero_leave_no_trace(synchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not synchronous:
        monkeypatch.setattr(row_chunks, "SYNCHRONOUS_DEVICES", frozenset())
    given = make()
    expected = from_logits(given)
    given["hidden"][3], given["teacher_hidden"][3] = math.nan, math.inf
    ours = run(given, memory_budget=BUDGETS["ragged chunks"])
    assert_same(ours, expected)
    assert ours["per_token"][3] == 0
    given["weight"].zero_()
    for result in run(given).values():
        assert not result.any()


def test_no_tokens() -> None:
    given = make()
    for name in ("hidden", "teacher_hidden", "weight"):
        given[name] = given[name][:0]
    ours = run(given)
    assert ours["loss"].item() == 0
    assert ours["per_token"].shape == (0,)
    assert ours["head"].shape == (V, H)
    assert not ours["head"].any()


def test_memory_stays_within_budget_and_gradients() -> None:
    n, v, h = 1024, 4096, 32
    budget = 1 << 20
    hidden, head = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    teacher_hidden, teacher_head = torch.randn(n, h), torch.randn(v, h)
    weight = torch.ones(n)

    def work() -> None:
        linear_jsd(
            hidden, head, teacher_hidden, teacher_head, token_weight_N=weight, memory_budget=budget
        ).loss.backward()

    work()  # .grad exists from here on
    scratch = 4 * (budget // 8) * 4  # as high as a chunk
    gradients = (n * h + v * h) * 4
    assert peak_extra_bytes(work, torch.device("cpu")) < budget + scratch + gradients + (1 << 17)


def test_a_second_backward_is_an_error() -> None:
    given = make()
    hidden = given["hidden"].requires_grad_()
    loss = linear_jsd(hidden, given["head"], given["teacher_hidden"], given["teacher_head"]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="made once, in the forward pass"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.randn(N, H + 1)}, r"\[N, H\]"),
        ({"teacher_hidden": torch.randn(N + 1, H_TEACHER)}, r"\[N, H\]"),
        ({"teacher_head": torch.randn(V + 1, H_TEACHER)}, r"\[N, H\]"),
        ({"head": torch.randn(V, H).bfloat16()}, "dtype"),
        ({"weight": torch.ones(N + 1)}, "token_weight_N"),
        ({"beta": 2.0}, "beta"),
        ({"temperature": -1.0}, "temperature"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = make()
    options = {name: change[name] for name in ("beta", "temperature", "backend") if name in change}
    given |= {name: value for name, value in change.items() if name not in options}
    with pytest.raises(ValueError, match=message):
        run(given, **options)
