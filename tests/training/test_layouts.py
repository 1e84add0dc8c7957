"""One global batch gives one gradient, however it is split over ranks and micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.ranks import run_ranks
from tests.training.training_fixtures import all_masked_steps, gradients_and_step

LAYOUTS: dict[str, tuple[int, dict[str, int], int]] = {
    # name: processes, layout, rows per micro-batch
    "one rank, four micro-batches": (1, {}, 2),
    "one rank, whole logits": (1, {}, 8),
    "FSDP over two ranks": (2, {"dp_shard": 2}, 4),
    "FSDP over two ranks, four micro-batches": (2, {"dp_shard": 2}, 1),
    "two replicas": (2, {"dp_replicate": 2}, 4),
    "tensor parallel over two ranks": (2, {"tp": 2}, 8),
    "tensor parallel over two ranks, whole logits": (2, {"tp": 2}, 8),
    "FSDP x tensor parallel over four ranks": (4, {"dp_shard": 2, "tp": 2}, 4),
    "HSDP over four ranks": (4, {"dp_replicate": 2, "dp_shard": 2}, 2),
}


@pytest.fixture(scope="module")
def reference(tiny_qwen3_dir: Path) -> dict[str, Any]:
    """One rank, one micro-batch."""
    result: dict[str, Any] = run_ranks(gradients_and_step, 1, tiny_qwen3_dir, {}, 8)[0]
    assert result["microbatches"] == 1
    return result


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("four ranks" in name)) for name in LAYOUTS]
)
def test_gradient_is_the_same(name: str, tiny_qwen3_dir: Path, reference: dict[str, Any]) -> None:
    """Gradients before clipping agree to 1e-5, parameter by parameter; so do metrics, scores and weights."""
    processes, layout, rows = LAYOUTS[name]
    memory = 0 if "whole logits" in name else 256
    ranks = run_ranks(gradients_and_step, processes, tiny_qwen3_dir, layout, rows, 0, memory)
    first = ranks[0]
    assert first["microbatches"] == (4 if "four micro" in name else 1)
    assert first["gradients"].keys() == reference["gradients"].keys()
    for parameter, expected in reference["gradients"].items():
        error = np.linalg.norm(first["gradients"][parameter] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, parameter
    assert first["metrics"] == pytest.approx(reference["metrics"], rel=1e-5, abs=1e-6)
    assert all(rank["metrics"] == first["metrics"] for rank in ranks)
    assert all(rank["scores"] == first["scores"] for rank in ranks)
    np.testing.assert_allclose(
        np.concatenate(first["scores"]), np.concatenate(reference["scores"]), atol=2e-4
    )
    assert [rank["weights"] is None for rank in ranks] == [False] + [True] * (processes - 1)
    for weight, expected in reference["weights"].items():
        # Adam's first step is lr x sign(gradient): where a gradient is about 0, its sign is noise.
        off = np.abs(first["weights"][weight] - expected) > 2e-6
        assert off.mean() < 0.01, weight
    assert first["version"] == 1


def test_gradient_depends_on_the_batch(tiny_qwen3_dir: Path, reference: dict[str, Any]) -> None:
    """The comparison above can fail: another batch gives another gradient."""
    other = run_ranks(gradients_and_step, 1, tiny_qwen3_dir, {}, 8, 1)[0]
    for parameter, expected in reference["gradients"].items():
        error = np.linalg.norm(other["gradients"][parameter] - expected) / np.linalg.norm(expected)
        assert error > 0.1, parameter


def test_ranks_without_tokens(tiny_qwen3_dir: Path) -> None:
    """A rank, or a batch, with nothing to train on gives loss 0, finite numbers and no hang."""
    one_sided, empty, normal = run_ranks(all_masked_steps, 2, tiny_qwen3_dir, {"dp_shard": 2}, timeout_s=60)[
        0
    ]
    assert one_sided["train/tokens"] > 0
    assert one_sided["train/grad_norm"] > 0
    assert empty["train/tokens"] == 0
    assert empty["train/loss"] == empty["train/grad_norm"] == empty["train/entropy"] == 0.0
    assert all(np.isfinite(list(step.values())).all() for step in (one_sided, empty, normal))
    assert normal["train/grad_norm"] > 0
