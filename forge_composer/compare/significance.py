"""Intervals over seeds, the exact paired test, the correction for several arms, and power.

Seeds are few, so nothing here relies on large samples more than it must.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from forge_composer.compare.curves import Floats
from forge_composer.metrics.intervals import Interval, bootstrap_interval

ALPHA = 0.05
"""Level of the tests; intervals have confidence 1 - ALPHA."""

POWER = 0.8
"""Power that the power notes are about."""

MOST_ENUMERATED = 16
"""Pairs up to which all sign patterns are tried; beyond, a fixed random sample of them."""

_RESAMPLES = 20_000
_PATTERNS = 100_000
_NORMAL = NormalDist()


def interval_over_seeds(values: Sequence[float]) -> Interval:
    """Mean over seeds with its bootstrap 95% interval; no interval (NaN) with fewer than two.

    Percentiles are expanded for the sample's size, see `expanded_tail`.
    """
    if len(values) < 2:
        mean = float(values[0]) if values else math.nan
        return Interval(mean, math.nan, math.nan, len(values))
    confidence = 1 - 2 * expanded_tail(len(values))
    return bootstrap_interval(values, confidence=confidence, resamples=_RESAMPLES)


def band_over_seeds(values_NG: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean, low and high of N curves at G points: pointwise intervals as `interval_over_seeds` has them."""
    n = len(values_NG)
    mean_G = values_NG.mean(axis=0)
    if n < 2:
        nothing_G = np.full_like(mean_G, np.nan)
        return mean_G, nothing_G, nothing_G
    tail = expanded_tail(n)
    counts_BN = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES // 4)
    low_G, high_G = np.quantile(counts_BN @ values_NG / n, [tail, 1 - tail], axis=0)
    return mean_G, low_G, high_G


def expanded_tail(n: int, alpha: float = ALPHA) -> float:
    """Tail of the bootstrap distribution of a mean of n to cut off for a two-sided interval of level alpha.

    Plain percentiles are too narrow for few values: they lack the factor n / (n - 1) of the variance and
    the t quantile. Cutting at Phi(-sqrt(n / (n - 1)) t) mends both for normal values (Hesterberg 2015,
    arXiv 1411.5279, the expanded percentile interval).
    """
    return _NORMAL.cdf(-math.sqrt(n / (n - 1)) * _t_quantile(1 - alpha / 2, n - 1))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of paired differences: the share of sign patterns with at least as large a |sum|.

    Exact under the hypothesis that a pair's two values are exchangeable (Fisher 1935); no assumption on
    the distribution. All 2^n patterns up to `MOST_ENUMERATED` pairs, else a random sample that counts the
    observed pattern too, so that the p-value stays valid (Phipson and Smyth 2010).
    """
    d_N = np.asarray(differences, dtype=np.float64)
    n = len(d_N)
    if n == 0:
        return 1.0
    observed = abs(d_N.sum()) - 1e-9 * np.abs(d_N).sum()  # equal sums differ by rounding
    if n <= MOST_ENUMERATED:
        signs_PN = 1.0 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
        return float(np.mean(np.abs(signs_PN @ d_N) >= observed))
    signs_PN = np.random.default_rng(0).choice([-1.0, 1.0], size=(_PATTERNS, n))
    return float((1 + np.sum(np.abs(signs_PN @ d_N) >= observed)) / (1 + _PATTERNS))


def smallest_p(n: int) -> float:
    """The smallest two-sided p-value that n pairs can give: the observed pattern and its mirror image."""
    return min(1.0, 2.0 / 2.0**n)


def fewest_pairs(alpha: float) -> int:
    """Pairs without which `sign_flip_p` cannot get down to alpha."""
    return math.ceil(math.log2(2 / alpha))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Holm 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def seeds_needed(differences: Sequence[float], alpha: float) -> int | None:
    """Pairs that find a mean difference of the observed size with 80% power; None if it cannot be said.

    Of the t test (Guenther 1981), which the sign-flip test follows closely, and never fewer than the
    exact test needs to reach alpha at all.
    """
    if len(differences) < 2:
        return None
    mean, spread = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if mean == 0:
        return None
    z = _NORMAL.inv_cdf(1 - alpha / 2)
    needed = ((z + _NORMAL.inv_cdf(POWER)) * spread / mean) ** 2 + z * z / 2
    return max(math.ceil(needed), fewest_pairs(alpha))


def detectable(differences: Sequence[float], alpha: float) -> float | None:
    """The mean difference that as many pairs of this spread find with 80% power; None if none is."""
    n = len(differences)
    z = _NORMAL.inv_cdf(1 - alpha / 2)
    if n < fewest_pairs(alpha):
        return None
    return (z + _NORMAL.inv_cdf(POWER)) * float(np.std(differences, ddof=1)) / math.sqrt(n - z * z / 2)


def _t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, probability > 0.5, by bisection."""
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return high


def _t_cdf(t: float, degrees: int) -> float:
    """Student's t for t >= 0 and whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(3 if odd else 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + inside / 2
