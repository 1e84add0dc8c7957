"""What the commands share: reading the command line, saying what is wrong with a config."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from forge_composer.config import Config, ConfigError, find_problems, load, read
from forge_composer.plan import exit_status, render_plan

EXIT_CONFIG = 2
"""Exit status when the config is wrong."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A parsed command line; `options` holds what the app's own parser added."""

    config_path: Path
    overrides: tuple[str, ...]
    plan: bool
    options: argparse.Namespace


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
    parser: argparse.ArgumentParser | None = None,
) -> CommandLine:
    """Read `--config FILE [--plan] [--section.field VALUE ...]`.

    Args:
        argv: arguments without the program's name; those of the process if None.
        prog: how the command is called, for the help text.
        description: what the command does, for the help text.
        parser: a parser that holds options of the app; made with `allow_abbrev=False`.
    """
    if parser is None:
        parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="TOML config of the run")
    parser.add_argument("--plan", action="store_true", help="print what would be started, and start nothing")
    parser.epilog = (
        "Every field of the config can be overridden: --section.field VALUE, for example "
        "--trainer.optimizer.lr 1e-5 or --output_dir runs/x."
    )
    options, overrides = parser.parse_known_args(argv)
    return CommandLine(options.config, tuple(overrides), options.plan, options)


def load_or_exit(line: CommandLine) -> Config:
    """The checked config; says what is wrong and exits with status 2 if there is anything.

    With `--plan` the plan is printed instead, and the process exits: 0, or 1 if the config has a problem
    that is not only this machine's.
    """
    try:
        if line.plan:
            sys.exit(_print_plan(line))
        return load(line.config_path, line.overrides)
    except ConfigError as error:
        print_config_error(error)
        sys.exit(EXIT_CONFIG)


def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    """Call `stop` for Ctrl-C, SIGTERM and the end of the terminal; one that is ignored stays so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stop)


def print_config_error(error: ConfigError) -> None:
    """Print every problem to standard error."""
    console = Console(stderr=True, soft_wrap=True)
    count = len(error.problems)
    noun = "problem" if count == 1 else "problems"
    console.print(Text(f"{count} {noun} in the config; nothing was started.", style="bold red"))
    for problem in error.problems:
        head, *rest = str(problem).splitlines()
        console.print(Text(head, style="bold"))
        for text in rest:
            console.print(Text(text))


def _print_plan(line: CommandLine) -> int:
    loaded = read(line.config_path, line.overrides)
    problems = find_problems(loaded.config, loaded.origin)
    sys.stdout.write(render_plan(loaded.config, problems))
    return exit_status(problems)
