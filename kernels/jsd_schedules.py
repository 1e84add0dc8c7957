"""What the Triton kernels of the generalized JSD are launched with: constants, and how a row is divided.

docs/kernels.md has the reasons, registers and spills of each plan.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import triton

Schedule = Literal["auto", "staged", "resident", "cluster", "cooperative"]

LOG2_E = 1.0 / math.log(2.0)


class Constants(NamedTuple):
    """What the kernels need to know of beta and temperature."""

    mode: str
    """"teacher_kl" (beta = 0), "student_kl" (beta = 1) or "mixture"."""
    scale: float
    """Logits times this have base-2 exponentials."""
    slope: float
    """Factor of the gradient, whose logarithms are in base 2."""
    share_s: float
    """The student's share of the mixture."""
    share_t: float
    """The teacher's share of the mixture."""


def constants(beta: float, temperature: float) -> Constants:
    """The kernels' constants for a divergence."""
    scale, slope = LOG2_E / temperature, math.log(2.0) / temperature
    if beta == 0.0:
        return Constants("teacher_kl", scale, 1.0 / temperature, 1.0, 0.0)  # p - q, without a logarithm
    if beta == 1.0:
        return Constants("student_kl", scale, slope, 0.0, 1.0)
    return Constants("mixture", scale, (1.0 - beta) * slope, *mixture_shares(beta))


def mixture_shares(beta: float) -> tuple[float, float]:
    """1 - beta and beta as float32 numbers whose sum rounds to exactly 1, the smaller one precise.

    That sum is the mixture of two equal probabilities over one of them, and its logarithm has to be 0.
    """
    small = max(float(np.float32(min(beta, 1.0 - beta))), 2.0**-100)
    large = float(np.float32(1.0 - small))
    return (large, small) if beta <= 0.5 else (small, large)


class RowPlan(NamedTuple):
    """How `row_kernel` keeps a row in registers: tiles of 8 columns a thread, one after another."""

    warps: int
    tiles: int
    ctas: int = 1
    """Thread blocks of a cluster."""
    programs: int = 1
    """Programs of a row."""
    cooperative: bool = False
    """Whether programs reduce through global memory."""

    @property
    def block(self) -> int:
        """Columns of a tile."""
        return 256 * self.warps * self.ctas

    def options(self) -> dict[str, Any]:
        """Arguments of the launch."""
        return {
            "BLOCK": self.block,
            "TILES": self.tiles,
            "PROGRAMS": self.programs,
            "PADDED": triton.next_power_of_2(self.programs),
            "COOPERATIVE": self.cooperative,
            "num_warps": self.warps,
            "num_ctas": self.ctas,
            "maxnreg": 128 if self.cooperative else None,  # two programs a multiprocessor
            "enable_fp_fusion": False,
        }


def resident_plan(width: int) -> RowPlan | None:
    """One program a row; None if the row does not fit into a multiprocessor's registers.

    A pair of logits takes two registers of a thread. With 40 pairs a thread some variants spill.
    """
    for warps in (1, 2, 4, 8, 16):
        tiles = -(-width // (256 * warps))
        if tiles <= 4:
            return RowPlan(warps, tiles)
    return None


def cluster_plan(width: int) -> RowPlan | None:
    """One cluster a row, of at most 16 thread blocks; None if it does not fit.

    As few blocks as hold the row with 24 pairs a thread, so that a multiprocessor has room for three and one
    computes while others wait; more pairs a thread only where 16 blocks would not do otherwise.
    """
    for ctas, warps, most in ((2, 8, 3), (4, 8, 3), (8, 8, 3), (16, 8, 5), (16, 16, 5)):
        tiles = -(-width // (256 * warps * ctas))
        if tiles <= most:
            return RowPlan(warps, tiles, ctas=ctas)
    return None


def cooperative_plan(width: int) -> RowPlan:
    """Programs of 8192 columns, as many as cover the row."""
    warps, tiles = 8, 4
    programs = max(1, -(-width // (256 * warps * tiles)))
    return RowPlan(warps, tiles, programs=programs, cooperative=True)


def plan_row(schedule: Schedule, width: int, device: torch.device) -> RowPlan | None:
    """The plan of a schedule for rows of that width; None is staged.

    Raises:
        ValueError: the schedule is unknown, or cannot work there.
    """
    if schedule == "staged":
        return None
    if schedule in ("auto", "resident"):
        plan = resident_plan(width)
        if plan is None and schedule == "resident":
            raise ValueError(f"schedule 'resident': {width} columns do not fit into a multiprocessor")
        return plan
    if schedule == "cluster":
        plan = cluster_plan(width)
        if plan is None:
            raise ValueError(f"schedule 'cluster': {width} columns do not fit into a cluster")
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
            raise ValueError(
                "schedule 'cluster' needs clusters of 16 thread blocks: compute capability 9 or 10"
            )
        return plan
    if schedule != "cooperative":
        raise ValueError(f"unknown schedule {schedule!r}")
    plan = cooperative_plan(width)
    if device.type != "cuda":
        if plan.programs > 1:
            raise ValueError("schedule 'cooperative' needs a GPU: the programs of a row wait for each other")
    elif 4 * plan.programs > torch.cuda.get_device_properties(device).multi_processor_count:
        # Programs that wait hold their place. Were there fewer places than programs of one unfinished row
        # (in each of a few streams), none could go on.
        raise ValueError(f"schedule 'cooperative': {width} columns are too many for this GPU")
    return plan
