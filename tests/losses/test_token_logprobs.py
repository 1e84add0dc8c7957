"""Token log-probabilities from logits: equal to the plain form, whole and split over the vocabulary."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from forge_composer.kernels import token_logprobs
from tests.training.ranks import run_ranks

module = importlib.import_module("forge_composer.kernels.token_logprobs")


def plain(logits_NV: Tensor, targets_N: Tensor, temperature: Any = 1.0) -> tuple[Tensor, Tensor]:
    temperature_N1 = torch.as_tensor(temperature).expand(logits_NV.shape[0])[:, None]
    logprobs_NV = torch.log_softmax(logits_NV.double() / temperature_N1, dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N


def make(n: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * v)
    logits = (torch.randn(n, v, generator=generator) * 4).to(dtype)
    targets = torch.randint(v, (n,), generator=generator)
    return logits, targets, torch.randn(n, generator=generator)


@pytest.mark.parametrize("chunk", [1, 7 * 50, 1 << 23], ids=["a row", "ragged chunks", "one chunk"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per token"])
def test_equals_plain_form(chunk: int, temperature: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    logits, targets, weights = make(23, 50)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, 23)
    ours, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(ours, targets, temperature=temperature)
    expected, expected_entropy = plain(reference, targets, temperature)
    torch.testing.assert_close(logprobs, expected.float(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=2e-6, rtol=1e-6)
    assert not entropy.requires_grad
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, reference.grad, atol=1e-6, rtol=1e-5)


def test_gradcheck() -> None:
    logits, targets, _ = make(4, 9, torch.float64)
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, temperature=0.7)[0], logits)


def test_bfloat16_logits_are_worked_on_in_float32() -> None:
    """The only error is that of the logits themselves; the gradient comes back in bfloat16."""
    logits, targets, _ = make(16, 1000, torch.bfloat16)
    logits.requires_grad_()
    logprobs, _ = token_logprobs(logits, targets)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, plain(logits.detach(), targets)[0].float(), atol=5e-6, rtol=1e-6)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e30, 0.0, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2, 1]))
    assert logprobs.tolist() == pytest.approx([-2e4, -np.log(2)])
    assert entropy.tolist() == pytest.approx([0.0, np.log(2)])
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [pytest.approx([-1, 0, 1]), pytest.approx([0, 0.5, -0.5])]


def test_no_float32_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bfloat16 gradient, the largest tensor ever made is one chunk."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 4 * 512)
    logits, targets, _ = make(64, 512, torch.bfloat16)
    logits.requires_grad_()
    largest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float32:
                largest.append(out.numel())
            return out

    with Watch():
        logprobs, _ = token_logprobs(logits, targets)
        logprobs.sum().backward()
    assert max(largest) == 4 * 512


def vocabulary_parallel(n: int, v: int) -> dict[str, np.ndarray[Any, Any]]:
    """Worker: the same logits, each rank with its part of the vocabulary."""
    world = dist.init_process_group("gloo") or dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    logits, targets, weights = make(n, v)
    shard = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    logprobs, entropy = token_logprobs(shard, targets, temperature=0.8)
    (logprobs * weights).sum().backward()
    assert isinstance(shard.grad, DTensor)
    with pytest.raises(ValueError, match="sharded over the vocabulary"):
        token_logprobs(distribute_tensor(logits, mesh, [Replicate()]), targets)
    result = {
        "width": np.array(shard.to_local().shape[1]),
        "logprobs": logprobs.detach().numpy(),
        "entropy": entropy.numpy(),
        "gradient": shard.grad.full_tensor().numpy(),
    }
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize(
    ("ranks", "vocab", "widths"),
    [(2, 64, [32, 32]), (2, 51, [26, 25]), (3, 4, [2, 2, 0])],
    ids=["even", "uneven", "a rank without columns"],
)
def test_split_over_the_vocabulary(ranks: int, vocab: int, widths: list[int]) -> None:
    logits, targets, weights = make(17, vocab)
    logits.requires_grad_()
    expected, entropy = plain(logits, targets, 0.8)
    (expected * weights).sum().backward()
    assert logits.grad is not None
    results = run_ranks(vocabulary_parallel, ranks, 17, vocab)
    assert [int(result["width"]) for result in results] == widths
    for result in results:
        np.testing.assert_allclose(result["logprobs"], expected.detach().numpy(), atol=3e-6, rtol=1e-6)
        np.testing.assert_allclose(result["entropy"], entropy.detach().numpy(), atol=3e-6, rtol=1e-6)
        np.testing.assert_allclose(result["gradient"], logits.grad.numpy(), atol=1e-6, rtol=1e-5)
        np.testing.assert_array_equal(result["logprobs"], results[0]["logprobs"])
