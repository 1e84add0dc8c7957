"""What a comparison reads from a run folder: the learning curve, and the final held-out result."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_composer.compare.experiment import SuccessSection
from forge_composer.metrics.sinks import read_metrics

Floats = NDArray[np.float64]

COMPLETED = "completed"
"""`status` in the summary of a run that was trained to its end."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One number of a run over its course, all `[points]` float64."""

    rollouts: Floats
    """Training rollouts spent when the point was measured, those of its own batch included."""
    seconds: Floats
    """Wall time of training by then, without start-up and evaluations."""
    values: Floats
    """The number."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one finished run contributes."""

    seed: int
    curve: Curve
    held_out: float | None
    """The final held-out result; None if the run evaluates nothing."""
    held_out_tasks: int
    """Tasks in that evaluation."""
    uncounted: int
    """Training rollouts that are in no step's record: retries, batches with nothing to train on, groups
    that were under way at the end."""


def run_status(folder: Path) -> tuple[str | None, str | None]:
    """`status` and `reason` in the summary of a run; None without a readable one."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None
    return summary.get("status"), summary.get("reason")


def read_run(folder: Path, seed: int, success: SuccessSection) -> RunResult:
    """Read a finished run.

    Raises:
        ValueError: the metrics hold no value of `success.metric`; the message names keys that there are.
    """
    kind = "eval" if success.metric.startswith("eval/") else "step"
    rollouts = seconds = 0.0
    evaluated = 0
    points: list[tuple[float, float, float]] = []
    last: Mapping[str, Any] = {}
    records = list(read_metrics(folder / "metrics.jsonl"))
    for record in records:
        if record["kind"] == "step":
            rollouts += _number(record, "rollout/count") + _number(record, "rollout/skipped")
            seconds += _number(record, "time/step_s") + _number(record, "time/skipped_s")
        else:
            evaluated += round(_number(record, "eval/count"))
            last = record if record["step"] > 0 else last
        value = record.get(success.metric)
        if record["kind"] == kind and value is not None:
            points.append((rollouts, seconds, value))
    if not points:
        raise ValueError(_no_metric(folder, kind, success.metric, records))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    held_out = last.get(success.held_out)
    return RunResult(
        seed=seed,
        curve=Curve(*(np.asarray(column, dtype=np.float64) for column in zip(*points, strict=True))),
        held_out=None if held_out is None else float(held_out),
        held_out_tasks=round(_number(last, "eval/scored")),
        uncounted=max(0, summary.get("rollouts", 0) - evaluated - round(rollouts)),
    )


def smooth(curve: Curve, window: int) -> Curve:
    """Trailing mean over `window` points; a point without a full window is left out.

    A curve that is shorter than the window becomes one point, its mean.
    """
    window = min(window, len(curve.values))
    means = np.convolve(curve.values, np.full(window, 1 / window), "valid")
    return Curve(curve.rollouts[window - 1 :], curve.seconds[window - 1 :], means)


def first_reaching(x: Floats, values: Floats, threshold: float) -> float | None:
    """The `x` of the first value that is not below the threshold; None if there is none."""
    reached = np.flatnonzero(values >= threshold - 1e-9)  # 0.8 five times has a mean just below 0.8
    return float(x[reached[0]]) if len(reached) else None


def mean_over(x: Floats, values: Floats, low: float, high: float) -> float:
    """Area under the curve from `low` to `high` (trapezoids, `x` ascending), divided by the width.

    The curve is constant outside its points; without any width the result is its value at `high`.
    """
    if high <= low:
        return float(np.interp(high, x, values))
    inside = x[(x > low) & (x < high)]
    grid = np.concatenate([[low], inside, [high]])
    return float(np.trapezoid(np.interp(grid, x, values), grid) / (high - low))


def _number(record: Mapping[str, Any], key: str) -> float:
    return float(record.get(key) or 0.0)


def _no_metric(folder: Path, kind: str, metric: str, records: Iterable[Mapping[str, Any]]) -> str:
    keys = {
        key
        for record in records
        if record["kind"] == kind
        for key, value in record.items()
        if "/" in key and value is not None
    }
    near = difflib.get_close_matches(metric, sorted(keys), n=3, cutoff=0.3) or sorted(keys)[:10]
    there = f"there are {', '.join(near)}" if near else f"there are no {kind} records at all"
    return f"{folder / 'metrics.jsonl'}: no {kind} record has a value of {metric!r} (success.metric); {there}"
