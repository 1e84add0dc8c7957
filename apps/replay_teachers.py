"""Replay recorded traces to teachers: `python -m apps.replay_teachers --config configs/replay_offline.toml`.

Asks every teacher what it would have done at the recorded steps, and says what that costs, how long it takes,
how far the teachers agree, and how many preference pairs it gives, against the limits of the config.
docs/replay.md has the config and what the numbers mean.

Every call is in a ledger in the output folder. Started again, the command makes the missing calls only, after
Ctrl-C and after a kill as well, and reports on the whole. Ctrl-C stops the asking and reports what there is.

Exit status: 0 all limits are held; 1 one is not, or calls are missing; 2 a config, a file or a key is wrong;
130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from apps._cli import EXIT_CONFIG, print_config_error, stop_on_signals
from forge_composer.config import ConfigError
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.replay_report.gather import Gathered, gather
from forge_composer.replay_report.load import load_settings
from forge_composer.replay_report.outputs import Outputs, write_outputs
from forge_composer.replay_report.pairs import make_pairs
from forge_composer.replay_report.report import Report, make_report
from forge_composer.replay_report.run import Asked, ask_teachers
from forge_composer.replay_report.settings import ReplaySettings
from forge_composer.replay_report.terminal import print_report
from forge_composer.teachers.ledger import LedgerError

EXIT_NOT_HELD = 1
EXIT_INTERRUPTED = 130
_NARROWEST = 120
"""Columns that the tables need."""
_MOST_BAD_LINES = 20
"""Bad lines that are printed; the page and the numbers have more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options, overrides = _parser().parse_known_args(argv)
    try:
        return _replay(options, _settings(options, overrides))
    except KeyboardInterrupt:  # while traces are read or the report is made
        return EXIT_INTERRUPTED
    except ConfigError as error:
        print_config_error(error)
    except (LedgerError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    return EXIT_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.replay_teachers",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every field of the config can be overridden: --section.field VALUE, for example "
        "--replay.quorum 3 or --teachers.0.concurrency 4.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="TOML config of the replay"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="trace files, folders or runs, not the config's",
    )
    parser.add_argument("--output_dir", metavar="DIR", help="folder of the ledger and the outputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="numbers; default OUTPUT_DIR/replay.json")
    parser.add_argument("--page", type=Path, metavar="FILE", help="page; default OUTPUT_DIR/replay.html")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="pairs; default OUTPUT_DIR/pairs.jsonl")
    parser.add_argument("--trl", type=Path, metavar="FILE", help="pairs in TRL's preference format, as well")
    return parser


def _settings(options: argparse.Namespace, overrides: Sequence[str]) -> ReplaySettings:
    given = [*overrides] if options.output_dir is None else [*overrides, f"--output_dir={options.output_dir}"]
    settings = load_settings(options.config, given)
    if options.traces is not None:
        settings = settings.model_copy(update={"traces": tuple(options.traces)})
    if not settings.traces:
        raise ValueError(f"{options.config} names no traces: give them with --traces, or set `traces`")
    return settings


def _replay(options: argparse.Namespace, settings: ReplaySettings) -> int:
    folder = settings.output_dir
    outputs = Outputs(
        options.json or folder / "replay.json",
        options.page or folder / "replay.html",
        options.pairs or folder / "pairs.jsonl",
        options.trl,
    )
    outputs.prepare()
    gathered = gather(settings.traces, settings.format, settings.replay)
    console = Console(width=max(_NARROWEST, Console().width), highlight=False)
    _say_bad_lines(console, gathered)
    if not gathered.states:
        raise ValueError(_nothing(settings, gathered))
    renderer = None if settings.policy is None else ChatRenderer.from_folder(settings.policy)
    asked = asyncio.run(_ask(settings, gathered))
    pairs = asyncio.run(make_pairs(asked.steps, gathered.traces, settings, renderer))
    report = make_report(settings, gathered, asked, pairs)
    write_outputs(report, outputs)
    print_report(console, report)
    console.print(", ".join(map(str, outputs.files)), markup=False, soft_wrap=True)
    return _status(report)


def _say_bad_lines(console: Console, gathered: Gathered) -> None:
    for line in gathered.bad_lines[:_MOST_BAD_LINES]:
        console.print(f"left out: {line}", markup=False, soft_wrap=True)
    if (more := len(gathered.bad_lines) - _MOST_BAD_LINES) > 0:
        console.print(f"left out: {more:,} more")


def _nothing(settings: ReplaySettings, gathered: Gathered) -> str:
    """Why there is no step to ask about."""
    where = ", ".join(map(str, settings.traces))
    if not gathered.read:
        return f"{where}: no trace could be read"
    if not gathered.traces:
        return f'{where}: replay.traces = "{settings.replay.traces}" takes none of {gathered.read} traces'
    return (
        f'{where}: replay.steps = "{settings.replay.steps}" takes none of {gathered.read_steps} steps; '
        "try --replay.steps all"
    )


async def _ask(settings: ReplaySettings, gathered: Gathered) -> Asked:
    """Ask, with a progress bar; Ctrl-C, SIGTERM and the end of the terminal stop it in an orderly way."""
    stop = asyncio.Event()
    stop_on_signals(asyncio.get_running_loop(), stop.set)
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        task = progress.add_task("steps", total=len(gathered.states))
        return await ask_teachers(
            settings, gathered.states, stop=stop, on_step=lambda step: progress.advance(task)
        )


def _status(report: Report) -> int:
    if report.asked.interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.holds else EXIT_NOT_HELD


if __name__ == "__main__":
    sys.exit(main())
