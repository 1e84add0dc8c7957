"""Judge the hints of a run by eye: `python -m apps.inspect_hints RUN`.

Shows distilled turns with their hints, and token by token where the policy with the hint in its context
disagrees with the policy without. docs/hints.md says how to read it.

Exit status: 0 shown; 2 the run, the policy or an option cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from apps._cli import EXIT_CONFIG, print_config_error
from forge_composer.config import ConfigError
from forge_composer.inspection.selection import SORTS, Selection

_NARROWEST = 100
"""Columns that the tables need."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        _inspect(options)
    except ConfigError as error:
        print_config_error(error)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    else:
        return 0
    return EXIT_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.inspect_hints",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run with loss.sdpo.weight > 0")
    chosen = parser.add_argument_group("which targets")
    chosen.add_argument("--step", type=int, metavar="N", help="only those of this optimizer step")
    chosen.add_argument("--kind", metavar="K", help="only this kind of fault, such as test_failed")
    chosen.add_argument("--source", metavar="S", help="only hints of this source, such as sibling")
    chosen.add_argument("--limit", type=_positive, default=10, metavar="N", help="most targets; default 10")
    chosen.add_argument("--seed", type=int, default=0, metavar="N", help="of the random choice; default 0")
    chosen.add_argument(
        "--sort",
        choices=SORTS,
        help="instead of a random choice the earliest (step), the largest divergence first (jsd), or those "
        "first that the hint speaks most against (advantage); the last two measure all targets that fit",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page as well")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all numbers as well")
    output.add_argument(
        "--tokens",
        type=_not_negative,
        default=8,
        metavar="N",
        help="tokens of a target in the terminal's table, 0 is all; default 8",
    )
    policy = parser.add_argument_group("the policy that reads both contexts")
    policy.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="default: RUN/checkpoints/final_hf if it is there, else model.path of the run's config",
    )
    policy.add_argument("--device", default="cpu", metavar="D", help="cpu (default), cuda or cuda:N")
    policy.add_argument(
        "--threads", type=_positive, metavar="N", help="threads of torch; default: torch's own"
    )
    return parser


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"give a whole number from {least} on, not {text!r}")
    return int(text)


def _inspect(options: argparse.Namespace) -> None:
    from forge_composer.inspection.as_json import to_json
    from forge_composer.inspection.load import read_run
    from forge_composer.inspection.page import write_page
    from forge_composer.inspection.terminal import print_inspection

    selection = Selection(
        options.step, options.kind, options.source, options.limit, options.sort, options.seed
    )
    run = read_run(options.run)
    _make_room("--html", options.html)
    _make_room("--json", options.json)
    selection.fitting(run.targets)  # refused before torch and the policy are loaded

    import torch
    from transformers.utils import logging

    from forge_composer.inspection.divergence import inspect_run
    from forge_composer.inspection.policy import Policy

    untyped: Any = logging
    untyped.disable_progress_bar()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with Console(stderr=True).status("loading the policy") as status:
        policy = Policy.load(options.model or run.model, options.device)
        inspection = inspect_run(
            run, policy, selection, lambda done, all_: status.update(f"{done} of {all_} targets")
        )
    console = Console(width=max(_NARROWEST, Console().width), highlight=False)
    print_inspection(console, inspection, tokens=options.tokens)
    if options.html is not None:
        write_page(inspection, options.html)
        print(options.html)
    if options.json is not None:
        content = json.dumps(to_json(inspection), indent=1, ensure_ascii=False, allow_nan=False)
        options.json.write_text(content + "\n", encoding="utf-8", errors="replace")
        print(options.json)


def _make_room(option: str, file: Path | None) -> None:
    """Refuse what cannot be written before anything is measured."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{option} {file} is a folder; name a file")
    file.parent.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
