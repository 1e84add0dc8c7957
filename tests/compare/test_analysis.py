"""Comparisons of made-up runs: censoring, pairing, the null, a planted effect, and what the verdict says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from forge_composer.compare.analysis import Comparison, Difference, compare
from forge_composer.compare.curves import RunResult
from forge_composer.compare.endpoints import median_time
from forge_composer.compare.significance import ALPHA, interval_over_seeds, sign_flip_p
from forge_composer.compare.verdict import notes, show_reached, show_time, verdict
from forge_composer.config import Config, load

from .runs_made_up import experiment, flat, result


def rising(seed: int, step: int, steps: int = 10) -> RunResult:
    """Success from the given step on; never, if the run ends before it."""
    return result(seed, [0.0 if index < step else 1.0 for index in range(1, steps + 1)])


def draw(seed: int, effect: float, n: int = 8) -> Comparison:
    """Two arms whose seeds share half of their variance, as paired runs do."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0.5, 0.05, n)
    arms = {"grpo": shared + rng.normal(0, 0.05, n), "sdpo": shared + rng.normal(effect, 0.05, n)}
    runs = {name: [result(s, [value]) for s, value in enumerate(values)] for name, values in arms.items()}
    return compare(experiment(seeds=list(range(n))), runs)


def primary(comparison: Comparison) -> Difference:
    return comparison.of(comparison.experiment.primary)[0]


def test_two_identical_arms_are_not_called_different() -> None:
    # At level 0.05 it is 19 of 20 on average: about one such twenty in four holds two calls. The next test
    # has the level itself.
    called = [primary(draw(seed, effect=0.0)).significant for seed in range(200, 220)]
    assert called.count(False) >= 19


def test_the_null_keeps_its_level() -> None:
    called = 0
    for seed in range(1000):
        d = np.random.default_rng(seed).normal(0, 0.07, 8)
        if sign_flip_p(d) <= ALPHA:
            interval = interval_over_seeds(list(d))
            called += interval.low > 0 or interval.high < 0
    assert 0.02 <= called / 1000 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 1000)


def test_a_planted_effect_is_found() -> None:
    for seed in range(20):
        comparison = draw(seed, effect=0.25)
        found = primary(comparison)
        assert found.significant
        assert found.better
        assert found.interval.mean == pytest.approx(0.25, abs=0.08)
        assert verdict(comparison)[0].startswith("sdpo is better than grpo here")
    assert verdict(draw(0, effect=-0.25))[0].startswith("sdpo is worse than grpo here")


def test_arms_that_are_the_same_on_every_seed() -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    comparison = compare(experiment(), {"grpo": flat(values), "sdpo": flat(values)})
    found = primary(comparison)
    assert (found.p, found.significant, found.better, found.seeds_needed) == (1.0, False, None, None)
    assert "have the same value on every seed" in verdict(comparison)[0]


def test_differences_are_paired_by_seed() -> None:
    theirs = flat([0.1, 0.9, 0.5])
    ours = [result(2, [0.6] * 5), result(0, [0.2] * 5), result(7, [1.0] * 5)]
    comparison = compare(experiment(), {"grpo": theirs, "sdpo": ours})
    assert primary(comparison).by_seed == {2: pytest.approx(0.1), 0: pytest.approx(0.1)}


def test_five_seeds_cannot_be_significant_and_the_verdict_says_why() -> None:
    found = draw(0, effect=5.0, n=5)
    assert primary(found).p == primary(found).p_smallest == 0.0625
    assert not primary(found).significant
    (text,) = verdict(found)
    assert "With 5 seeds the smallest two-sided exact p is 2/32 = 0.0625" in text
    assert "6 seeds are the least that can" in text


def test_more_arms_need_more_seeds() -> None:
    arms = [{"name": name} for name in ("grpo", "a", "b", "c")]
    values = {name: flat([base + 0.01 * s for s in range(6)]) for name, base in (("grpo", 0.1), ("a", 0.5))}
    values |= {"b": flat([0.1] * 6), "c": flat([0.2, 0.1, 0.2, 0.1, 0.2, 0.1])}
    comparison = compare(experiment(arms=arms, seeds=list(range(6))), values)
    first = comparison.of("area")[0]
    assert (first.p, first.p_holm, first.significant) == (2 / 64, pytest.approx(6 / 64), False)
    assert "times 3 comparisons 0.09375" in verdict(comparison)[0]
    assert "7 seeds are the least that can" in verdict(comparison)[0]


def test_times_to_the_threshold_of_censored_runs() -> None:
    grpo = [rising(seed, step) for seed, step in enumerate([8, 99, 99, 6, 99, 99, 99, 99])]
    sdpo = [rising(seed, step) for seed, step in enumerate([2, 3, 2, 3, 2, 3, 2, 99])]
    comparison = compare(experiment(primary="rollouts_to_threshold"), {"grpo": grpo, "sdpo": sdpo})
    slow, fast = comparison.arms
    values = slow.values["rollouts_to_threshold"]
    assert values.numbers == [
        80,
        100,
        100,
        60,
        100,
        100,
        100,
        100,
    ]  # restricted to the 100 rollouts there were
    assert values.reached == {0, 3}
    assert slow.intervals["rollouts_to_threshold"].mean == pytest.approx(92.5)
    assert median_time(values) is None
    assert median_time(fast.values["rollouts_to_threshold"]) == 25
    assert fast.intervals["seconds_to_threshold"].mean == pytest.approx((4 * 4 + 3 * 6 + 20) / 8)
    assert show_time(comparison, slow, "rollouts_to_threshold").startswith("≥ 92 [")
    assert show_reached(fast, "rollouts_to_threshold") == "7 of 8, median 25"
    found = primary(comparison)
    assert found.by_seed == {0: -60, 1: -70, 2: -80, 3: -30, 4: -80, 5: -70, 6: -80, 7: 0}
    assert found.p == 4 / 256  # seven of one sign, and a zero, which doubles the patterns
    assert found.better
    assert found.significant
    (text,) = verdict(comparison)
    assert text.startswith("sdpo is better")
    assert "grpo 2 of 8; sdpo 7 of 8" in text


def test_a_threshold_that_nobody_reaches_is_no_difference_of_zero() -> None:
    never = {name: [rising(seed, 99) for seed in range(8)] for name in ("grpo", "sdpo")}
    comparison = compare(experiment(primary="rollouts_to_threshold"), never)
    assert comparison.of("rollouts_to_threshold") == []
    assert (
        show_time(comparison, comparison.arms[0], "rollouts_to_threshold")
        == "not reached within 100 rollouts"
    )
    assert "no seed of either reached it" in verdict(comparison)[0]


def test_runs_are_compared_on_what_the_shortest_had() -> None:
    long = [rising(seed, 15, steps=20) for seed in range(8)]
    short = [rising(seed, 2) for seed in range(8)]
    comparison = compare(experiment(), {"grpo": long, "sdpo": short})
    assert comparison.horizon is not None
    assert (comparison.horizon.start, comparison.horizon.rollouts, comparison.horizon.seconds) == (
        10,
        100,
        20,
    )
    late = comparison.arms[0].values
    assert not late["rollouts_to_threshold"].reached  # it did, at 150
    assert late["area"].numbers == [0.0] * 8


def test_held_out_success_of_all_seeds_keeps_an_interval() -> None:
    comparison = compare(experiment(), {"grpo": flat([1.0] * 8), "sdpo": flat([0.5] * 8)})
    interval = comparison.arms[0].intervals["held_out"]
    assert interval.mean == interval.high == 1.0
    assert interval.low == pytest.approx(0.963, abs=1e-3)  # Wilson, 100 of 100
    assert interval.n == 8


def test_a_held_out_comparison_without_evaluations() -> None:
    runs = {name: [result(seed, [0.5, 0.6]) for seed in range(8)] for name in ("grpo", "sdpo")}
    comparison = compare(experiment(primary="held_out"), runs)
    assert comparison.of("held_out") == []
    assert "no held-out evaluation" in verdict(comparison)[0]


def test_nothing_finished_is_said() -> None:
    comparison = compare(experiment(), {})
    assert comparison.horizon is None
    assert "no seed is finished in both" in verdict(comparison)[0]
    texts = notes(comparison, missing=16, parallel=1, configs={})
    assert texts[0].startswith("16 of 16 runs are not finished")


def test_notes_tell_what_makes_runs_unlike(checkout: Path) -> None:
    base = checkout / "configs" / "cpu_sync.toml"
    model = f"--model.path={checkout / 'assets' / 'tiny_policy'}"
    changes = (
        "--seed=1",
        "--environment.difficulty=hard",
        "--loop.groups_per_step=4",
        "--environment.workers=2",
    )
    same, harder, smaller, wider = (load(base, (model, change)) for change in changes)
    runs = flat([0.5] * 8)
    runs[0] = dataclasses.replace(runs[0], uncounted=30)  # of 8 x 50 rollouts
    comparison = compare(experiment(), {"grpo": runs, "sdpo": flat([0.5] * 8)})

    def told(config: Config, parallel: int = 1) -> str:
        return " ".join(notes(comparison, missing=0, parallel=parallel, configs={"a": same, "b": config}))

    assert "grpo: 30 training rollouts beside the 400 counted ones" in told(same)
    assert "do not have the same tasks" in told(harder)
    assert "do not have the same tasks" not in told(smaller) + told(wider)
    assert "size of a batch" in told(smaller)
    assert "3 runs ran at a time" in told(same, parallel=3)


def test_no_difference_is_not_called_equality() -> None:
    (text,) = verdict(draw(1, effect=0.0))
    assert text.startswith("No difference between sdpo and grpo is shown")
    assert "no proof that there is none" in text
    assert "80% power" in text


def test_the_curve_band_covers_what_all_seeds_have() -> None:
    runs = [result(0, [0.0, 0.2, 0.4]), result(1, [0.2, 0.4, 0.6, 0.8])]
    comparison = compare(experiment(), {"grpo": runs, "sdpo": runs})
    band = comparison.arms[0].band
    assert band is not None
    assert (band.rollouts[0], band.rollouts[-1]) == (10, 30)
    assert (band.mean[0], band.mean[-1]) == (pytest.approx(0.1), pytest.approx(0.5))
    assert (band.low[0], band.high[0]) == (0.0, pytest.approx(0.2))
