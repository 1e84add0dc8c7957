"""The numbers in words. A sentence says no more than its numbers do: no difference found is not equality."""

from __future__ import annotations

import math
from collections.abc import Mapping

from forge_composer.compare.analysis import Arm, Comparison, Difference
from forge_composer.compare.endpoints import TIMES, TITLES, median_time
from forge_composer.compare.experiment import Endpoint
from forge_composer.compare.significance import ALPHA, POWER, fewest_pairs
from forge_composer.config import Config
from forge_composer.metrics.intervals import Interval
from forge_composer.metrics.summary import duration

MANY_UNCOUNTED = 0.05
"""Share of a run's rollouts without a step's record from which it is worth a note."""

MANY_SEEDS = 10_000


def verdict(comparison: Comparison) -> list[str]:
    """One paragraph per arm that is compared with the baseline, on the primary endpoint."""
    experiment = comparison.experiment
    found = {difference.arm: difference for difference in comparison.of(experiment.primary)}
    return [
        _judge(comparison, found[arm.name]) if arm.name in found else _nothing(comparison, arm)
        for arm in comparison.arms
        if arm.name != experiment.baseline
    ]


def notes(comparison: Comparison, *, missing: int, parallel: int, configs: Mapping[str, Config]) -> list[str]:
    """What a reader has to know to read the numbers right.

    Args:
        comparison: the numbers.
        missing: runs that are not finished.
        parallel: runs that were started at a time.
        configs: the run config of each arm.
    """
    experiment, horizon = comparison.experiment, comparison.horizon
    found = []
    if missing:
        total = len(experiment.seeds) * len(experiment.arms)
        found.append(
            f"{missing} of {total} runs are not finished and are left out. If they failed for a reason that "
            "has to do with their arm, what is left is biased."
        )
    if horizon is not None:
        found.append(
            f"Runs are compared on what all of them had: {horizon.rollouts:,.0f} training rollouts, "
            f"{duration(horizon.seconds)} of training. Times to the threshold are restricted means: a run "
            "that does not reach it counts with that limit, so that the mean is a lower bound."
        )
    if len({_tasks(config) for config in configs.values()}) > 1:
        found.append("The arms differ in their environment: runs of one seed do not have the same tasks.")
    if len({_batch(config) for config in configs.values()}) > 1:
        found.append("The arms differ in the size of a batch: one step is not the same number of rollouts.")
    if parallel > 1:
        found.append(f"{parallel} runs ran at a time and shared the machine: training times depend on that.")
    found += [note for arm in comparison.arms if (note := _uncounted(arm))]
    if any(0 < len(arm.seeds) < 5 for arm in comparison.arms):
        found.append(
            "With fewer than 5 seeds an interval lies between the smallest and the largest seed, and holds "
            "the true mean less often than in 95% of cases."
        )
    found.append(
        "Only the primary endpoint decides. The tests of the others are corrected for the number of arms, "
        "not for the number of endpoints."
    )
    return found


def show(endpoint: Endpoint, value: float | None, *, signed: bool = False) -> str:
    """A number of an endpoint with its unit; `–` where there is none."""
    if value is None or math.isnan(value):
        return "–"
    sign = ("+" if value > 0 else "−" if value < 0 else "") if signed else ""
    size = abs(value) if signed else value
    if endpoint == "seconds_to_threshold":
        return sign + duration(size)
    return sign + (f"{size:,.0f}" if endpoint == "rollouts_to_threshold" else f"{size:.3f}")


def show_interval(endpoint: Endpoint, interval: Interval, *, signed: bool = False) -> str:
    """A mean with its interval."""
    mean = show(endpoint, interval.mean, signed=signed)
    if math.isnan(interval.low):
        return mean
    low, high = (show(endpoint, edge, signed=signed) for edge in (interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def show_time(comparison: Comparison, arm: Arm, endpoint: Endpoint) -> str:
    """A time to the threshold, or that it was not reached."""
    values, horizon = arm.values[endpoint], comparison.horizon
    if horizon is None or not values.by_seed:
        return "–"
    limit = horizon.rollouts if endpoint == "rollouts_to_threshold" else horizon.seconds
    if not values.reached:
        unit = " rollouts" if endpoint == "rollouts_to_threshold" else ""
        return f"not reached within {show(endpoint, limit)}{unit}"
    bound = "" if len(values.reached) == len(values.by_seed) else "≥ "
    return bound + show_interval(endpoint, arm.intervals[endpoint])


def show_reached(arm: Arm, endpoint: Endpoint) -> str:
    """Seeds that reached the threshold, and the median if it is known."""
    values = arm.values[endpoint]
    median = median_time(values)
    tail = "" if median is None else f", median {show(endpoint, median)}"
    return f"{len(values.reached)} of {len(values.by_seed)}{tail}"


def show_seeds(difference: Difference) -> str:
    """How many seeds would settle it."""
    needed = difference.seeds_needed
    if needed is None:
        return "–"
    return f"{needed:,}" if needed <= MANY_SEEDS else f"more than {MANY_SEEDS:,}"


def _judge(comparison: Comparison, difference: Difference) -> str:
    experiment, n = comparison.experiment, len(difference.by_seed)
    compared = sum(arm.name != experiment.baseline for arm in comparison.arms)
    endpoint = difference.endpoint
    pairs = f"{n} paired seed{'s' if n > 1 else ''}"
    measured = (
        f"{TITLES[endpoint]}, {difference.arm} minus {experiment.baseline}: "
        f"{show_interval(endpoint, difference.interval, signed=True)}, {pairs}, exact p = {difference.p:.3g}"
    )
    if compared > 1:
        measured += f", {difference.p_holm:.3g} after Holm's correction for {compared} comparisons"
    if difference.significant:
        word = "better" if difference.better else "worse"
        head = f"{difference.arm} is {word} than {experiment.baseline} here ({measured})."
        return " ".join([head, *_censored(comparison, difference)])
    equal = not any(difference.by_seed.values())
    if equal:
        parts = [
            f"{difference.arm} and {experiment.baseline} have the same value on every seed ({measured})."
        ]
    else:
        parts = [f"No difference between {difference.arm} and {experiment.baseline} is shown ({measured})."]
    if difference.p_smallest * compared > ALPHA:
        parts.append(_too_few(n, compared, difference.p_smallest))
    elif not equal:
        edges = (difference.interval.low, difference.interval.high)
        low, high = (show(endpoint, edge, signed=True) for edge in edges)
        parts.append(f"That is no proof that there is none: the interval goes from {low} to {high}.")
    parts += _power(difference)
    return " ".join([*parts, *_censored(comparison, difference)])


def _too_few(n: int, compared: int, smallest: float) -> str:
    text = f"With {n} seed{'s' if n > 1 else ''} the smallest two-sided exact p is 2/{2**n} = {smallest:.4g}"
    if compared > 1:
        text += f", times {compared} comparisons {min(1.0, smallest * compared):.4g}"
    return (
        f"{text}: no difference, however large, can be called significant at {ALPHA:g}; "
        f"{fewest_pairs(ALPHA / compared)} seeds are the least that can."
    )


def _power(difference: Difference) -> list[str]:
    found = []
    if difference.seeds_needed is not None:
        found.append(
            f"If the true difference were the observed one, {show_seeds(difference)} seeds would find it "
            f"with {POWER:.0%} power."
        )
    if difference.detectable:
        size = show(difference.endpoint, difference.detectable)
        found.append(f"With {len(difference.by_seed)} seeds a difference of {size} has that power.")
    return found


def _censored(comparison: Comparison, difference: Difference) -> list[str]:
    if difference.endpoint not in TIMES:
        return []
    names = (difference.arm, comparison.experiment.baseline)
    arms = [arm for arm in comparison.arms if arm.name in names]
    counts = [f"{arm.name} {show_reached(arm, difference.endpoint)}" for arm in arms]
    return [f"Seeds that reached the threshold: {'; '.join(counts)}."]


def _nothing(comparison: Comparison, arm: Arm) -> str:
    experiment = comparison.experiment
    baseline = next(other for other in comparison.arms if other.name == experiment.baseline)
    endpoint = experiment.primary
    head = f"{arm.name} and {experiment.baseline} cannot be compared on {TITLES[endpoint]}"
    if not set(arm.seeds) & set(baseline.seeds):
        return f"{head}: no seed is finished in both."
    if endpoint in TIMES:
        return f"{head}: no seed of either reached it. The threshold is too high for this many rollouts."
    return f"{head}: the runs have no held-out evaluation."


def _uncounted(arm: Arm) -> str | None:
    counted = sum(float(result.curve.rollouts[-1]) for result in arm.results)
    uncounted = sum(result.uncounted for result in arm.results)
    if uncounted <= MANY_UNCOUNTED * counted:
        return None
    return (
        f"{arm.name}: {uncounted:,} training rollouts beside the {counted:,.0f} counted ones are in no "
        "step's record (retries, batches with nothing to train on, groups under way at the end): its numbers "
        "of rollouts are too low."
    )


def _tasks(config: Config) -> str:
    return config.environment.model_dump_json(exclude={"workers", "sessions_per_worker"})


def _batch(config: Config) -> tuple[int, int]:
    return config.loop.groups_per_step, config.rollout.group_size
