"""`results.json` and the tables: on the terminal, and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_composer.compare.analysis import Arm, Comparison, Difference
from forge_composer.compare.endpoints import ENDPOINTS, TIMES, TITLES, median_time
from forge_composer.compare.experiment import Endpoint
from forge_composer.compare.significance import ALPHA
from forge_composer.compare.verdict import show_interval, show_reached, show_seeds, show_time
from forge_composer.metrics.intervals import Interval


@dataclass(frozen=True, slots=True)
class Account:
    """A comparison with everything that is said about it."""

    comparison: Comparison
    verdict: Sequence[str]
    notes: Sequence[str]
    missing: Sequence[Mapping[str, Any]]
    """`arm`, `seed`, `status` and `reason` of the runs that are not finished."""

    @property
    def heading(self) -> str:
        """What was measured, in a line."""
        experiment = self.comparison.experiment
        success = experiment.success
        return (
            f"success: {success.metric}; threshold {success.threshold:g} of its mean over "
            f"{success.smoothing} points; held out: {success.held_out}; "
            f"primary endpoint: {TITLES[experiment.primary]}"
        )


ARM_COLUMNS = ("arm", "seeds", "area", "rollouts to threshold", "reached", "time to threshold", "held out")
DIFFERENCE_COLUMNS = (
    "endpoint",
    "arm − baseline",
    "difference",
    "seeds",
    "p",
    "p (Holm)",
    "",
    "seeds for 80% power",
)


def arm_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells of the table of arms."""
    planned = len(comparison.experiment.seeds)
    return [
        (
            arm.name,
            f"{len(arm.seeds)} of {planned}" if len(arm.seeds) < planned else str(planned),
            show_interval("area", arm.intervals["area"]),
            show_time(comparison, arm, "rollouts_to_threshold"),
            show_reached(arm, "rollouts_to_threshold"),
            show_time(comparison, arm, "seconds_to_threshold"),
            show_interval("held_out", arm.intervals["held_out"]),
        )
        for arm in comparison.arms
    ]


def difference_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells of the table of differences, the primary endpoint first."""
    primary = comparison.experiment.primary
    order = [primary, *(endpoint for endpoint in ENDPOINTS if endpoint != primary)]
    return [
        (
            endpoint.replace("_", " ") + (" (primary)" if endpoint == primary else ""),
            f"{difference.arm} − {comparison.experiment.baseline}",
            show_interval(endpoint, difference.interval, signed=True),
            str(len(difference.by_seed)),
            f"{difference.p:.3g}",
            f"{difference.p_holm:.3g}",
            _word(difference),
            show_seeds(difference),
        )
        for endpoint in order
        for difference in comparison.of(endpoint)
    ]


def _word(difference: Difference) -> str:
    if not difference.significant:
        return "not shown"
    return "better" if difference.better else "worse"


def print_account(console: Console, account: Account) -> None:
    """Print tables, verdict and notes."""
    comparison = account.comparison
    console.print(Text(account.heading, style="dim"))
    for columns, rows in (
        (ARM_COLUMNS, arm_rows(comparison)),
        (DIFFERENCE_COLUMNS, difference_rows(comparison)),
    ):
        table = Table(box=SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index < 2 else "right", overflow="fold")
        for row in rows:
            broken = (cell.replace(" [", "\n[").replace(", median", "\nmedian") for cell in row)
            table.add_row(*(Text(cell) for cell in broken))
        if rows:
            console.print(table)
    for text in account.verdict:
        console.print(Text(f"• {text}", style="bold"), soft_wrap=True)
    for text in account.notes:
        console.print(Text(f"  {text}", style="dim"), soft_wrap=True)


def markdown(account: Account) -> str:
    """The tables, verdict and notes as Markdown."""
    comparison = account.comparison
    parts = [f"# {comparison.experiment.name}", account.heading[0].upper() + account.heading[1:] + "."]
    parts += ["\n".join(f"- **{text}**" for text in account.verdict)]
    for columns, rows in (
        (ARM_COLUMNS, arm_rows(comparison)),
        (DIFFERENCE_COLUMNS, difference_rows(comparison)),
    ):
        lines = [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]
        parts.append("\n".join(lines))
    parts.append("\n".join(f"- {text}" for text in account.notes))
    return "\n\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_json(account: Account) -> dict[str, Any]:
    """Everything as JSON types, the curve of every run included; what has no value is null."""
    comparison = account.comparison
    experiment, horizon = comparison.experiment, comparison.horizon
    limits = None if horizon is None else {"rollouts": horizon.rollouts, "seconds": horizon.seconds}
    return {
        "name": experiment.name,
        "base": str(experiment.base),
        "seeds": list(experiment.seeds),
        "baseline": experiment.baseline,
        "primary": experiment.primary,
        "success": experiment.success.model_dump(),
        "alpha": ALPHA,
        "horizon": limits,
        "arms": [_arm(comparison, arm) for arm in comparison.arms],
        "comparisons": [_difference(comparison, difference) for difference in comparison.differences],
        "missing": list(account.missing),
        "verdict": list(account.verdict),
        "notes": list(account.notes),
    }


def _arm(comparison: Comparison, arm: Arm) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": arm.name,
        "overrides": comparison.experiment.arm(arm.name).overrides,
        "seeds": arm.seeds,
    }
    for endpoint in ENDPOINTS:
        content[endpoint] = _endpoint(arm, endpoint)
    band = arm.band
    content["curve"] = band and {
        "rollouts": _list(band.rollouts),
        "mean": _list(band.mean),
        "low": _list(band.low),
        "high": _list(band.high),
    }
    content["runs"] = [
        {
            "seed": result.seed,
            "rollouts": _list(result.curve.rollouts),
            "seconds": _list(result.curve.seconds),
            "values": _list(result.curve.values),
            "held_out": result.held_out,
            "uncounted_rollouts": result.uncounted,
        }
        for result in arm.results
    ]
    return content


def _endpoint(arm: Arm, endpoint: Endpoint) -> dict[str, Any]:
    """`mean` of a time is the restricted mean; `values` are null where the threshold was not reached."""
    values = arm.values[endpoint]
    content: dict[str, Any] = _interval(arm.intervals[endpoint])
    if endpoint not in TIMES:
        return content | {"values": values.numbers}
    return content | {
        "values": [number if seed in values.reached else None for seed, number in values.by_seed.items()],
        "reached": len(values.reached),
        "censored": len(values.by_seed) - len(values.reached),
        "median": median_time(values),
    }


def _difference(comparison: Comparison, difference: Difference) -> dict[str, Any]:
    return {
        "arm": difference.arm,
        "baseline": comparison.experiment.baseline,
        "endpoint": difference.endpoint,
        "seeds": list(difference.by_seed),
        "difference": _interval(difference.interval) | {"values": list(difference.by_seed.values())},
        "p": difference.p,
        "p_smallest": difference.p_smallest,
        "p_holm": difference.p_holm,
        "significant": difference.significant,
        "better": difference.better,
        "seeds_for_80_percent_power": difference.seeds_needed,
        "detectable_difference": difference.detectable,
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {
        "mean": _finite(interval.mean),
        "low": _finite(interval.low),
        "high": _finite(interval.high),
        "n": interval.n,
    }


def _list(numbers: Any) -> list[float | None]:
    return [_finite(round(float(number), 6)) for number in numbers]


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
