"""An inspection as one HTML page: no script, nothing loaded, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_composer._files import write_whole
from forge_composer.inspection.records import Inspection, TargetView, TokenView, Unaligned
from forge_composer.inspection.text import marked, visible
from forge_composer.inspection.wording import (
    SUMMARY_COLUMNS,
    heading,
    legend_edges,
    summary_note,
    summary_rows,
    target_facts,
)
from forge_composer.report.templates import fill_page

LONGEST_TEXT = 20_000
"""Characters of a context that the page shows; what is furthest from the hint is left out."""


def write_page(inspection: Inspection, file: Path) -> None:
    """Write the page; it is there as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(file, render_page(inspection), errors="replace")


def render_page(inspection: Inspection) -> str:
    """The page as text."""
    return fill_page(
        "forge_composer.inspection",
        filters={"visible": visible, "marked": marked},
        name=inspection.run.resolve().name,
        heading=heading(inspection),
        edges=legend_edges(),
        targets=[_target(view) for view in inspection.shown],
        unaligned=[_unaligned(one) for one in inspection.unaligned],
        summary_columns=SUMMARY_COLUMNS,
        summaries=summary_rows(inspection),
        summary_note=summary_note(inspection),
        notes=inspection.notes,
    )


def _target(view: TargetView) -> dict[str, Any]:
    context = view.context
    return {
        "facts": target_facts(view),
        "turns": [(turn.number + 1, turn.before, _tokens(turn.tokens)) for turn in view.turns],
        "hint": view.target.hint,
        "count": len(view.tokens),
        "answers": view.answers,
        "context": (_end(context.before), context.inserted, _begin(context.after)),
        "shortened": context.shortened,
    }


def _tokens(tokens: Sequence[TokenView]) -> list[dict[str, Any]]:
    return [
        {
            "said": visible(token.text).replace("\n", "↵\n"),
            "token": token,
            "css": _css(token),
            "tip": (
                f"{marked(token.text)}\nJSD {token.jsd:.4f}\nlog p_S {token.student_logprob:.3f}, log p_T "
                f"{token.teacher_logprob:.3f}\nteacher's best: {marked(token.best_text)} "
                f"({token.best_probability:.3f})"
            ),
        }
        for token in tokens
    ]


def _css(token: TokenView) -> str:
    """Class of a token: `l0`, or `less` or `more` and its level."""
    if not token.level:
        return "l0"
    return f"{'less' if token.advantage < 0 else 'more'} l{token.level}"


def _unaligned(one: Unaligned) -> tuple[str, ...]:
    target = one.target
    return (
        str(one.step),
        target.kind,
        target.source,
        target.rollout_id,
        str(target.turn + 1),
        one.explanation,
        target.hint,
    )


def _end(text: str) -> str:
    left_out = len(text) - LONGEST_TEXT
    return text if left_out <= 0 else f"… {left_out:,} more characters\n{text[left_out:]}"


def _begin(text: str) -> str:
    left_out = len(text) - LONGEST_TEXT
    return text if left_out <= 0 else f"{text[:LONGEST_TEXT]}\n… {left_out:,} more characters"
