"""The terminal view of a run: a live panel, plain lines, or nothing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge_composer.metrics.aggregate import lookup
from forge_composer.metrics.summary import duration

Mode = Literal["auto", "live", "plain", "off"]

_BARS = "▁▂▃▄▅▆▇█"
_WINDOW = 10
_TREND = 40


class Display(Protocol):
    """What the recorder tells the terminal."""

    def phase(self, text: str) -> None:
        """Say what the run is doing now."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation."""
        ...

    def warn(self, message: str) -> None:
        """Show a warning; it stays visible."""
        ...

    def close(self, line: str | None = None) -> None:
        """End the view, with a closing line."""
        ...


def make_display(mode: Mode, *, total_steps: int, name: str, stream: TextIO | None = None) -> Display:
    """The display of a mode; `auto` is `live` on a terminal and `plain` elsewhere.

    Args:
        mode: see `MetricsConfig.display`.
        total_steps: steps of the run.
        name: name of the run.
        stream: where to write; standard output if None.
    """
    target = stream or sys.stdout
    if mode == "auto":
        mode = "live" if target.isatty() else "plain"
    match mode:
        case "live":
            return LiveDisplay(total_steps, name, Console(file=target))
        case "plain":
            return PlainDisplay(total_steps, target)
        case "off":
            return SilentDisplay(target)


class Pace:
    """Estimates the time that is left from the latest steps."""

    def __init__(self, total_steps: int) -> None:
        self.total = total_steps
        self._seconds: deque[float] = deque(maxlen=2 * _WINDOW)
        self._step = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a step's wall time."""
        self._step = step
        if "time/step_s" in metrics:
            self._seconds.append(metrics["time/step_s"])

    @property
    def left(self) -> float | None:
        """Seconds to the last step; None before the first."""
        if not self._seconds:
            return None
        return max(0, self.total - self._step) * sum(self._seconds) / len(self._seconds)


class SilentDisplay:
    """Warnings and the closing line, nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def phase(self, text: str) -> None:
        """Nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def warn(self, message: str) -> None:
        """Print the warning."""
        self._line(f"warning: {message}")

    def close(self, line: str | None = None) -> None:
        """Print the closing line."""
        if line is not None:
            self._line(line)

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class PlainDisplay(SilentDisplay):
    """One line a step."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        super().__init__(stream)
        self._pace = Pace(total_steps)
        self._width = len(str(total_steps))

    def phase(self, text: str) -> None:
        """Print the phase."""
        self._line(f"... {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a step in one line."""
        self._pace.step(step, metrics)
        head = f"step {step:>{self._width}}/{self._pace.total}"
        self._line("  ".join([head, *(f"{name} {value}" for name, value in headline(metrics, self._pace))]))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print an evaluation in one line."""
        self._line(evaluation_line(step, metrics))


class LiveDisplay:
    """A panel that is redrawn in place; warnings and evaluations scroll above it."""

    def __init__(self, total_steps: int, name: str, console: Console) -> None:
        self._name = name
        self._pace = Pace(total_steps)
        self._began = time.monotonic()
        self._phase = "starting"
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=_TREND)
        self._evaluations: deque[str] = deque(maxlen=3)
        self._live = Live(
            console=console, refresh_per_second=2, get_renderable=self._panel, redirect_stdout=False
        )
        self._live.start()

    def phase(self, text: str) -> None:
        """Show the phase in the panel's title."""
        self._phase = text

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's metrics in place of the last one's."""
        self._pace.step(step, metrics)
        self._phase = "training"
        self._step, self._metrics = step, dict(metrics)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the evaluation in the panel."""
        self._evaluations.append(evaluation_line(step, metrics))

    def warn(self, message: str) -> None:
        """Print the warning above the panel."""
        self._live.console.print(Text(f"warning: {message}", style="yellow"))

    def close(self, line: str | None = None) -> None:
        """Leave the last panel on the screen and print the closing line under it."""
        self._live.stop()
        if line is not None:
            self._live.console.print(Text(line, style="bold"))

    def _panel(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        total = self._pace.total
        bar: Any = ProgressBar(total=total, completed=self._step, width=40)
        table.add_row("step", Group(Text(f"{self._step} of {total}"), bar))
        for name, value in headline(self._metrics, self._pace):
            table.add_row(name, value)
        if self._rewards:
            table.add_row("trend", Text(sparkline(self._rewards), style="green"))
        for text in self._evaluations:
            table.add_row("held-out", text)
        elapsed = duration(time.monotonic() - self._began)
        return Panel(table, title=f"{self._name}: {self._phase}", subtitle=elapsed, expand=False)


def headline(metrics: Mapping[str, float], pace: Pace) -> list[tuple[str, str]]:
    """The few numbers that a terminal shows, as (name, text); what was not measured is left out."""
    shown: list[tuple[str, str]] = []
    for name, key, form in [
        ("reward", "reward/mean", "{:.3f}"),
        ("success", "reward/success_rate", "{:.0%}"),
        ("lag", "lag/max", "{:.0f}"),
        ("tokens/s", "time/tokens_per_s", "{:,.0f}"),
        ("entropy", "entropy", "{:.3f}"),
        ("logprob diff", "logprob_diff_max", "{:.1e}"),
    ]:
        value = lookup(metrics, key)
        if value is not None:
            shown.append((name, form.format(value)))
    if pace.left is not None:
        shown.append(("left", duration(pace.left)))
    return shown


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """An evaluation in one line, with its confidence interval."""
    if "eval/reward_mean" not in metrics:
        return f"evaluation at step {step}: no episode could be scored"
    return (
        f"evaluation at step {step}: reward {metrics['eval/reward_mean']:.3f} "
        f"[{metrics['eval/reward_low']:.3f}, {metrics['eval/reward_high']:.3f}] "
        f"on {metrics['eval/scored']:.0f} tasks"
    )


def sparkline(values: deque[float]) -> str:
    """The values as a row of bars, scaled to their own range."""
    low, high = min(values), max(values)
    span = high - low
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1)) if span > 0 else 0] for value in values
    )
