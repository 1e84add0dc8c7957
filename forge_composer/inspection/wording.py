"""The words and numbers that terminal and page share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from forge_composer.inspection.records import LEVELS, NO_EFFECT, Inspection, Summary, TargetView

SUMMARY_COLUMNS = ("", "targets", "tokens", "JSD", "log p_T − log p_S", "teacher for the turn", "no effect")
"""Headings of the tables of `summary_rows`."""


def heading(inspection: Inspection) -> str:
    """What is shown, in a line."""
    settings = ", ".join(f"{name} = {value}" for name, value in inspection.settings.items())
    shown = len(inspection.shown)
    return (
        f"{inspection.run}: {shown} of {inspection.found} target{'s' if inspection.found != 1 else ''}, "
        f"{inspection.order}; policy: {inspection.model}; {settings}"
    )


def target_facts(view: TargetView) -> list[tuple[str, str]]:
    """(name, value) of what is known about a target."""
    target = view.target
    return [
        ("step", str(view.step)),
        ("kind", target.kind),
        ("source", target.source),
        ("rollout", target.rollout_id),
        ("turn", f"{target.turn + 1} of {view.rollout_turns}"),
        ("task", view.task_id),
        ("reward", "none" if view.reward is None else f"{view.reward:.2f}"),
        ("JSD", f"{view.jsd:.4f}"),
        ("log p_T − log p_S", f"{view.advantage:+.3f}"),
    ]


def summary_rows(inspection: Inspection) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Title and rows of each table of numbers; cells in the order of `SUMMARY_COLUMNS`."""
    if inspection.total is None:
        return []
    return [
        ("by kind", [*_rows(inspection.by_kind), _row("all", inspection.total)]),
        ("by source", [*_rows(inspection.by_source), _row("all", inspection.total)]),
    ]


def legend_edges() -> list[str]:
    """What each level of colour stands for, the first without any."""
    edges = [f"{edge:g}" for edge in LEVELS]
    spans = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
    return [f"under {edges[0]}", *spans, f"{edges[-1]} and more"]


def summary_note(inspection: Inspection) -> str:
    """What the columns of the summaries mean."""
    total = inspection.total
    measured = 0 if total is None else total.targets
    scope = f"Over the {measured} targets that were measured. " if measured > len(inspection.shown) else ""
    return (
        f"{scope}JSD and log p_T − log p_S are means over tokens, in nats; below 0 the hint speaks against "
        "what was sampled. Teacher for the turn: share of targets with a mean of log p_T − log p_S above 0. "
        f"No effect: share with a mean JSD under {NO_EFFECT:g}."
    )


def _rows(summaries: Mapping[str, Summary]) -> list[tuple[str, ...]]:
    return [_row(name, summary) for name, summary in summaries.items()]


def _row(name: str, summary: Summary) -> tuple[str, ...]:
    return (
        name,
        str(summary.targets),
        str(summary.tokens),
        f"{summary.jsd:.4f}",
        f"{summary.advantage:+.3f}",
        f"{summary.positive:.0%}",
        f"{summary.no_effect:.0%}",
    )
