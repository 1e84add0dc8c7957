"""The memory meter on allocations of known size."""

from __future__ import annotations

import pytest
import torch

from forge_composer.bench.memory import peak_extra_bytes

CPU = torch.device("cpu")


def block(size: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def test_the_peak_is_the_most_that_was_held_at_once() -> None:
    def work() -> None:
        first, second = block(1000), block(500)
        del first
        third = block(700)
        del second, third
        fourth = block(1300)
        del fourth

    assert peak_extra_bytes(work, CPU) == 1500


def test_nothing_allocated() -> None:
    value = torch.ones(1000)
    assert peak_extra_bytes(lambda: value.view(10, 100), CPU) == 0
    assert peak_extra_bytes(lambda: value.neg_(), CPU) == 0


def test_what_is_returned_counts() -> None:
    assert peak_extra_bytes(lambda: block(10_000), CPU) == 10_000


def test_temporaries_inside_an_operator_count() -> None:
    """logsumexp returns one number a row, and has the exponentials of all elements for a moment."""
    values = torch.rand(256, 256)
    assert peak_extra_bytes(lambda: values.logsumexp(1), CPU) >= values.nbytes


def test_backward_counts() -> None:
    """exp keeps its result for the backward pass, which makes the gradient beside it."""
    leaf = torch.rand(1 << 16, requires_grad=True)
    peak = peak_extra_bytes(lambda: torch.autograd.grad(leaf.exp().sum(), leaf), CPU)
    assert 2 * (1 << 18) <= peak <= 2 * (1 << 18) + 256


def test_releasing_earlier_memory_is_not_credited() -> None:
    held = [block(100_000)]

    def work() -> torch.Tensor:
        held.clear()
        return block(1000)

    assert peak_extra_bytes(work, CPU) == 1000


def test_an_error_passes_through_and_the_meter_works_again() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        peak_extra_bytes(fail, CPU)
    assert peak_extra_bytes(lambda: block(64), CPU) == 64


@pytest.mark.gpu
def test_cuda() -> None:
    device = torch.device("cuda")

    def work() -> torch.Tensor:
        first = block(64 << 20, device)
        del first
        return block(16 << 20, device)

    assert peak_extra_bytes(work, device) == 64 << 20
