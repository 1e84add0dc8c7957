"""An inspection on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from forge_composer.inspection.records import Inspection, TargetView, TokenView, Unaligned
from forge_composer.inspection.text import clipped, marked, visible
from forge_composer.inspection.wording import (
    SUMMARY_COLUMNS,
    heading,
    legend_edges,
    summary_note,
    summary_rows,
    target_facts,
)

_CONTEXT_LINES = 12
_INDENT = 2


@dataclass(slots=True, frozen=True)
class _Palette:
    """Styles of a token by level: where the teacher finds it less likely, and where likelier."""

    less: tuple[str, ...]
    more: tuple[str, ...]

    def of(self, token: TokenView) -> str:
        return (self.less if token.advantage < 0 else self.more)[token.level]


_MANY = _Palette(
    ("", *(f"#000000 on {colour}" for colour in ("#fde7e1", "#fac3b4", "#f08c72", "#d9512f"))),
    ("", *(f"#000000 on {colour}" for colour in ("#e3eefb", "#bad6f6", "#82b4ec", "#4288d6"))),
)
_SIXTEEN = _Palette(
    ("", "red", "bold red", "white on red", "bold white on red"),
    ("", "blue", "bold blue", "white on blue", "bold white on blue"),
)
"""For terminals of 16 colours, which would show all light ones as white."""


def print_inspection(console: Console, inspection: Inspection, *, tokens: int) -> None:
    """Print targets, what could not be aligned, and the summaries.

    Args:
        console: where to.
        inspection: what was found out.
        tokens: most tokens of a target in its table, those with the largest divergence; 0 is all.
    """
    console.print(Text(heading(inspection)))
    palette = _SIXTEEN if console.color_system in ("standard", "windows") else _MANY
    if console.color_system is not None:
        console.print(_legend(palette))
    for view in inspection.shown:
        _print_target(console, view, palette, tokens)
    _print_unaligned(console, inspection.unaligned)
    _print_summaries(console, inspection)
    for note in inspection.notes:
        console.print(Text(visible(note), style="yellow"))


def _legend(palette: _Palette) -> Text:
    text = Text("the hint makes a token ")
    for name, styles in (("less likely", palette.less), ("likelier", palette.more)):
        text.append(f"{name}: ")
        for edge, style in zip(legend_edges(), styles, strict=True):
            if style:
                text.append(f" {edge} ", style=style)
        text.append("  ")
    return text.append("JSD, nats")


def _print_target(console: Console, view: TargetView, palette: _Palette, most: int) -> None:
    facts = ", ".join(f"{name} {visible(value)}" for name, value in target_facts(view))
    console.print()
    console.print(Rule(characters="─", style="dim"))
    console.print(Text(facts, style="bold"))
    for index, turn in enumerate(view.turns):
        for role, said in turn.before:
            body = clipped(visible(said).strip("\n"), _CONTEXT_LINES, keep="last")
            _print_block(console, role, Text(body, style="dim"))
        if index == 0:
            _print_hint(console, view)
        _print_block(console, f"turn {turn.number + 1}", _coloured(turn.tokens, palette))
    for role, said in view.answers:
        body = clipped(visible(said).strip("\n"), _CONTEXT_LINES)
        _print_block(console, role, Text(body, style="dim"))
    _print_tokens(console, view, palette, most)


def _print_hint(console: Console, view: TargetView) -> None:
    _print_block(console, "hint", Text(visible(view.target.hint), style="yellow"))
    if view.context.shortened:
        remark = "old observations are left out of the teacher's context, to make room"
        console.print(Text(remark, style="dim"))


def _print_block(console: Console, title: str, body: Text) -> None:
    console.print(Text(title, style="cyan"))
    console.print(Padding(body, (0, 0, 0, _INDENT)))


def _coloured(tokens: Sequence[TokenView], palette: _Palette) -> Text:
    """The turn as text, each token on the colour of its divergence; ends of lines are shown."""
    text = Text()
    for token in tokens:
        said = visible(token.text).replace("\n", "↵\n")
        text.append(said, style=palette.of(token))
    return text


def _print_tokens(console: Console, view: TargetView, palette: _Palette, most: int) -> None:
    chosen = sorted(enumerate(view.tokens), key=lambda item: -item[1].jsd)[: most or None]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("#", "token", "JSD", "log p_S", "log p_T", "teacher's best", "its p"):
        table.add_column(name, justify="left" if name in ("token", "teacher's best") else "right")
    for index, token in chosen:
        table.add_row(
            str(index),
            Text(marked(token.text), style=palette.of(token)),
            f"{token.jsd:.4f}",
            f"{token.student_logprob:.3f}",
            f"{token.teacher_logprob:.3f}",
            Text(marked(token.best_text)),
            f"{token.best_probability:.3f}",
        )
    console.print(Padding(table, (0, 0, 0, _INDENT)))
    if len(chosen) < len(view.tokens):
        console.print(Text(f"{len(chosen)} of {len(view.tokens)} tokens, by JSD", style="dim"))


def _print_unaligned(console: Console, unaligned: Sequence[Unaligned]) -> None:
    if not unaligned:
        return
    console.print()
    console.print(Text(f"no teacher context: {len(unaligned)} of the targets", style="bold red"))
    for one in unaligned:
        target = one.target
        where = f"step {one.step}, {target.kind}, {target.source}, {target.rollout_id} turn {target.turn + 1}"
        console.print(Text(visible(f"{where}: {one.explanation}")))


def _print_summaries(console: Console, inspection: Inspection) -> None:
    for title, rows in summary_rows(inspection):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=Text(title, style="bold"), title_justify="left")
        for index, name in enumerate(SUMMARY_COLUMNS):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        console.print()
        console.print(table)
    if inspection.total is not None:
        console.print(Text(summary_note(inspection), style="dim"))
