"""Small charts as inline SVG: no script, no network, sharp at any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 26
_COLOURS = 6
"""Colours `--c0` ... that the page's style sheet defines."""


@dataclass(slots=True)
class Series:
    """A line: `points` are (x, y); a y of None interrupts the line."""

    name: str
    points: list[tuple[float, float | None]]

    @property
    def present(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [(x, y) for x, y in self.points if y is not None]


@dataclass(slots=True)
class Mark:
    """A single point with an interval, drawn as a dot with a bar."""

    x: float
    y: float
    low: float
    high: float
    label: str


@dataclass(slots=True)
class Chart:
    """A titled chart of lines and marks over the steps of the run."""

    title: str
    series: list[Series]
    marks: list[Mark] = field(default_factory=list)
    marks_name: str = ""
    note: str = ""

    @property
    def empty(self) -> bool:
        """True if there is nothing to draw."""
        return not self.marks and not any(series.present for series in self.series)

    def svg(self) -> Markup:
        """The chart as an SVG element."""
        frame = _Frame.around(self)
        parts = [frame.axes()]
        for index, series in enumerate(self.series):
            parts.append(_line(frame, series, index % _COLOURS))
        parts += [_mark(frame, mark) for mark in self.marks]
        return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
            WIDTH, HEIGHT, self.title, Markup("").join(parts)
        )

    def legend(self) -> Markup:
        """The names of the lines with their colours."""
        items = [
            Markup('<span class="key"><i style="background:var(--c{})"></i>{}</span>').format(
                index % _COLOURS, series.name
            )
            for index, series in enumerate(self.series)
            if series.present
        ]
        if self.marks:
            items.append(Markup('<span class="key"><i class="dot"></i>{}</span>').format(self.marks_name))
        return Markup("").join(items)


@dataclass(slots=True)
class _Frame:
    """Maps data to the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, chart: Chart) -> _Frame:
        xs = [x for series in chart.series for x, _ in series.present] + [mark.x for mark in chart.marks]
        ys = [y for series in chart.series for _, y in series.present]
        ys += [edge for mark in chart.marks for edge in (mark.low, mark.high)]
        x0, x1 = min(xs, default=0.0), max(xs, default=1.0)
        y0, y1 = min(ys, default=0.0), max(ys, default=1.0)
        if 0 < y0 < 0.5 * y1:
            y0 = 0.0
        pad = 0.05 * (y1 - y0) or 0.5 * abs(y1) or 1.0
        return cls(x0, x1 if x1 > x0 else x0 + 1, 0.0 if y0 == 0 else y0 - pad, y1 + pad)

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(
            HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - _TOP - _BOTTOM), 1
        )

    def axes(self) -> Markup:
        parts = []
        for tick in ticks(self.y0, self.y1, 5):
            parts.append(
                Markup(
                    '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
                    '<text x="{}" y="{}" text-anchor="end">{}</text>'
                ).format(
                    _LEFT,
                    WIDTH - _RIGHT,
                    self.y(tick),
                    self.y(tick),
                    _LEFT - 6,
                    self.y(tick) + 4,
                    label(tick),
                )
            )
        for tick in ticks(self.x0, self.x1, 8):
            if tick == round(tick):
                parts.append(
                    Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(
                        self.x(tick), HEIGHT - 8, label(tick)
                    )
                )
        return Markup("").join(parts)


def _line(frame: _Frame, series: Series, colour: int) -> Markup:
    path, drawing = [], False
    for x, y in series.points:
        if y is None:
            drawing = False
            continue
        path.append(f"{'L' if drawing else 'M'}{frame.x(x)} {frame.y(y)}")
        drawing = True
    parts = [Markup('<path d="{}" style="stroke:var(--c{})"/>').format(" ".join(path), colour)]
    for x, y in series.present:
        text = f"step {label(x)}: {series.name} {y:.4g}"
        parts.append(
            Markup('<circle class="hit" cx="{}" cy="{}" r="4"><title>{}</title></circle>').format(
                frame.x(x), frame.y(y), text
            )
        )
    return Markup("").join(parts)


def _mark(frame: _Frame, mark: Mark) -> Markup:
    x = frame.x(mark.x)
    return Markup(
        '<g class="mark"><title>{}</title><line x1="{}" x2="{}" y1="{}" y2="{}"/>'
        '<circle cx="{}" cy="{}" r="4.5"/></g>'
    ).format(escape(mark.label), x, x, frame.y(mark.low), frame.y(mark.high), x, frame.y(mark.y))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between low and high, at most `most` of them (1, 2 or 5 times a power of ten apart)."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)][: most + 1]


def label(value: float) -> str:
    """A number as short as an axis wants it."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def histogram(title: str, counts: Sequence[tuple[str, float]]) -> Markup:
    """Horizontal bars with their share of the total."""
    total = sum(count for _, count in counts) or 1.0
    largest = max((count for _, count in counts), default=1.0) or 1.0
    rows = [
        Markup(
            '<tr><th>{}</th><td class="bar"><i style="width:{:.1f}%"></i></td><td>{:.1%}</td></tr>'
        ).format(name, 100 * count / largest, count / total)
        for name, count in counts
    ]
    return Markup('<table class="bars" aria-label="{}">{}</table>').format(title, Markup("").join(rows))
