"""A report as one self-contained HTML page with interactive plots."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from forge_composer.replay_report.report import Report
from forge_composer.replay_report.tables import notes, tables, verdict
from forge_composer.report import plots
from forge_composer.report.templates import fill_page

_BINS = 40
_MOST_BAD_LINES = 50


def render_page(report: Report) -> str:
    """The page as text. It needs no network: plotly's script is in it (about 5 MB)."""
    figures = [
        ("Latency of a call by teacher", _latencies(report)),
        ("Cost by teacher", _costs(report)),
        ("Agreement by teacher pair", _agreement(report)),
        ("Pairs a trace", _pairs(report)),
    ]
    return fill_page(
        "forge_composer.replay_report",
        name=report.settings.name,
        verdict=verdict(report),
        holds=report.holds,
        tables=[table for table in tables(report) if table[2]],
        plots=plots.sections(figures),
        notes=notes(report),
        bad_lines=[str(line) for line in report.gathered.bad_lines[:_MOST_BAD_LINES]],
    )


def _latencies(report: Report) -> go.Figure:
    figure = _figure("seconds, retries included", "calls")
    longest = max((max(numbers.latencies, default=0.0) for numbers in report.teachers), default=0.0)
    for index, numbers in enumerate(report.teachers):
        figure.add_histogram(
            x=list(numbers.latencies),
            name=numbers.name,
            opacity=0.6,
            marker_color=plots.colour(index),
            xbins={"start": 0.0, "end": longest * 1.0001 or 1.0, "size": (longest or 1.0) / _BINS},
        )
    figure.update_layout(barmode="overlay")
    if report.latency is not None:
        words = f"p95 of a step: {report.latency.p95:.3g} s"
        figure.add_vline(x=report.latency.p95, line={"dash": "dot", "color": "#888"}, annotation_text=words)
    return figure


def _costs(report: Report) -> go.Figure:
    figure = _figure("USD", None)
    total = report.account.cost_usd
    for index, numbers in enumerate(report.teachers):
        cost = numbers.account.cost_usd
        figure.add_bar(
            x=[cost],
            y=[numbers.name],
            orientation="h",
            showlegend=False,
            marker_color=plots.colour(index),
            text=[f"{cost / total:.1%}" if total else ""],
            hovertemplate="%{y}: %{x:.6f} USD<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed")
    return figure


def _agreement(report: Report) -> go.Figure:
    """Share of the steps where two teachers say the same; hovering gives kappa."""
    names = [numbers.name for numbers in report.teachers]
    rates: list[list[float | None]] = [[None] * len(names) for _ in names]
    words = [[""] * len(names) for _ in names]
    for pair in report.opinions.pairs:
        for one, other in ((pair.one, pair.other), (pair.other, pair.one)):
            row, column = names.index(one), names.index(other)
            rates[row][column] = pair.rate
            words[row][column] = f"{pair.rate:.0%}<br>kappa {pair.kappa:.2f}"
    figure = _figure(None, None)
    figure.add_heatmap(
        z=rates,
        x=names,
        y=names,
        text=words,
        texttemplate="%{text}",
        zmin=0,
        zmax=1,
        colorscale="Blues",
        hovertemplate="%{x} and %{y}: %{text}<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def _pairs(report: Report) -> go.Figure:
    counts = list(report.pairs.by_trace.values())
    figure = _figure("pairs", "traces")
    figure.add_histogram(x=counts, marker_color=plots.COLOURS[0], showlegend=False, xbins={"size": 1})
    limit = report.settings.replay.limits.pairs_per_trace
    figure.add_vline(
        x=limit, line={"dash": "dot", "color": "#888"}, annotation_text=f"limit of the mean {limit:g}"
    )
    return figure


def _figure(x_title: str | None, y_title: str | None) -> Any:
    plot = plots.figure(x_title, y_title, height=380, top=30)
    plot.update_yaxes(automargin=True)
    return plot
