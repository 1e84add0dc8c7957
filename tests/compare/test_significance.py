"""Intervals, exact tests, correction and power against values worked out by hand or by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forge_composer.compare.significance import (
    ALPHA,
    band_over_seeds,
    detectable,
    expanded_tail,
    fewest_pairs,
    holm,
    interval_over_seeds,
    seeds_needed,
    sign_flip_p,
    smallest_p,
)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0], 1.0),
        ([1.0, 2.0], 2 / 4),
        ([1.0, 2.0, 3.0], 2 / 8),
        # Sums of 1, 2, 3 with signs: 6, 4, 2, 0, 0, -2, -4, -6; of -1, 2, 3 the sum is 4: four reach it.
        ([-1.0, 2.0, 3.0], 4 / 8),
        ([0.1] * 5, 2 / 32),
        ([-0.3, -0.1, -0.2, -0.5, -0.4, -0.2], 2 / 64),
        # A zero difference doubles the patterns that reach the observed sum.
        ([0.0, 1.0, 2.0, 3.0], 4 / 16),
        ([0.0, 0.0], 1.0),
        # |sum| >= 2 of three signs of 1 and one of -1: all but the six patterns of sum 0.
        ([1.0, 1.0, 1.0, -1.0], 10 / 16),
        ([], 1.0),
    ],
)
def test_sign_flip_p_by_hand(differences: list[float], p: float) -> None:
    assert sign_flip_p(differences) == pytest.approx(p, abs=1e-12)


def test_sign_flip_counts_equal_sums_in_spite_of_rounding() -> None:
    assert sign_flip_p([0.1, 0.2, 0.3]) == 2 / 8
    assert sign_flip_p([0.1 + 0.2, -0.3, 0.7]) == sign_flip_p([0.3, -0.3, 0.7])


def test_sampled_sign_patterns_agree_with_all_of_them() -> None:
    rng = np.random.default_rng(3)
    sixteen = list(rng.normal(0.4, 1.0, 16))
    nearly = [*sixteen, 1e-12]  # one pair more, which changes nothing but the method
    assert sign_flip_p(nearly) == pytest.approx(sign_flip_p(sixteen), abs=0.005)
    assert sign_flip_p([1.0] * 30) == pytest.approx(1 / 100_001)  # never 0


def test_smallest_p_is_reached_and_is_the_least() -> None:
    assert smallest_p(5) == 0.0625 == sign_flip_p([1, 2, 3, 4, 5])
    assert [smallest_p(n) for n in (0, 1, 6, 8)] == [1.0, 1.0, 2 / 64, 2 / 256]
    assert fewest_pairs(0.05) == 6
    assert fewest_pairs(0.05 / 3) == 7
    assert smallest_p(6) <= 0.05 < smallest_p(5)


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04; made monotone, 0.06 at the end.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_expanded_tail_by_hand() -> None:
    # t(0.975; 7) = 2.364624, times sqrt(8/7) = 2.527887; Phi(-2.527887) = 0.005738.
    assert expanded_tail(8) == pytest.approx(0.0057377, abs=2e-6)
    # t(0.975; 2) = 4.302653, t(0.975; 1) = 12.706205; large n: the plain 2.5%.
    assert expanded_tail(3) == pytest.approx(6.834e-8, rel=1e-3)
    assert expanded_tail(2) < 1e-70
    assert expanded_tail(5000) == pytest.approx(0.025, abs=1e-4)


def test_interval_over_seeds() -> None:
    two = interval_over_seeds([0.2, 0.6])
    assert (two.mean, two.low, two.high, two.n) == (pytest.approx(0.4), 0.2, 0.6, 2)
    one = interval_over_seeds([0.7])
    assert one.mean == 0.7
    assert math.isnan(one.low)
    assert math.isnan(interval_over_seeds([]).mean)
    eight = interval_over_seeds([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    # t interval: 0.45 +- 2.3646 * 0.244949 / sqrt(8) = 0.45 +- 0.2048; the bootstrap's is near it.
    assert eight.low == pytest.approx(0.245, abs=0.02)
    assert eight.high == pytest.approx(0.655, abs=0.02)


@pytest.mark.parametrize("n", [5, 8])
def test_intervals_hold_the_mean_about_as_often_as_they_say(n: int) -> None:
    rng = np.random.default_rng(11)
    held = 0
    for _ in range(400):
        interval = interval_over_seeds(list(rng.normal(size=n)))
        held += interval.low <= 0 <= interval.high
    assert 0.90 <= held / 400 <= 0.985


def test_band_is_the_interval_at_each_point() -> None:
    rng = np.random.default_rng(5)
    values_NG = rng.uniform(size=(6, 3))
    mean_G, low_G, high_G = band_over_seeds(values_NG)
    for g in range(3):
        interval = interval_over_seeds(list(values_NG[:, g]))
        assert mean_G[g] == pytest.approx(interval.mean)
        assert low_G[g] == pytest.approx(interval.low, abs=0.02)
        assert high_G[g] == pytest.approx(interval.high, abs=0.02)
    assert np.isnan(band_over_seeds(values_NG[:1])[1]).all()


def test_seeds_needed_by_hand() -> None:
    # Mean 1, standard deviation 1: (1.959964 + 0.841621)^2 + 1.959964^2 / 2 = 7.8489 + 1.9207 = 9.77.
    differences = [0.0, 1.0, 2.0]
    assert seeds_needed(differences, ALPHA) == 10
    assert seeds_needed([100.0, 100.1, 99.9], ALPHA) == 6  # the exact test needs six whatever the effect
    assert seeds_needed([1.0, -1.0], ALPHA) is None
    assert seeds_needed([1.0], ALPHA) is None


def test_detectable_difference_by_hand() -> None:
    # Ten pairs of standard deviation 1: 2.801585 / sqrt(10 - 1.920729) = 0.98564.
    ten = [-1.0, 1.0] * 5
    scale = float(np.std(ten, ddof=1))
    assert detectable(ten, ALPHA) == pytest.approx(0.98564 * scale, rel=1e-4)
    assert detectable([1.0, 2.0, 3.0, 4.0, 5.0], ALPHA) is None  # no effect can be found with five


def test_seeds_needed_give_about_the_power_that_is_promised() -> None:
    rng = np.random.default_rng(2)
    effect = 1.0
    n = seeds_needed([effect - 1.0, effect, effect + 1.0], ALPHA)
    assert n is not None
    found = np.mean([sign_flip_p(list(rng.normal(effect, 1.0, n))) <= ALPHA for _ in range(300)])
    assert 0.72 <= found <= 0.90


def test_p_values_of_exchangeable_pairs_keep_their_level() -> None:
    rng = np.random.default_rng(9)
    p = np.array([sign_flip_p(list(rng.standard_t(2, size=8))) for _ in range(500)])
    for level in (0.05, 0.2, 0.5):
        assert np.mean(p <= level) <= level + 3 * math.sqrt(level * (1 - level) / 500)
