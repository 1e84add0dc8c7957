"""The Triton kernels of the divergence: their numbers in the interpreter, and how they are launched."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from forge_composer.kernels.jsd_schedules import (
    cluster_plan,
    constants,
    cooperative_plan,
    mixture_shares,
    plan_row,
    resident_plan,
)
from tests.kernels.triton_interpreter import run_in_interpreter

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_in_the_interpreter() -> None:
    """All of `jsd_triton_cases.py`."""
    assert " passed" in run_in_interpreter("jsd_triton_cases.py")


def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sys, forge_composer.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shares_of_the_mixture_add_up_to_one() -> None:
    """In float32; and neither is 0."""
    for beta in (1e-30, 1e-9, 0.1, 0.3, 0.5, 0.7, 0.9, 1 - 1e-9, *np.linspace(0.001, 0.999, 333)):
        share_s, share_t = (np.float32(share) for share in mixture_shares(float(beta)))
        assert share_s + share_t == np.float32(1.0)
        assert share_s == pytest.approx(1.0 - beta, rel=1e-6)
        assert share_t == pytest.approx(beta, rel=1e-6)


def test_constants() -> None:
    assert constants(0.0, 2.0) == ("teacher_kl", 0.5 / math.log(2), 0.5, 1.0, 0.0)
    assert constants(1.0, 2.0) == ("student_kl", 0.5 / math.log(2), math.log(2) / 2, 0.0, 1.0)
    assert constants(0.25, 2.0) == ("mixture", 0.5 / math.log(2), 0.375 * math.log(2), 0.75, 0.25)


@pytest.mark.parametrize("width", [1, 255, 256, 257, 1024, 1025, 8193, 16_384])
def test_resident_rows_fit(width: int) -> None:
    plan = resident_plan(width)
    assert plan is not None
    assert plan.block * (plan.tiles - 1) < width <= plan.block * plan.tiles
    assert plan.block * plan.tiles <= 32 * 32 * plan.warps


@pytest.mark.parametrize("width", [1, 16_385, 32_000, 50_257, 128_256, 151_936, 163_841, 262_144, 327_680])
def test_cluster_rows_fit(width: int) -> None:
    plan = cluster_plan(width)
    assert plan is not None
    assert plan.block * (plan.tiles - 1) < width <= plan.block * plan.tiles
    assert plan.block * plan.tiles <= 40 * 32 * plan.warps * plan.ctas
    assert plan.ctas in (2, 4, 8, 16)


def test_cooperating_programs_cover_the_row() -> None:
    for width in (1, 8192, 8193, 151_936):
        plan = cooperative_plan(width)
        assert (
            plan.programs * plan.block * plan.tiles >= width > (plan.programs - 1) * plan.block * plan.tiles
        )


def test_auto_is_resident_where_it_fits_else_staged() -> None:
    assert plan_row("auto", 16_384, CPU) == resident_plan(16_384)
    assert plan_row("auto", 16_385, CPU) is None
    assert plan_row("staged", 100, CPU) is None


@pytest.mark.parametrize(
    ("schedule", "width", "message"),
    [
        ("resident", 16_385, "do not fit into a multiprocessor"),
        ("cluster", 327_681, "do not fit into a cluster"),
        ("cooperative", 8193, "needs a GPU"),
        ("fast", 10, "unknown schedule"),
    ],
)
def test_schedules_that_cannot_work(schedule: Any, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_row(schedule, width, CPU)


def test_schedules_that_the_gpu_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match="capability 9 or 10"):
        plan_row("cluster", 32_000, CUDA)

    class Properties:
        multi_processor_count = 40

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert plan_row("cooperative", 10 * 8192, CUDA) == cooperative_plan(10 * 8192)
    with pytest.raises(ValueError, match="too many for this GPU"):
        plan_row("cooperative", 10 * 8192 + 1, CUDA)
