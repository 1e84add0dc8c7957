"""Log-probabilities from hidden states and an LM head: equal to those of the logits, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.bench.memory import peak_extra_bytes
from forge_composer.kernels import linear_token_logprobs

N, H, V = 11, 6, 37
BUDGETS = {"a row": 1, "ragged chunks": 4 * V * 12, "one chunk": 1 << 28}


def make(dtype: torch.dtype = torch.float32, n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets, and weights of the tokens in the loss."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, H, generator=draw, dtype=torch.float64).to(dtype)
    head = torch.randn(V, H, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(V, (n,), generator=draw)
    return hidden, head, targets, torch.randn(n, generator=draw)


def plain(hidden: Tensor, head: Tensor, targets: Tensor, temperature: Any) -> tuple[Tensor, Tensor]:
    temperature = torch.as_tensor(temperature, dtype=torch.float64).expand(len(hidden))[:, None]
    logp = torch.log_softmax(hidden.double() @ head.double().t() / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per token"])
def test_equals_the_plain_form(budget: int, temperature: Any) -> None:
    hidden, head, targets, weights = make()
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, N)
    ours = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    theirs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    logprobs, entropy = linear_token_logprobs(*ours, targets, temperature=temperature, memory_budget=budget)
    expected, expected_entropy = plain(*theirs, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=3e-6, rtol=2e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=3e-6, rtol=2e-6)
    assert not entropy.requires_grad
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    for leaf, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(leaf.grad, reference.grad, atol=5e-6, rtol=1e-5)


def test_gradcheck() -> None:
    hidden, head, targets, _ = make(torch.float64)
    temperature = torch.linspace(0.5, 2.0, N)
    assert torch.autograd.gradcheck(
        lambda *leaves: linear_token_logprobs(
            *leaves, targets, temperature=temperature, memory_budget=3 * V * 24
        )[0],
        (hidden.requires_grad_(), head.requires_grad_()),
    )


def test_bfloat16_with_a_float32_sum_over_chunks() -> None:
    """Row by row the head's gradient stays what it is: in bfloat16 a sum of 512 equal terms would stall."""
    hidden, head, targets, _ = make(torch.bfloat16, n=512)
    hidden = (1 + 0.1 * hidden.float()).bfloat16()
    leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    exact = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    logprobs, _ = linear_token_logprobs(*leaves, targets, memory_budget=1)
    expected, _ = plain(*exact, targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, atol=0.05, rtol=0.01)  # logits in bfloat16
    logprobs.sum().backward()
    expected.sum().backward()
    for leaf, reference in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert reference.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        error = (leaf.grad.double() - reference.grad.double()).norm() / reference.grad.double().norm()
        assert error < 0.01


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_frozen_inputs(frozen: str) -> None:
    hidden, head, targets, weights = make()
    both = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    (linear_token_logprobs(*both, targets)[0] * weights).sum().backward()
    hidden.requires_grad_(frozen != "hidden")
    head.requires_grad_(frozen != "head")
    (linear_token_logprobs(hidden, head, targets)[0] * weights).sum().backward()
    for leaf, reference in zip((hidden, head), both, strict=True):
        assert (leaf.grad is None) == (leaf.requires_grad is False)
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, reference.grad)


def test_a_head_that_changed_since_the_forward_pass_is_an_error() -> None:
    """The backward pass reads the head again; autograd watches it, as it does for a linear layer."""
    hidden, head, targets, _ = make()
    head.requires_grad_()
    logprobs, _ = linear_token_logprobs(hidden, head, targets)
    with torch.no_grad():
        head.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_no_tokens() -> None:
    hidden, head, targets, _ = make()
    head.requires_grad_()
    logprobs, entropy = linear_token_logprobs(hidden[:0], head, targets[:0])
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert head.grad is not None
    assert not head.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_stays_within_budget_and_gradients(dtype: torch.dtype) -> None:
    n, v, h = 1024, 4096, 32
    budget = 1 << 20
    hidden = torch.randn(n, h, dtype=dtype, requires_grad=True)
    head = torch.randn(v, h, dtype=dtype, requires_grad=True)
    targets = torch.randint(v, (n,))

    def work() -> None:
        linear_token_logprobs(hidden, head, targets, memory_budget=budget)[0].sum().backward()

    work()
    # The head's gradient in float32, in the head's own dtype, and as it is summed up.
    gradients = (n * h + 2 * v * h) * dtype.itemsize + v * h * 4
    assert peak_extra_bytes(work, torch.device("cpu")) < budget + gradients + 32 * n * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_NH": torch.randn(N, H + 1)}, r"\[N, H\]"),
        ({"hidden_NH": torch.randn(N, H).bfloat16()}, "bfloat16"),
        ({"targets_N": torch.zeros(N + 1, dtype=torch.long)}, "targets_N"),
        ({"memory_budget": 0}, "memory_budget"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    hidden, head, targets, _ = make()
    with pytest.raises(ValueError, match=message):
        linear_token_logprobs(**({"hidden_NH": hidden, "weight_VH": head, "targets_N": targets} | change))
