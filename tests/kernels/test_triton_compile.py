"""Every Triton kernel compiles for Ampere, Hopper and Blackwell, and fits: no spills, little shared memory.

`pytest -s tests/kernels/test_triton_compile.py` prints the tables of docs/kernels.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton.backends.nvidia")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from forge_composer.kernels import jsd, jsd_kernels, jsd_schedules, triton_logprobs
from tests.kernels.triton_aot import Launch, Usage, compile_launch, recorded_launches

CAPABILITIES = [80, 90, 100]
QWEN3 = 151_936
STAGED = ("staged", QWEN3)
ROW_PLANS: list[tuple[Any, int]] = [
    ("resident", 4096),
    ("resident", 16_384),
    ("cluster", 32_000),
    ("cluster", 128_256),
    ("cluster", QWEN3),
    ("cluster", 262_144),
    ("cooperative", QWEN3),
]
SHARED_LIMIT = 48 * 1024
"""Bytes that a program gets without asking for more."""


def record_jsd(
    monkeypatch: pytest.MonkeyPatch,
    schedule: Any,
    width: int,
    *,
    beta: float = 0.5,
    dtype: torch.dtype = torch.bfloat16,
    need_grad: bool = True,
) -> list[Launch]:
    student, teacher = torch.zeros(2, width, dtype=dtype), torch.zeros(2, width, dtype=dtype)
    with recorded_launches(monkeypatch, jsd_kernels) as launches, monkeypatch.context() as patch:
        if schedule == "cooperative":
            patch.setattr(jsd, "plan_row", lambda *_: jsd_schedules.cooperative_plan(width))
        jsd.jsd_triton(
            student,
            teacher,
            torch.ones(2),
            beta=beta,
            temperature=0.7,
            need_grad=need_grad,
            grad_out=student,
            schedule=schedule,
        )
    return launches


def record_others(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    logits, targets, ones = (
        torch.zeros(2, QWEN3, dtype=dtype),
        torch.zeros(2, dtype=torch.long),
        torch.ones(2),
    )
    with recorded_launches(monkeypatch, jsd_kernels) as launches:
        jsd.scale_rows_(logits, ones)
    with recorded_launches(monkeypatch, triton_logprobs) as more:
        triton_logprobs.logprob_statistics(logits, targets, ones, 0)
        triton_logprobs.logprob_gradient(logits, targets, ones, torch.ones(2, 2), ones, 0)
    return launches + more


def check(launches: list[Launch], capability: int, label: str, *, may_spill: int = 0) -> list[Usage]:
    assert launches
    usages = [compile_launch(launch, capability) for launch in launches]
    for usage in usages:
        print(
            f"| {label} | {usage.name} | sm_{usage.capability} | {usage.ctas} x {usage.warps} "
            f"| {usage.registers} | {usage.spilled_bytes} | {usage.shared_bytes} | {usage.resident} |"
        )
        assert usage.spilled_bytes <= may_spill
        assert usage.shared_bytes <= SHARED_LIMIT
        # In place, a kernel reads through one pointer what it writes through another: not with a cache that
        # may hold old values.
        assert "ld.global.nc" not in usage.ptx
    return usages


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_staged(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_jsd(monkeypatch, *STAGED)
    assert [launch.kernel.__name__ for launch in launches] == [
        "statistics_kernel",
        "sums_kernel",
        "gradients_kernel",
    ]
    check(launches, capability, f"staged, {QWEN3:,}")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("schedule", "width"), ROW_PLANS)
def test_rows_in_registers(
    schedule: str, width: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if schedule == "cluster" and capability < 90:
        pytest.skip("clusters came with Hopper")
    (usage,) = check(record_jsd(monkeypatch, schedule, width), capability, f"{schedule}, {width:,}")
    assert usage.resident >= (1 if usage.warps == 16 else 2)
    # Three reductions over the row. In a cluster each meets its own barriers; all leave together at the end.
    barriers = usage.ptx.count("barrier.cluster.wait")
    assert (barriers >= 3 + 1) if schedule == "cluster" else barriers == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_others(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(record_others(monkeypatch), capability, f"{QWEN3:,}")


def test_barrier_of_cooperating_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published is stored before, and read after, atomics that release and acquire on the device."""
    (launch,) = record_jsd(monkeypatch, "cooperative", QWEN3)
    ptx = compile_launch(launch, 90).ptx
    lines = [line.strip() for line in ptx.splitlines()]
    atomics = [i for i, line in enumerate(lines) if "atom.global.gpu.acq_rel.add" in line]
    assert len(atomics) == 4  # two meetings of one arrival and one loop
    for first, published in ((0, 4), (2, 2)):
        before, after = lines[: atomics[first]], lines[atomics[first + 1] :]
        stores = [i for i, line in enumerate(before) if "st.global.b32" in line]
        assert any("bar.sync" in line for line in before[stores[-1] :])
        assert len(stores[-published:]) == published
        load = next(i for i, line in enumerate(after) if "ld.volatile.global" in line)
        assert any("bar.sync" in line for line in after[:load])


def test_the_logarithm_of_a_pair_is_one_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per pair of a resident row: 4 exponentials and 1 logarithm. `tl.log2` would be a polynomial."""
    (launch,) = record_jsd(monkeypatch, "resident", 8192)
    usage = compile_launch(launch, 90)
    pairs = 8192 // (32 * usage.warps)
    assert usage.ptx.count("lg2.approx.ftz.f32") in (pairs, pairs + 1)
    assert usage.ptx.count("ex2.approx.ftz.f32") == 4 * pairs


def matrix() -> list[Any]:
    cases = []
    for schedule, width in [STAGED, *ROW_PLANS]:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for beta in (0.0, 0.5, 1.0):
                name = f"{schedule}-{width}-{str(dtype)[6:]}-{beta}"
                cases.append(pytest.param(schedule, width, dtype, beta, id=name))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "width", "dtype", "beta"), matrix())
def test_every_variant(
    schedule: str, width: int, dtype: torch.dtype, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for capability in CAPABILITIES:
        if schedule == "cluster" and capability < 90:
            continue
        for need_grad in (True, False):
            launches = record_jsd(monkeypatch, schedule, width, dtype=dtype, beta=beta, need_grad=need_grad)
            # Held to 128 registers, a variant of the cooperative schedule spills a scalar on Ampere.
            may_spill = 4 if schedule == "cooperative" else 0
            label = f"{schedule}, {width:,}, {dtype}, beta {beta}"
            check(launches, capability, label, may_spill=may_spill)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_others_in_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in CAPABILITIES:
        check(record_others(monkeypatch, dtype), capability, str(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "widest"), [(jsd_schedules.resident_plan, 16_384), (jsd_schedules.cluster_plan, 327_680)]
)
def test_every_plan_fits(plan: Callable[[int], Any], widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each division of rows, the one with the most registers: at beta = 0.5, in bfloat16."""
    by_shape = {plan(width)[:3]: width for width in range(256, widest + 1, 256)}
    assert plan(widest + 1) is None
    schedule = "resident" if plan is jsd_schedules.resident_plan else "cluster"
    for (_, tiles, _), width in by_shape.items():
        if tiles >= 3:
            check(record_jsd(monkeypatch, schedule, width), 90, f"{schedule}, {width:,}")
