"""Files, summary and terminal."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forge_composer.metrics.display import LiveDisplay, PlainDisplay, make_display, sparkline
from forge_composer.metrics.sinks import JsonlSink, TensorBoardSink, read_metrics, without_times
from forge_composer.metrics.summary import SummaryBuilder, closing_line, duration, write_summary


def test_jsonl_is_sorted_finite_and_flushed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.write("step", 1, {"b/x": 2.0, "a/y": math.nan, "time/z": 0.5})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (
        '{"kind": "step", "step": 1, "a/y": null, "b/x": 2.0, "time/z": 0.5}\n'
    )
    sink.write("eval", 1, {"eval/reward_mean": 0.5})
    sink.close()
    records = list(read_metrics(sink.path))
    assert [record["kind"] for record in records] == ["step", "eval"]
    assert without_times(records[0]) == {"kind": "step", "step": 1, "a/y": None, "b/x": 2.0}


def test_an_interrupted_metrics_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    assert list(read_metrics(path)) == [{"kind": "step", "step": 1}]
    path.write_text('{"kind": "st\n{"kind": "step", "step": 1}\n')
    with pytest.raises(ValueError, match=rf"{path}:1: not JSON"):
        list(read_metrics(path))


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write("step", 1, {"reward/mean": 0.25, "loss/loss": math.inf})
    sink.write("step", 2, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["scalars"] == ["reward/mean"]


def test_tensorboard_does_not_load_torch() -> None:
    code = (
        "import sys, tempfile\nfrom forge_composer.metrics.sinks import TensorBoardSink\n"
        "sink = TensorBoardSink(tempfile.mkdtemp())\nsink.write('step', 1, {'a': 1.0})\nsink.close()\n"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def step_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 100,
        "rollout/count": 16.0,
        "time/step_s": 4.0,
        "lag/tokens_0": 90.0,
        "lag/tokens_1": 10.0,
        "lag/max": 1.0,
        "weights/logprob_diff_max": 1e-6 * step,
    }


def evaluation(mean: float) -> dict[str, float]:
    return {
        "eval/reward_mean": mean,
        "eval/reward_low": mean - 0.1,
        "eval/reward_high": mean + 0.1,
        "eval/reward_success_rate": mean,
        "eval/scored": 32.0,
    }


def test_summary(tmp_path: Path) -> None:
    builder = SummaryBuilder(max_policy_lag=2)
    builder.evaluation(0, evaluation(0.25))
    for step in range(1, 31):
        for _ in range(16):
            builder.rollout()
        builder.step(step, step_metrics(step))
    builder.evaluation(15, evaluation(0.4))
    builder.evaluation(30, evaluation(0.75))
    summary = builder.build(wall_s=150.0, status="completed")
    write_summary(tmp_path / "summary.json", summary)
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read == summary
    assert read["reward_first10"] == pytest.approx(0.055)
    assert read["reward_last10"] == pytest.approx(0.255)
    assert (read["eval_before"], read["eval_before_interval"]) == (0.25, [0.15, 0.35])
    assert (read["eval_after"], read["eval_after_interval"]) == (0.75, [0.65, 0.85])
    assert read["evaluations"][-1] == {
        "step": 30, "mean": 0.75, "low": 0.65, "high": 0.85, "success_rate": 0.75, "n": 32
    }  # fmt: skip
    assert (read["steps"], read["rollouts"], read["status"]) == (30, 480, "completed")
    assert (read["max_policy_lag"], read["policy_lag_seen_max"]) == (2, 1)
    assert read["policy_lag_histogram"] == {"0": 2700, "1": 300}
    assert read["logprob_diff_max"] == pytest.approx(3e-5)
    assert read["rollouts_per_s"] == pytest.approx(4.0)
    assert (read["teacher_calls"], read["teacher_cost_usd"]) == (0, 0.0)
    assert closing_line(read, "runs/x") == (
        "reward 0.055 -> 0.255 (first and last 10 steps); held-out 0.250 [0.150, 0.350] -> "
        "0.750 [0.650, 0.850]; 30 steps, 480 rollouts in 2 min 30 s; everything is in runs/x"
    )


def test_summary_of_a_run_that_did_nothing() -> None:
    summary = SummaryBuilder(max_policy_lag=0).build(wall_s=3.2)
    for key in ("reward_first10", "eval_before", "eval_after", "policy_lag_seen_max", "logprob_diff_max"):
        assert summary[key] is None
    assert summary["rollouts_per_s"] is None
    assert closing_line(summary, "runs/x") == "0 steps, 0 rollouts in 3 s; everything is in runs/x"


def test_a_nan_difference_is_not_lost_in_the_maximum() -> None:
    builder = SummaryBuilder(max_policy_lag=0)
    builder.step(1, {"weights/logprob_diff_max": math.nan})
    builder.step(2, {"weights/logprob_diff_max": 1e-6})
    assert builder.build(wall_s=1.0)["logprob_diff_max"] is None


def test_duration() -> None:
    assert [duration(s) for s in (0.4, 59.6, 312, 7380)] == ["0 s", "1 min 0 s", "5 min 12 s", "2 h 3 min"]


def test_plain_display_is_a_line_a_step() -> None:
    stream = io.StringIO()
    display = make_display("auto", total_steps=100, name="demo", stream=stream)
    assert isinstance(display, PlainDisplay)
    display.evaluation(0, evaluation(0.25))
    display.step(7, step_metrics(7) | {"time/tokens_per_s": 1234.0, "reward/success_rate": 0.07})
    display.warn("careful")
    display.close("done")
    assert stream.getvalue().splitlines() == [
        "evaluation at step 0: reward 0.250 [0.150, 0.350] on 32 tasks",
        "step   7/100  reward 0.070  success 7%  lag 1  tokens/s 1,234  logprob diff 7.0e-06"
        "  left 6 min 12 s",
        "warning: careful",
        "done",
    ]


def test_off_shows_warnings_and_the_end_only() -> None:
    stream = io.StringIO()
    display = make_display("off", total_steps=10, name="demo", stream=stream)
    display.phase("starting")
    display.step(1, step_metrics(1))
    display.evaluation(1, evaluation(0.5))
    display.warn("careful")
    display.close("done")
    assert stream.getvalue() == "warning: careful\ndone\n"


def test_live_display_shows_the_latest_numbers() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    display = LiveDisplay(20, "demo", console)
    display.evaluation(0, evaluation(0.25))
    for step in range(1, 6):
        display.step(step, step_metrics(step))
    display.warn("careful")
    display.close("the end")
    text = stream.getvalue()
    for shown in (
        "5 of 20",
        "0.050",
        sparkline(deque(s / 100 for s in range(1, 6))),
        "reward 0.250 [0.150, 0.350]",
        "1 min 0 s",
        "warning: careful",
        "the end",
    ):
        assert shown in text, shown


def test_sparkline() -> None:
    values: Any = deque([0.0, 0.5, 1.0])
    assert sparkline(values) == "▁▅█"
    assert sparkline(deque([0.3, 0.3])) == "▁▁"
