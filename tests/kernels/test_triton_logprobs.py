"""The Triton kernels of the log-probabilities in the interpreter, and which backend is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from forge_composer.kernels import token_logprobs
from tests.kernels.triton_interpreter import run_in_interpreter


def test_in_the_interpreter() -> None:
    """All of `logprob_triton_cases.py`."""
    assert " passed" in run_in_interpreter("logprob_triton_cases.py")


def test_on_cpu_the_backend_is_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_composer.kernels import triton_logprobs

    def forbidden(*_: Any) -> Any:
        raise AssertionError("Triton on CPU tensors")

    monkeypatch.setattr(triton_logprobs, "logprob_statistics", forbidden)
    logits, targets = torch.randn(3, 7), torch.tensor([0, 3, 6])
    default = token_logprobs(logits, targets)
    assert torch.equal(default[0], token_logprobs(logits, targets, backend="torch")[0])
    with pytest.raises(AssertionError, match="Triton on CPU"):
        token_logprobs(logits, targets, backend="triton")


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend"):
        token_logprobs(torch.randn(3, 7), torch.tensor([0, 3, 6]), backend="cuda")  # type: ignore[arg-type]
