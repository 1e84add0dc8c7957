"""Compare arms over seeds: `python -m apps.compare experiments/NAME.toml`.

Runs every arm of the experiment with every seed, then writes tables, a page and a verdict. Finished runs are
not run again, so the command continues where it stopped; Ctrl-C stops the runs and compares what there is.
docs/compare.md has the experiment file and the statistics.

Exit status: 0 all runs are finished; 1 some failed; 2 the experiment or a config is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from apps._cli import EXIT_CONFIG, print_config_error, stop_on_signals
from forge_composer.compare.account import make_account, write_account
from forge_composer.compare.experiment import load_experiment, resolve
from forge_composer.compare.output import print_account
from forge_composer.compare.runs import FolderInUseError, Planned, Runner, check_completed, locked, plan
from forge_composer.config import ConfigError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
TRAIN = (sys.executable, "-m", "apps.grpo_composer")


def main(argv: Sequence[str] | None = None, *, command: Sequence[str] = TRAIN) -> int:
    """Run the command; returns the exit status. `command` trains one config."""
    options = _parser().parse_args(argv)
    folder = (options.output_dir or options.experiment.with_suffix("")).absolute()
    try:
        return _compare(options, folder, command)
    except ConfigError as error:
        print_config_error(error)
    except (FolderInUseError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    return EXIT_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.compare",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="TOML file of the experiment")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; default OUTPUT_DIR/results.json")
    parser.add_argument("--page", type=Path, metavar="FILE", help="page; default OUTPUT_DIR/results.html")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time; default 1")
    parser.add_argument(
        "--output_dir", type=Path, metavar="DIR", help="default: the experiment file without `.toml`"
    )
    return parser


def _compare(options: argparse.Namespace, folder: Path, command: Sequence[str]) -> int:
    if options.parallel < 1:
        raise ValueError("--parallel must be 1 or more")
    experiment = load_experiment(options.experiment)
    runs = plan(experiment, folder)
    configs = resolve(experiment, str(options.experiment), folder / "runs")
    check_completed(runs, configs)
    console = Console(width=max(120, Console().width))
    runner = Runner(experiment, command, lambda text: console.print(text, markup=False, soft_wrap=True))
    with locked(folder / "runs") as lock:
        asyncio.run(_run(runner, runs, options.parallel, lock))
        account = make_account(experiment, runs, configs, parallel=options.parallel)
        results, page = options.json or folder / "results.json", options.page or folder / "results.html"
        tables = write_account(account, results=results, page=page)
    print_account(console, account)
    console.print(f"{results}, {tables} and {page}", markup=False, soft_wrap=True)
    if runner.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if account.missing else 0


async def _run(runner: Runner, runs: Sequence[Planned], parallel: int, lock: int) -> None:
    """Run what is missing; Ctrl-C, SIGTERM and the end of the terminal stop the runs in an orderly way."""
    stop_on_signals(asyncio.get_running_loop(), runner.interrupt)
    await runner.run(runs, parallel=parallel, lock=lock)


if __name__ == "__main__":
    sys.exit(main())
