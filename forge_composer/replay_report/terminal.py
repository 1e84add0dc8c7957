"""A report on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_composer.replay_report.report import Report
from forge_composer.replay_report.tables import notes, tables, verdict

_STYLES = {"pass": "green", "fail": "bold red", "undecided": "yellow"}


def print_report(console: Console, report: Report) -> None:
    """Print tables, notes and the verdict."""
    for title, columns, rows in reversed(tables(report)):  # the verdict last: it is what is seen first
        if not rows:
            continue
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        console.print(table)
    for text in notes(report):
        console.print(Text(f"• {text}"), soft_wrap=True)
    console.print(Text(verdict(report), style="bold"), soft_wrap=True)
