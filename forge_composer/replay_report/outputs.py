"""The files of a report, each written as a whole: one that is there is of this start or of the one before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from forge_composer._files import replacing, write_whole
from forge_composer.preferences.export import PairWriter, write_trl
from forge_composer.replay_report.as_json import to_json
from forge_composer.replay_report.page import render_page
from forge_composer.replay_report.report import Report


@dataclass(slots=True, frozen=True)
class Outputs:
    """Where the files go; `trl`: the pairs in TRL's preference format, None for no such file."""

    numbers: Path
    page: Path
    pairs: Path
    trl: Path | None = None

    @property
    def files(self) -> list[Path]:
        """All files."""
        return [file for file in (self.numbers, self.page, self.pairs, self.trl) if file is not None]

    def prepare(self) -> None:
        """Refuse what cannot be written, before anything is asked; make folders.

        Raises:
            ValueError: a file is a folder, or is named twice.
            OSError: a folder cannot be made.
        """
        for file in self.files:
            if file.is_dir():
                raise ValueError(f"{file} is a folder; name a file")
            file.parent.mkdir(parents=True, exist_ok=True)
        if len({file.resolve() for file in self.files}) < len(self.files):
            raise ValueError("two outputs have one file; name a file for each")


def write_outputs(report: Report, outputs: Outputs) -> None:
    """Write numbers, page and pairs."""
    text = json.dumps(to_json(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(outputs.numbers, text, errors="replace")
    write_whole(outputs.page, render_page(report), errors="replace")
    with replacing(outputs.pairs) as file, PairWriter(file) as writer:
        for pair in report.pairs.made:
            writer.append(pair)
    if outputs.trl is not None:
        with replacing(outputs.trl) as file:
            write_trl(file, report.pairs.made)
