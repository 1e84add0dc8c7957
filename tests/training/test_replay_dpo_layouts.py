"""One batch with pairs gives one gradient, however it is split over ranks and forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.preference_fixtures import pairs_alone, three_channels
from tests.training.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, int], int, str]] = {
    # name: processes, layout, rows per micro-batch, reference
    "one rank, one row a pass": (1, {}, 1, "at_insert"),
    "FSDP over two ranks": (2, {"dp_shard": 2}, 1, "at_insert"),
    "two replicas": (2, {"dp_replicate": 2}, 4, "at_insert"),
    "tensor parallel over two ranks": (2, {"tp": 2}, 2, "at_insert"),
    "FSDP over two ranks, initial": (2, {"dp_shard": 2}, 2, "initial"),
    "tensor parallel over two ranks, initial": (2, {"tp": 2}, 2, "initial"),
    "FSDP x tensor parallel over four ranks": (4, {"dp_shard": 2, "tp": 2}, 2, "at_insert"),
    "HSDP over four ranks": (4, {"dp_replicate": 2, "dp_shard": 2}, 1, "at_insert"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_is_the_same(name: str, tiny_qwen3_dir: Path) -> None:
    """All channels, pairs only, and a single pair: gradients agree to 1e-5, and so do metrics; then steps."""
    processes, layout, rows, reference = LAYOUTS[name]
    kl_coef = 0.01 if reference == "initial" else 0.0
    (expected,) = run_ranks(three_channels, 1, tiny_qwen3_dir, {}, 16, reference, kl_coef)
    ranks = run_ranks(three_channels, processes, tiny_qwen3_dir, layout, rows, reference, kl_coef)
    for number in range(3):
        wanted, found = expected[number], ranks[0][number]
        assert wanted["metrics"]["dpo/pairs"] == (11, 11, 1)[number]
        for parameter, gradient in wanted["gradients"].items():
            error = np.linalg.norm(found["gradients"][parameter] - gradient) / np.linalg.norm(gradient)
            assert error < 1e-5, (number, parameter)
    for number in range(6):
        metrics: dict[str, Any] = expected[number]["metrics"]
        assert all(rank[number]["metrics"] == ranks[0][number]["metrics"] for rank in ranks)
        # After Adam's first step, lr x sign(gradient), rounding of tiny gradients shows.
        tolerance = 1e-5 if number < 4 else 2e-3
        assert ranks[0][number]["metrics"] == pytest.approx(metrics, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp_shard": 2}, id="FSDP"),
        pytest.param({"tp": 2}, id="tensor parallel", marks=pytest.mark.slow),
    ],
)
def test_pairs_alone_on_two_ranks(layout: dict[str, int], tiny_qwen3_dir: Path) -> None:
    """GRPO off: every rank takes each step, also where it has no pair, or nobody has one."""
    (expected,) = run_ranks(pairs_alone, 1, tiny_qwen3_dir, {}, 8)
    ranks = run_ranks(pairs_alone, 2, tiny_qwen3_dir, layout, 1)
    assert [steps.get("dpo/pairs", 0.0) for steps in expected] == [7.0, 1.0, 0.0, 7.0]
    assert expected[2]["train/grad_norm"] == 0.0
    assert expected[3]["dpo/margin"] > expected[0]["dpo/margin"]
    for rank in ranks:
        assert rank == ranks[0]
        assert [step.keys() for step in rank] == [step.keys() for step in expected]
        assert rank[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
        assert rank[3] == pytest.approx(expected[3], rel=5e-3, abs=1e-3)
