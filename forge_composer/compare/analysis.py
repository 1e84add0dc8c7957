"""From finished runs to the numbers of a comparison. Pure: the same runs give the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge_composer.compare.curves import Curve, Floats, RunResult, smooth
from forge_composer.compare.endpoints import (
    ENDPOINTS,
    TIMES,
    Horizon,
    Values,
    endpoint_values,
    held_out_interval,
)
from forge_composer.compare.experiment import Endpoint, Experiment
from forge_composer.compare.significance import (
    ALPHA,
    band_over_seeds,
    detectable,
    holm,
    interval_over_seeds,
    seeds_needed,
    sign_flip_p,
    smallest_p,
)
from forge_composer.metrics.intervals import Interval

GRID = 200
"""Points of a mean learning curve."""


@dataclass(frozen=True, slots=True)
class Band:
    """The smoothed learning curve of an arm: mean over seeds and pointwise 95% interval, `[points]` each."""

    rollouts: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Arm:
    """What the finished runs of one arm amount to."""

    name: str
    results: tuple[RunResult, ...]
    values: Mapping[Endpoint, Values]
    intervals: Mapping[Endpoint, Interval]
    band: Band | None

    @property
    def seeds(self) -> list[int]:
        """Seeds whose run is finished."""
        return [result.seed for result in self.results]


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm minus the baseline on one endpoint, over the seeds that both have."""

    arm: str
    endpoint: Endpoint
    by_seed: Mapping[int, float]
    interval: Interval
    p: float
    p_smallest: float
    """The smallest p-value that this number of pairs can give."""
    p_holm: float
    """Adjusted for the number of arms that are compared with the baseline on this endpoint."""
    significant: bool
    """`p_holm` is at most ALPHA, and the interval leaves out 0."""
    better: bool | None
    """Whether the arm is the better one; None if they are equal on average."""
    seeds_needed: int | None
    """Seeds that would find a difference of the observed size with 80% power, at ALPHA over the arms."""
    detectable: float | None
    """The difference that this many seeds find with 80% power."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All numbers of an experiment."""

    experiment: Experiment
    arms: tuple[Arm, ...]
    horizon: Horizon | None
    """None if no run is finished."""
    differences: tuple[Difference, ...]

    def of(self, endpoint: Endpoint) -> list[Difference]:
        """The differences on one endpoint, in the order of the arms; arms that cannot be compared lack."""
        return [difference for difference in self.differences if difference.endpoint == endpoint]


def compare(experiment: Experiment, results: Mapping[str, Sequence[RunResult]]) -> Comparison:
    """Compare the finished runs of each arm (by name) with the baseline's."""
    everything = [result for found in results.values() for result in found]
    horizon = Horizon.of(everything) if everything else None
    arms = {
        arm.name: _arm(experiment, arm.name, results.get(arm.name, ()), horizon) for arm in experiment.arms
    }
    baseline = arms[experiment.baseline]
    others = [arm for arm in arms.values() if arm is not baseline]
    differences = [
        difference for endpoint in ENDPOINTS for difference in _differences(endpoint, baseline, others)
    ]
    return Comparison(experiment, tuple(arms.values()), horizon, tuple(differences))


def _arm(experiment: Experiment, name: str, results: Sequence[RunResult], horizon: Horizon | None) -> Arm:
    if horizon is None or not results:
        nothing = {endpoint: Values({}) for endpoint in ENDPOINTS}
        return Arm(name, (), nothing, {endpoint: interval_over_seeds([]) for endpoint in ENDPOINTS}, None)
    values = {
        endpoint: endpoint_values(endpoint, results, experiment.success, horizon) for endpoint in ENDPOINTS
    }
    intervals = {endpoint: interval_over_seeds(found.numbers) for endpoint, found in values.items()}
    intervals["held_out"] = held_out_interval(results)
    curves = [smooth(result.curve, experiment.success.smoothing) for result in results]
    return Arm(name, tuple(results), values, intervals, _band(curves))


def _band(curves: Sequence[Curve]) -> Band:
    """Over the rollouts that all of the curves have, so that every point is a mean of the same seeds."""
    low = max(float(curve.rollouts[0]) for curve in curves)
    high = max(low, min(float(curve.rollouts[-1]) for curve in curves))
    grid = np.linspace(low, high, GRID if high > low else 1)
    values_NG = np.stack([np.interp(grid, curve.rollouts, curve.values) for curve in curves])
    return Band(grid, *band_over_seeds(values_NG))


def _differences(endpoint: Endpoint, baseline: Arm, others: Sequence[Arm]) -> list[Difference]:
    """Every comparable arm minus the baseline; Holm's correction over all arms that were to be compared."""
    pairs = {arm.name: paired(endpoint, arm, baseline) for arm in others}
    p_values = [sign_flip_p(list(found.values())) for found in pairs.values()]
    alpha = ALPHA / len(others)
    found = []
    for (name, by_seed), p, p_holm in zip(pairs.items(), p_values, holm(p_values), strict=True):
        if not by_seed:
            continue
        numbers = list(by_seed.values())
        interval = interval_over_seeds(numbers)
        excludes_zero = interval.low > 0 or interval.high < 0
        found.append(
            Difference(
                arm=name,
                endpoint=endpoint,
                by_seed=by_seed,
                interval=interval,
                p=p,
                p_smallest=smallest_p(len(numbers)),
                p_holm=p_holm,
                significant=p_holm <= ALPHA and excludes_zero,
                better=None if interval.mean == 0 else (interval.mean > 0) != (endpoint in TIMES),
                seeds_needed=seeds_needed(numbers, alpha),
                detectable=detectable(numbers, alpha),
            )
        )
    return found


def paired(endpoint: Endpoint, arm: Arm, baseline: Arm) -> dict[int, float]:
    """Arm minus baseline of the seeds that both have.

    Empty for a time that no run of the two reached: all that is known is that both take longer, and a
    difference of 0 would say more.
    """
    ours, theirs = arm.values[endpoint], baseline.values[endpoint]
    seeds = [seed for seed in ours.by_seed if seed in theirs.by_seed]
    if endpoint in TIMES and not any(seed in ours.reached | theirs.reached for seed in seeds):
        return {}
    return {seed: ours.by_seed[seed] - theirs.by_seed[seed] for seed in seeds}
