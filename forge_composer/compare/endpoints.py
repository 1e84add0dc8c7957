"""What arms are compared on: one number a run, all cut at what the shortest run had."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_composer.compare.curves import RunResult, first_reaching, mean_over, smooth
from forge_composer.compare.experiment import Endpoint, SuccessSection
from forge_composer.compare.significance import interval_over_seeds
from forge_composer.metrics.intervals import Interval, wilson_interval

ENDPOINTS: tuple[Endpoint, ...] = ("area", "rollouts_to_threshold", "seconds_to_threshold", "held_out")
TIMES: tuple[Endpoint, ...] = ("rollouts_to_threshold", "seconds_to_threshold")
"""Endpoints of which less is better, and that a run may not reach."""

TITLES: dict[Endpoint, str] = {
    "area": "area under the learning curve",
    "rollouts_to_threshold": "rollouts to the threshold",
    "seconds_to_threshold": "training time to the threshold",
    "held_out": "final held-out success",
}


@dataclass(frozen=True, slots=True)
class Horizon:
    """What every run had at least: runs are compared on this much and no more."""

    start: float
    """Rollouts at the latest first point of a curve."""
    rollouts: float
    seconds: float

    @classmethod
    def of(cls, results: Sequence[RunResult]) -> Horizon:
        """The horizon that all of these runs share; needs at least one."""
        curves = [result.curve for result in results]
        return cls(
            max(float(curve.rollouts[0]) for curve in curves),
            min(float(curve.rollouts[-1]) for curve in curves),
            min(float(curve.seconds[-1]) for curve in curves),
        )


@dataclass(frozen=True, slots=True)
class Values:
    """One endpoint of the runs of one arm, by seed."""

    by_seed: dict[int, float]
    """The number of each seed that has one. For a time: the time, or the horizon if it was not reached."""
    reached: frozenset[int] = field(default_factory=frozenset)
    """Seeds that reached the threshold within the horizon (times only)."""

    @property
    def numbers(self) -> list[float]:
        """The numbers, in the order of the seeds."""
        return list(self.by_seed.values())


def endpoint_values(
    endpoint: Endpoint, results: Sequence[RunResult], success: SuccessSection, horizon: Horizon
) -> Values:
    """The numbers of one endpoint.

    A time to the threshold T of a run that never reaches it is censored; what is averaged is min(T, horizon).
    The mean of that is the restricted mean (Irwin 1949): less than the true mean, and defined for any
    number of runs that do not reach it.
    """
    if endpoint == "held_out":
        return Values({r.seed: r.held_out for r in results if r.held_out is not None})
    if endpoint == "area":
        return Values(
            {
                r.seed: mean_over(r.curve.rollouts, r.curve.values, horizon.start, horizon.rollouts)
                for r in results
            }
        )
    limit = horizon.rollouts if endpoint == "rollouts_to_threshold" else horizon.seconds
    by_seed: dict[int, float] = {}
    reached: set[int] = set()
    for result in results:
        curve = smooth(result.curve, success.smoothing)
        x = curve.rollouts if endpoint == "rollouts_to_threshold" else curve.seconds
        time = first_reaching(x, curve.values, success.threshold)
        if time is not None and time <= limit:
            reached.add(result.seed)
        by_seed[result.seed] = limit if time is None else min(time, limit)
    return Values(by_seed, frozenset(reached))


def median_time(values: Values) -> float | None:
    """The median time to the threshold; None if fewer than half of the runs reached it."""
    numbers = [number if seed in values.reached else np.inf for seed, number in values.by_seed.items()]
    middle = statistics.median_high(numbers) if numbers else np.inf
    return None if middle == np.inf else float(statistics.median(numbers))


def held_out_interval(results: Sequence[RunResult]) -> Interval:
    """Interval over seeds of the final held-out success.

    Seeds that all succeed on every task, or on none, have no spread to resample; there Wilson's interval for
    the tasks of a single evaluation stands in (all seeds are evaluated on the same tasks).
    """
    scored = [result for result in results if result.held_out is not None]
    rates = [result.held_out for result in scored if result.held_out is not None]
    if len(set(rates)) == 1 and rates[0] in (0.0, 1.0):
        tasks = min(result.held_out_tasks for result in scored)
        interval = wilson_interval(tasks if rates[0] == 1.0 else 0, tasks)
        return Interval(interval.mean, interval.low, interval.high, len(rates)) if tasks else interval
    return interval_over_seeds(rates)
