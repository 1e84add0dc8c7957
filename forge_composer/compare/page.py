"""A comparison as one self-contained HTML page with interactive plots."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from forge_composer.compare.analysis import Arm, Comparison
from forge_composer.compare.curves import smooth
from forge_composer.compare.endpoints import TITLES
from forge_composer.compare.output import (
    ARM_COLUMNS,
    DIFFERENCE_COLUMNS,
    Account,
    arm_rows,
    difference_rows,
)
from forge_composer.report import plots
from forge_composer.report.templates import fill_page


def render_page(account: Account) -> str:
    """The page as text. It needs no network: plotly's script is in it (about 5 MB)."""
    comparison = account.comparison
    figures = [
        ("Learning curves", _curves(comparison)),
        ("Rollouts to the threshold, by seed", _times(comparison)),
        (f"Difference from {comparison.experiment.baseline}, by seed", _differences(comparison)),
    ]
    return fill_page(
        "forge_composer.compare",
        name=comparison.experiment.name,
        heading=account.heading,
        verdict=account.verdict,
        plots=plots.sections(figures),
        tables=[
            ("Arms", ARM_COLUMNS, arm_rows(comparison)),
            ("Differences", DIFFERENCE_COLUMNS, difference_rows(comparison)),
        ],
        notes=account.notes,
    )


def _curves(comparison: Comparison) -> go.Figure:
    """Mean and 95% band of each arm; the seeds' own curves come with a click in the legend."""
    success = comparison.experiment.success
    figure = _figure("training rollouts", f"{success.metric}, mean of {success.smoothing} points")
    for index, arm in enumerate(comparison.arms):
        if arm.band is None:
            continue
        colour = plots.colour(index)
        x = arm.band.rollouts.tolist()
        if len(arm.seeds) > 1:
            edge = arm.band.high.tolist() + arm.band.low.tolist()[::-1]
            band = {
                "mode": "lines",
                "fill": "toself",
                "fillcolor": colour,
                "opacity": 0.18,
                "line": {"width": 0},
            }
            figure.add_scatter(
                x=x + x[::-1], y=edge, legendgroup=arm.name, showlegend=False, hoverinfo="skip", **band
            )
        figure.add_scatter(
            x=x,
            y=arm.band.mean.tolist(),
            name=arm.name,
            legendgroup=arm.name,
            line={"color": colour},
            mode="lines" if len(x) > 1 else "markers",
        )
        _seed_curves(figure, arm, success.smoothing, colour)
    figure.add_hline(y=success.threshold, line={"dash": "dot", "color": "#888", "width": 1})
    return figure


def _seed_curves(figure: go.Figure, arm: Arm, smoothing: int, colour: str) -> None:
    x: list[float | None] = []
    y: list[float | None] = []
    for result in arm.results:
        curve = smooth(result.curve, smoothing)
        x += [*curve.rollouts.tolist(), None]
        y += [*curve.values.tolist(), None]
    line = {"color": colour, "width": 1}
    figure.add_scatter(
        x=x, y=y, name=f"{arm.name}, seeds", line=line, opacity=0.5, mode="lines", visible="legendonly"
    )


def _times(comparison: Comparison) -> go.Figure:
    """A dot for each seed that reached the threshold, a triangle at the limit for one that did not."""
    figure = _figure("training rollouts", None)
    for index, arm in enumerate(comparison.arms):
        values = arm.values["rollouts_to_threshold"]
        reached = [seed in values.reached for seed in values.by_seed]
        words = ["reached" if found else "not reached by then" for found in reached]
        figure.add_scatter(
            x=values.numbers,
            y=[arm.name] * len(reached),
            mode="markers",
            showlegend=False,
            marker={
                "color": plots.colour(index),
                "size": 10,
                "symbol": ["circle" if found else "triangle-right-open" for found in reached],
            },
            text=[f"seed {seed}: {word}" for seed, word in zip(values.by_seed, words, strict=True)],
            hovertemplate="%{text}, %{x:,.0f} rollouts<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed")
    return figure


def _differences(comparison: Comparison) -> go.Figure:
    """The primary endpoint: paired differences as dots, their mean with its interval as a bar."""
    endpoint = comparison.experiment.primary
    figure = _figure(TITLES[endpoint], None)
    names = [arm.name for arm in comparison.arms]
    for difference in comparison.of(endpoint):
        colour = plots.colour(names.index(difference.arm))
        figure.add_scatter(
            x=list(difference.by_seed.values()),
            y=[difference.arm] * len(difference.by_seed),
            mode="markers",
            showlegend=False,
            marker={"color": colour, "size": 8, "opacity": 0.45},
            text=[f"seed {seed}" for seed in difference.by_seed],
            hovertemplate="%{text}: %{x:.4g}<extra></extra>",
        )
        mean, interval = difference.interval.mean, difference.interval
        bar = {"type": "data", "symmetric": False, "thickness": 2, "color": colour}
        spread = {"array": [interval.high - mean], "arrayminus": [mean - interval.low]}
        figure.add_scatter(
            x=[mean],
            y=[difference.arm],
            mode="markers",
            showlegend=False,
            marker={"color": colour, "size": 13, "symbol": "diamond"},
            error_x=bar | spread if interval.n > 1 else None,
            hovertemplate="mean: %{x:.4g}<extra></extra>",
        )
    figure.add_vline(x=0, line={"dash": "dot", "color": "#888", "width": 1})
    figure.update_yaxes(autorange="reversed")
    return figure


def _figure(x_title: str, y_title: str | None) -> Any:
    return plots.figure(x_title, y_title, height=420, top=20)
