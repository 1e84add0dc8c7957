"""What the Triton kernels of the log-probabilities must get right, in the interpreter as on a GPU.

Not collected by itself, like `jsd_triton_cases.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.kernels import token_logprobs
from forge_composer.kernels.token_logprobs import _statistics
from forge_composer.kernels.triton_logprobs import logprob_gradient, logprob_statistics


def make(n: int, v: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n * v)
    logits = (torch.randn(n, v, generator=draw) * 4).to(device, dtype)
    return (
        logits,
        torch.randint(v, (n,), generator=draw).to(device),
        torch.randn(n, generator=draw).to(device),
    )


def plain(logits: Tensor, targets: Tensor, temperature: Any) -> tuple[Tensor, Tensor]:
    scaled = logits.double() / torch.as_tensor(temperature, device=logits.device).expand(len(logits))[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("width", [1, 50, 512, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, "per token"])
def test_equals_plain_form(width: int, dtype: torch.dtype, temperature: Any, device: str) -> None:
    logits, targets, upstream = make(5, width, dtype, device)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, 5, device=device)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropy = token_logprobs(ours, targets, temperature=temperature, backend="triton")
    expected, expected_entropy = plain(exact, targets, temperature)
    torch.testing.assert_close(logprobs, expected.float(), atol=5e-6, rtol=2e-6)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=2e-5, rtol=1e-5)
    (logprobs * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert ours.grad is not None
    assert exact.grad is not None
    assert ours.grad.dtype == dtype
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=1e-5 + rounding)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_masked_and_large_logits(backend: Any, device: str) -> None:
    logits = torch.tensor(
        [[1e4, 0.0, -1e4], [-1e30, 0.0, 0.0], [-math.inf, 1e4, 1e4], [-math.inf, -math.inf, 5.0]],
        device=device,
        requires_grad=True,
    )
    targets = torch.tensor([2, 1, 2, 2], device=device)
    logprobs, entropy = token_logprobs(logits, targets, backend=backend)
    assert logprobs.tolist() == pytest.approx([-2e4, -math.log(2), -math.log(2), 0.0])
    assert entropy.tolist() == pytest.approx([0.0, math.log(2), math.log(2), 0.0], abs=1e-7)
    logprobs.sum().backward()
    assert logits.grad is not None
    expected = torch.tensor([[-1.0, 0, 1], [0, 0.5, -0.5], [0, -0.5, 0.5], [0, 0, 0]]).abs()
    torch.testing.assert_close(logits.grad.cpu().abs(), expected, atol=1e-6, rtol=1e-6)


def test_first_tile_masked_throughout(device: str) -> None:
    logits, targets, _ = make(2, 9001, torch.float32, device)
    logits[:, :5000] = -math.inf
    targets[:] = torch.tensor([6000, 9000], device=device)
    logprobs, entropy = token_logprobs(logits, targets, backend="triton")
    expected, expected_entropy = plain(logits[:, 5000:], targets - 5000, 1.0)
    torch.testing.assert_close(logprobs, expected.float(), atol=5e-6, rtol=2e-6)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 7, 40, 50])
def test_a_part_of_the_vocabulary(first: int, device: str) -> None:
    """The same partial results as in PyTorch, for targets inside and outside, and strided rows."""
    logits, targets, upstream = make(9, 50, torch.float32, device)
    part, scale = logits[:, first : first + 20], torch.linspace(0.5, 2.0, 9, device=device)
    found = logprob_statistics(part, targets, scale, first)
    torch.testing.assert_close(found, _statistics(part, targets, scale, first), atol=1e-5, rtol=1e-5)
    whole = logits * scale[:, None]
    highest = whole.amax(1)
    norms = torch.stack((highest, (whole - highest[:, None]).exp().sum(1).log()))
    found_gradient = logprob_gradient(part, targets, scale, norms, upstream, first)
    p = torch.softmax(whole, 1)
    p[torch.arange(9), targets] -= 1.0
    expected = -p * (upstream * scale)[:, None]
    torch.testing.assert_close(found_gradient, expected[:, first : first + 20], atol=1e-6, rtol=1e-5)


def test_rows_without_upstream_gradient_are_not_read(device: str) -> None:
    logits, targets, _ = make(3, 600, torch.bfloat16, device)
    logits[1] = math.nan
    logits.requires_grad_()
    logprobs, _ = token_logprobs(logits, targets, backend="triton")
    logprobs[0::2].sum().backward()
    assert logits.grad is not None
    assert not logits.grad[1].any()
    assert logits.grad[0::2].any(dim=1).all()


def test_float64_is_left_to_pytorch(device: str) -> None:
    logits, targets, _ = make(3, 60, torch.float64, device)
    assert token_logprobs(logits, targets, backend="triton")[0].dtype == torch.float64
