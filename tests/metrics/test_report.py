"""The run as a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from apps.report import main
from forge_composer.metrics.aggregate import evaluation_metrics, group_metrics
from forge_composer.metrics.sinks import JsonlSink
from forge_composer.metrics.summary import SummaryBuilder, write_summary
from forge_composer.metrics.timing import time_shares
from forge_composer.report.charts import Chart, Mark, Series, label, ticks
from forge_composer.report.html import charts, write_report
from forge_composer.traces.store import TraceWriter
from forge_composer.types import RolloutGroup, RolloutStatus
from tests.traces.rollout_fixtures import make_rollout


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of eight steps, as a run would leave it."""
    folder = tmp_path / "demo <run>"
    sink, builder = JsonlSink(folder / "metrics.jsonl"), SummaryBuilder(max_policy_lag=2)
    for step in (0, 8):
        metrics = evaluation_metrics([make_rollout(i, reward=float(i % 8 < step + 1)) for i in range(16)])
        sink.write("eval", step, metrics)
        builder.evaluation(step, metrics)
    with TraceWriter(folder / "traces" / "train.jsonl") as writer:
        for step in range(1, 9):
            rollouts = [make_rollout(8 * step + i, reward=float(i < step)) for i in range(8)]
            metrics = group_metrics([RolloutGroup(step, "t", 0, rollouts)], version=4)
            metrics |= {"loss/loss": 0.1 / step, "loss/entropy": 1.0, "time/step_s": 2.0, "time/train_s": 1.0}
            metrics |= {"time/wait_s": 0.5, "weights/logprob_diff_max": 1e-6}
            metrics |= time_shares(metrics)
            sink.write("step", step, metrics)
            builder.step(step, metrics)
            for rollout in rollouts:
                writer.append(rollout)
        bad = make_rollout(
            90, script=['<script>alert("x")</script> <b>'], reward=None, status=RolloutStatus.FAILED
        )
        writer.append(bad)
    write_summary(folder / "summary.json", builder.build(wall_s=20.0, status="completed"))
    return folder


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta", "line", "path", "circle", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("line", "path", "circle"):
            return
        assert self.open.pop() == tag


def test_page_is_whole_self_contained_and_escaped(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    text = (run_dir / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.links == []
    assert "script" not in page.tags
    assert "http" not in text.replace("https://", "http://").replace("http-equiv", "")
    assert "&lt;script&gt;alert" in text
    assert "<h1>demo &lt;run&gt;</h1>" in text
    assert page.tags.count("details") == 24
    assert page.tags.count("svg") >= 8


def test_page_shows_the_numbers(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    assert "0.56 → 0.56" in text  # mean of (1..8)/8 over all eight steps, both ends
    assert "0.12 → 1.00" in text  # held-out
    assert "step 8: held-out reward 1.000 [0.806, 1.000]" in text
    assert "add(2, 3): expected 5, got -1" in text
    assert "environment: gone" in text


def test_an_unfinished_run_has_a_page_too(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    trace = run_dir / "traces" / "train.jsonl"
    trace.write_bytes(trace.read_bytes()[:-40])
    text = write_report(run_dir).read_text()
    assert "there is no summary" in text
    assert "torn line" in text
    assert Page(text).tags.count("details") == 24


def test_no_run_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_charts_hold_the_metrics(run_dir: Path) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    drawn = {chart.title: chart for chart in charts(records)}
    assert drawn["Reward"].series[0].points == [(float(s), s / 8) for s in range(1, 9)]
    assert [mark.x for mark in drawn["Reward"].marks] == [0, 8]
    assert [y for _, y in drawn["Loss"].series[0].points] == pytest.approx([0.1 / s for s in range(1, 9)])
    assert [series.name for series in drawn["Policy lag"].series] == ["max", "mean"]
    assert "Gradient norm" not in drawn


def test_svg_places_points() -> None:
    chart = Chart(
        "t & u", [Series("a", [(0, 0.0), (1, 1.0), (2, None), (3, 0.5)])], [Mark(3, 0.5, 0.25, 0.75, "<m>")]
    )
    svg = ElementTree.fromstring(str(chart.svg()))
    path = svg.find("path")
    assert path is not None
    commands = re.findall(r"([ML])([\d.]+) ([\d.]+)", path.attrib["d"])
    assert [command for command, _, _ in commands] == ["M", "L", "M"]  # the gap is not bridged
    xs = [float(x) for _, x, _ in commands]
    ys = [float(y) for _, _, y in commands]
    assert (xs[1] - xs[0]) * 3 == pytest.approx(xs[2] - xs[0], abs=0.4)
    assert ys[0] > ys[2] > ys[1]  # y grows downwards
    assert ys[2] == pytest.approx((ys[0] + ys[1]) / 2, abs=0.2)
    assert "t &amp; u" in str(chart.svg())


def test_ticks_and_labels() -> None:
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-3, 17, 5) == pytest.approx([0, 5, 10, 15])
    assert ticks(2, 2, 5) == [2]
    assert [label(v) for v in (0, 0.25, 1e-6, 1500, 2e7)] == ["0", "0.25", "1e-6", "1500", "2e7"]
