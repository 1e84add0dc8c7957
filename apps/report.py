"""A run as one HTML page: `python -m apps.report RUN_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_composer.report.html import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Write `report.html` into the run's folder and print its path; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apps.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run, finished or not")
    options = parser.parse_args(argv)
    try:
        page = write_report(options.run_dir)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
