"""Interactive plots of pages that need no network: plotly's script is in the first one (about 5 MB)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go
import plotly.io
from markupsafe import Markup

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
_CONFIG = {"displaylogo": False, "responsive": True}


def colour(index: int) -> str:
    """The colour of the series with this number; they come round again."""
    return COLOURS[index % len(COLOURS)]


def figure(x_title: str | None, y_title: str | None, *, height: int, top: int) -> Any:
    """An empty plot of our look; `height` and the margin at the `top` in pixels."""
    margin = {"l": 60, "r": 20, "t": top, "b": 50}
    empty = go.Figure(layout={"template": "plotly_white", "margin": margin, "height": height})
    empty.update_xaxes(title=x_title)
    empty.update_yaxes(title=y_title)
    return empty


def sections(titled: Iterable[tuple[str, go.Figure]]) -> list[tuple[str, Markup]]:
    """Titles and plots as markup, in the order in which they have to stand on the page."""
    return [
        (
            title,
            Markup(plotly.io.to_html(plot, full_html=False, include_plotlyjs=not index, config=_CONFIG)),
        )
        for index, (title, plot) in enumerate(titled)
    ]
