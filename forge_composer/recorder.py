"""What a run leaves behind: config, traces, metrics, summary, report; and what the terminal shows.

The run folder::

    config.toml          the resolved config
    traces/*.jsonl       every episode, as an ATIF trajectory
    targets.jsonl        the turns that were distilled, with their hints (SDPO channel)
    pairs.jsonl          preference pairs, with all that they were made from (trace-replay channel)
    ledger.sqlite        every call to a teacher, and what it cost (trace-replay channel)
    metrics.jsonl        one record a step and an evaluation; tensorboard/ holds the same
    summary.json         the run in a few numbers
    report.html          the run as a page
    checkpoints/  logs/  as the other parts write them
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from forge_composer.config import Config, dump_toml
from forge_composer.hints.records import Target
from forge_composer.hints.samples import write_targets
from forge_composer.metrics.aggregate import evaluation_metrics
from forge_composer.metrics.display import make_display
from forge_composer.metrics.sinks import JsonlSink, MetricsSink, TensorBoardSink
from forge_composer.metrics.summary import SummaryBuilder, closing_line, write_summary
from forge_composer.metrics.timing import throughput, time_shares
from forge_composer.preferences.export import PairWriter
from forge_composer.preferences.records import PreferencePair
from forge_composer.report.html import write_report
from forge_composer.traces.store import TraceWriter
from forge_composer.types import Rollout

Status = Literal["completed", "interrupted", "failed"]


class RunRecorder:
    """Makes the run folder and writes to it; `close` ends it with a summary, however the run ended."""

    def __init__(self, config: Config) -> None:
        self.folder = config.output_dir
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
        self._began = time.monotonic()
        self._name = config.name
        self._trace_options: dict[str, Any] = {
            "run": config.name,
            "model": config.model.path.name,
            "sampling": config.generator.sampling.model_dump(),
        }
        self._traces: dict[str, TraceWriter] = {}
        self._pairs: PairWriter | None = None
        self._sinks: list[MetricsSink] = [JsonlSink(self.folder / "metrics.jsonl")]
        if config.metrics.tensorboard:
            self._sinks.append(TensorBoardSink(self.folder / "tensorboard"))
        self._summary = SummaryBuilder(max_policy_lag=config.loop.max_policy_lag)
        self._display = make_display(config.metrics.display, total_steps=config.loop.steps, name=config.name)
        self._start_seconds: dict[str, float] = {}

    def phase(self, text: str) -> None:
        """Say what the run is doing."""
        self._display.phase(text)

    def started(self, seconds: Mapping[str, float]) -> None:
        """The processes are up; `seconds` that each role took."""
        self._start_seconds = dict(seconds)
        parts = ", ".join(f"{role} {value:.0f} s" for role, value in sorted(seconds.items()))
        self._display.phase(f"processes are up ({parts})")

    def rollout(self, rollout: Rollout) -> None:
        """Append a finished rollout to the trace of its split."""
        if rollout.split not in self._traces:
            path = self.folder / "traces" / f"{rollout.split}.jsonl"
            self._traces[rollout.split] = TraceWriter(path, **self._trace_options)
        self._traces[rollout.split].append(rollout)
        self._summary.rollout()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record one optimizer step."""
        metrics = metrics | time_shares(metrics) | throughput(metrics)
        for sink in self._sinks:
            sink.write("step", step, metrics)
        self._summary.step(step, metrics)
        self._display.step(step, metrics)

    def evaluation(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Record an evaluation."""
        metrics = evaluation_metrics(rollouts)
        for sink in self._sinks:
            sink.write("eval", step, metrics)
        self._summary.evaluation(step, metrics)
        self._display.evaluation(step, metrics)

    def targets(self, step: int, targets: Sequence[Target]) -> None:
        """Append the targeted turns of a step, with their hints, to `targets.jsonl`."""
        write_targets(self.folder / "targets.jsonl", step, targets)

    def pairs(self, pairs: Sequence[PreferencePair]) -> None:
        """Append preference pairs to `pairs.jsonl`."""
        if self._pairs is None:
            self._pairs = PairWriter(self.folder / "pairs.jsonl")
        for pair in pairs:
            self._pairs.append(pair)

    def warn(self, message: str) -> None:
        """Tell the user, and keep it in the run folder."""
        self._display.warn(message)
        with (self.folder / "warnings.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def close(self, status: Status, reason: str | None = None) -> dict[str, Any]:
        """Write summary and report, close the files, and print the closing line. Returns the summary."""
        for trace in self._traces.values():
            trace.close()
        if self._pairs is not None:
            self._pairs.close()
        for sink in self._sinks:
            sink.close()
        summary = self._summary.build(
            wall_s=time.monotonic() - self._began,
            status=status,
            reason=reason,
            start_s=self._start_seconds,
        )
        write_summary(self.folder / "summary.json", summary)
        write_report(self.folder)
        line = closing_line(summary, self.folder)
        if status != "completed":
            line = f"{status}{': ' + reason if reason else ''}\n{line}"
        self._display.close(line)
        return summary
