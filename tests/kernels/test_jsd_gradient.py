"""The gradient that is made in the forward pass: any upstream gradient, in place, once; and its memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_composer.bench.contenders import eager_jsd
from forge_composer.bench.memory import peak_extra_bytes
from forge_composer.kernels import generalized_jsd, row_chunks
from tests.kernels.jsd_formulas import random_logits

CPU = torch.device("cpu")


def reference_gradient(student: Tensor, teacher: Tensor, upstream: Tensor, **options: Any) -> Tensor:
    leaf = student.detach().double().requires_grad_()
    generalized_jsd(leaf, teacher, backend="reference", **options).backward(upstream.double())
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "upstream",
    ["the announced weights", "ones", "per row", "zero", "negative", "some rows zero"],
)
def test_any_upstream_gradient(upstream: str, beta: float, inplace: bool) -> None:
    student, teacher, weight = random_logits(6, 40)
    weight[2] = 0.0
    grad = {
        "the announced weights": weight.clone(),
        "ones": torch.ones(6),
        "per row": torch.arange(6.0),
        "zero": torch.zeros(6),
        "negative": -3.0 * weight,
        "some rows zero": weight * torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0, 1.0]),
    }[upstream]
    expected = reference_gradient(student, teacher, grad, beta=beta, token_weight_N=weight)
    leaf = student.clone().requires_grad_()
    logits = leaf * 1.0
    value = generalized_jsd(logits, teacher, beta=beta, token_weight_N=weight, inplace_grad=inplace)
    value.backward(grad)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected, atol=1e-6, rtol=1e-5)
    assert not leaf.grad[2].any()


def test_without_weights_one_is_announced() -> None:
    student, teacher, _ = random_logits(4, 12)
    leaf = student.clone().requires_grad_()
    generalized_jsd(leaf, teacher).mean().backward()
    expected = reference_gradient(student, teacher, torch.full((4,), 0.25))
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected, atol=1e-6, rtol=1e-5)


def test_in_low_precision_a_row_is_scaled_in_float32() -> None:
    student, teacher, _ = random_logits(4, 12, dtype=torch.bfloat16)
    announced, scaled = student.clone().requires_grad_(), student.clone().requires_grad_()
    generalized_jsd(announced, teacher).sum().backward()
    factor = torch.tensor([1.0, 1.0 + 2**-10, 3.001, 0.1])
    (generalized_jsd(scaled, teacher) * factor).sum().backward()
    assert announced.grad is not None
    assert scaled.grad is not None
    assert torch.equal(scaled.grad, (announced.grad.float() * factor[:, None]).bfloat16())


def test_rows_with_the_announced_upstream_gradient_are_left_alone() -> None:
    """No second pass for a caller who uses the weights it announced: backward writes no element."""
    student, teacher, weight = random_logits(5, 30)
    leaf = student.clone().requires_grad_()
    loss = (generalized_jsd(leaf, teacher, token_weight_N=weight) * weight).sum()
    written: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.numel() >= 30:
                written.append(str(func))
            return out

    with Watch():
        loss.backward()
    assert [name for name in written if "detach" not in name] == []


def test_in_place_the_gradient_takes_the_logits_place() -> None:
    student, teacher, weight = random_logits(5, 30, dtype=torch.bfloat16)
    leaf = student.clone().requires_grad_()
    logits = leaf * 1.0
    value = generalized_jsd(logits, teacher, token_weight_N=weight, inplace_grad=True)
    (value * weight).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, logits.detach())
    apart = student.clone().requires_grad_()
    value = generalized_jsd(apart, teacher, token_weight_N=weight)
    (value * weight).sum().backward()
    assert apart.grad is not None
    assert torch.equal(apart.grad, leaf.grad)
    assert torch.equal(apart.detach(), student)  # out of place the logits survive


def test_in_place_another_user_of_the_logits_gets_an_error() -> None:
    student, teacher, _ = random_logits(3, 8)
    logits = student.requires_grad_() * 1.0
    other = logits.square().sum()
    loss = generalized_jsd(logits, teacher, inplace_grad=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def test_out_of_place_another_user_of_the_logits_adds_its_gradient() -> None:
    student, teacher, _ = random_logits(3, 8)
    leaf = student.clone().requires_grad_()
    (generalized_jsd(leaf, teacher).sum() + leaf.square().sum()).backward()
    expected = reference_gradient(student, teacher, torch.ones(3)) + 2 * student
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_second_backward_is_an_error(inplace: bool) -> None:
    student, teacher, _ = random_logits(3, 8)
    logits = student.requires_grad_() * 1.0
    loss = generalized_jsd(logits, teacher, inplace_grad=inplace).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="made once, in the forward pass"):
        loss.backward()


def test_a_gradient_of_the_gradient_is_an_error() -> None:
    student, teacher, _ = random_logits(3, 8)
    (gradient,) = torch.autograd.grad(
        generalized_jsd(student.requires_grad_(), teacher).square().sum(), student, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("how", ["no_grad", "no requires_grad"])
def test_without_gradient_none_is_made(how: str) -> None:
    """Not even in place: the logits stay as they are."""
    student, teacher, _ = random_logits(3, 8)
    logits = student.clone().requires_grad_(how == "no_grad")
    version = logits._version
    with torch.set_grad_enabled(how != "no_grad"):
        value = generalized_jsd(logits, teacher, inplace_grad=True)
    assert not value.requires_grad
    assert torch.equal(logits, student)
    assert logits._version == version


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher, _ = random_logits(3, 8)
    student.requires_grad_()
    teacher.requires_grad_()
    for backend in ("reference", "torch"):
        value = generalized_jsd(student, teacher, backend=backend)  # type: ignore[arg-type]
        value.sum().backward()
    assert teacher.grad is None
    assert not generalized_jsd(student.detach(), teacher).requires_grad


def test_in_place_needs_memory_of_its_own() -> None:
    student = torch.randn(3, 8, requires_grad=True)
    logits = student * 1.0
    with pytest.raises(ValueError, match="share memory"):
        generalized_jsd(logits, logits.detach(), inplace_grad=True)
    with pytest.raises(ValueError, match="expanded"):
        generalized_jsd(logits[:1].expand(3, 8), torch.randn(3, 8), inplace_grad=True)


@pytest.mark.parametrize(("inplace", "whole_copies"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_no_float32_copy_of_the_logits(
    inplace: bool, whole_copies: int, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: bfloat16 logits cost four scratch tensors of one chunk, and out of place the gradient."""
    n, v, elements = 256, 2048, 4 * 2048
    monkeypatch.setattr(row_chunks, "CPU_CHUNK_ELEMENTS", elements)
    student, teacher, weight = random_logits(n, v, dtype=torch.bfloat16)
    student.requires_grad_()

    def work() -> None:
        value = generalized_jsd(
            student, teacher, beta=beta, token_weight_N=weight, inplace_grad=inplace, backend="torch"
        )
        (value * weight).sum().backward()

    allowed = whole_copies * n * v * 2 + 4 * elements * 4
    # A chunk's gradient is rounded into one more tensor; numbers per row come to some KiB.
    assert peak_extra_bytes(work, CPU) < allowed + elements * 2 + 32 * n * 8


def test_the_gradient_costs_a_fraction_of_the_eager_formulas_memory() -> None:
    """At 128 x 32,000 in float32 at most 15% of what the formula of TRL and OPSD takes, in place or not."""
    n, v = 128, 32_000
    student, teacher, weight = random_logits(n, v)

    def eager() -> None:
        eager_jsd(student.detach().requires_grad_(), teacher).backward()

    def ours(inplace: bool) -> None:
        leaf = student.detach().requires_grad_()
        value = generalized_jsd(leaf, teacher, token_weight_N=weight, inplace_grad=inplace, backend="torch")
        (value * weight).sum().backward()

    eager_bytes = peak_extra_bytes(eager, CPU)
    assert eager_bytes > 8 * n * v * 4
    assert peak_extra_bytes(lambda: ours(False), CPU) < 0.15 * eager_bytes
    assert peak_extra_bytes(lambda: ours(True), CPU) < 0.03 * eager_bytes


def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sys, forge_composer.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
