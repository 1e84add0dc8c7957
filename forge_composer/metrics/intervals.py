"""Means with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(slots=True, frozen=True)
class Interval:
    """A mean with its two-sided confidence interval. Without any value all three numbers are NaN."""

    mean: float
    low: float
    high: float
    n: int


def mean_interval(values: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Mean and interval: Wilson's where all values are 0 or 1, else the bootstrap's."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(sum(value == 1.0 for value in values), len(values), confidence=confidence)
    return bootstrap_interval(values, confidence=confidence, seed=seed)


def wilson_interval(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate (Wilson 1927): never outside [0, 1], never of width 0."""
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / n
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    centre = rate + z * z / (2 * n)
    return Interval(
        rate,
        0.0 if successes == 0 else (centre - spread) / scale,
        1.0 if successes == n else (centre + spread) / scale,
        n,
    )


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean (Efron 1979); a seed fixes it."""
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    sample = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    # Counts of each value in a resample, which is less memory than the resamples themselves.
    means = rng.multinomial(n, np.full(n, 1 / n), size=resamples) @ sample / n
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(sample.mean()), float(low), float(high), n)
