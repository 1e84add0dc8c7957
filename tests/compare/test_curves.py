"""Reading run folders, smoothing, thresholds and areas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forge_composer.compare.curves import Curve, first_reaching, mean_over, read_run, run_status, smooth
from forge_composer.compare.experiment import SuccessSection

from .runs_made_up import write_run


def test_a_run_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, [0.1, 0.4, 0.7], held_out=0.75)
    run = read_run(folder, 3, SuccessSection())
    assert run.seed == 3
    assert run.curve.rollouts.tolist() == [10, 20, 30]
    assert run.curve.seconds.tolist() == [2, 4, 6]
    assert run.curve.values.tolist() == [0.1, 0.4, 0.7]
    assert (run.held_out, run.held_out_tasks, run.uncounted) == (0.75, 16, 0)
    assert run_status(folder) == ("completed", None)


def test_a_curve_of_evaluations_includes_the_one_before_training(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.1, 0.4], held_out=0.75)
    run = read_run(tmp_path / "run", 0, SuccessSection(metric="eval/reward_success_rate"))
    assert run.curve.rollouts.tolist() == [0, 20]
    assert run.curve.values.tolist() == [0.1, 0.75]


def test_rollouts_of_skipped_batches_count(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.1, 0.4], more={"rollout/skipped": 5.0, "time/skipped_s": 1.0})
    run = read_run(tmp_path / "run", 0, SuccessSection())
    assert run.curve.rollouts.tolist() == [15, 30]
    assert run.curve.seconds.tolist() == [3, 6]


def test_rollouts_that_no_step_counts_are_told(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.1, 0.4], summary={"rollouts": 20 + 32 + 7})
    assert read_run(tmp_path / "run", 0, SuccessSection()).uncounted == 7


def test_a_wrong_metric_names_the_near_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.1])
    with pytest.raises(ValueError, match="there are reward/success_rate"):
        read_run(tmp_path / "run", 0, SuccessSection(metric="reward/succes"))


def test_no_summary_and_a_torn_one_have_no_status(tmp_path: Path) -> None:
    assert run_status(tmp_path) == (None, None)
    (tmp_path / "summary.json").write_text('{"status": "comp')
    assert run_status(tmp_path) == (None, None)


def curve(*values: float) -> Curve:
    steps = np.arange(1, len(values) + 1, dtype=np.float64)
    return Curve(10 * steps, steps, np.asarray(values))


def test_smoothing_is_a_trailing_mean_of_full_windows() -> None:
    smoothed = smooth(curve(0.0, 0.3, 0.6, 0.9), 3)
    assert smoothed.values == pytest.approx([0.3, 0.6])
    assert smoothed.rollouts.tolist() == [30, 40]
    assert smoothed.seconds.tolist() == [3, 4]
    short = smooth(curve(0.2, 0.4), 5)
    assert short.values == pytest.approx([0.3])
    assert short.rollouts.tolist() == [20]


def test_first_reaching() -> None:
    x = np.array([10.0, 20.0, 30.0, 40.0])
    assert first_reaching(x, np.array([0.1, 0.8, 0.2, 0.9]), 0.8) == 20
    assert first_reaching(x, np.array([0.1, 0.2, 0.3, 0.4]), 0.8) is None
    assert first_reaching(x[:1], smooth(curve(*[0.8] * 5), 5).values, 0.8) == 10  # 0.8 but for rounding


def test_mean_over_by_hand() -> None:
    x, values = np.array([0.0, 10.0, 20.0]), np.array([0.0, 1.0, 1.0])
    assert mean_over(x, values, 0, 20) == pytest.approx(0.75)
    assert mean_over(x, values, 0, 10) == pytest.approx(0.5)
    assert mean_over(x, values, 5, 15) == pytest.approx((0.375 * 10 + 5 - 0.0) / 10)
    assert mean_over(x, values, 10, 30) == pytest.approx(1.0)  # constant beyond its last point
    assert mean_over(x, values, 5, 5) == pytest.approx(0.5)
