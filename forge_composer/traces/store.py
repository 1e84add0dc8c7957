"""Append-only JSONL of trajectories: a line is there as a whole or not at all.

A killed writer leaves at most one torn line, the last (`forge_composer._files.LineWriter`); the reader skips
torn lines and reports them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_composer._files import LineWriter
from forge_composer.traces.atif import (
    TraceFormatError,
    rollout_from_trajectory,
    trajectory_from_rollout,
    validate,
)
from forge_composer.types import Rollout


class TraceWriter(LineWriter):
    """Appends rollouts to one trace file. One writer a file: a second one is refused.

    Example:
        >>> with TraceWriter(folder / "traces" / "train.jsonl", run="demo") as writer:
        ...     writer.append(rollout)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str | None = None,
        model: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        fsync: bool = False,
    ) -> None:
        """Open or continue a file; folders are made.

        Args:
            path: the JSONL file.
            run: name of the run, ATIF `session_id`.
            model: name of the policy, ATIF `agent.model_name`.
            sampling: sampling parameters of the run.
            fsync: wait for the disk after each line, so that a line also survives a power cut.

        Raises:
            BlockingIOError: another process is writing to the file.
        """
        super().__init__(path, fsync=fsync)
        self._about: dict[str, Any] = {"run": run, "model": model, "sampling": sampling}

    def append(self, rollout: Rollout) -> None:
        """Append one rollout.

        Raises:
            OSError: the line could not be written (disk full); nothing of it is left in the file.
        """
        self.append_trajectory(trajectory_from_rollout(rollout, **self._about))

    def append_trajectory(self, document: Mapping[str, Any]) -> None:
        """Append a trajectory that is valid already."""
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self.append_line(text.encode("utf-8", "replace"))  # half a surrogate pair has no UTF-8


@dataclass(slots=True, frozen=True)
class TornLine:
    """A line that ends before its JSON does: its writer was killed."""

    path: Path
    line: int
    """Number of the line, from 1."""
    size: int
    """Bytes that are there."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: torn line of {self.size} bytes, its writer was interrupted"


class TraceReader:
    """Reads one trace file, or all `*.jsonl` files of a folder in order of name.

    Torn lines are skipped and listed in `torn` once the iteration is past them. Anything else that is
    not an ATIF trajectory raises `TraceFormatError` with file and line.
    """

    def __init__(self, path: str | Path) -> None:
        """Take a file or a folder.

        Raises:
            FileNotFoundError: it does not exist.
        """
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"no trace at {self.path}")
        self.torn: list[TornLine] = []

    @property
    def files(self) -> list[Path]:
        """The trace files."""
        return sorted(self.path.glob("*.jsonl")) if self.path.is_dir() else [self.path]

    def __iter__(self) -> Iterator[Rollout]:
        """The rollouts; raises `TraceFormatError` also for trajectories of other producers."""
        for path, number, document in self._documents():
            try:
                yield rollout_from_trajectory(document)
            except TraceFormatError as error:
                raise TraceFormatError(f"{path}:{number}: {error}") from error

    def trajectories(self) -> Iterator[dict[str, Any]]:
        """The validated ATIF trajectories, of any producer, as JSON objects."""
        for _, _, document in self._documents():
            yield document

    def _documents(self) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        self.torn = []
        for path in self.files:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    document = self._document(path, number, line)
                    if document is not None:
                        yield path, number, document

    def _document(self, path: Path, number: int, line: bytes) -> dict[str, Any] | None:
        content = line.strip()
        if not content:
            return None
        try:
            document: dict[str, Any] = json.loads(content)
            validate(document)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if not content.startswith(b"{"):
                raise TraceFormatError(f"{path}:{number}: not a JSON object") from error
            self.torn.append(TornLine(path, number, len(content)))
            return None
        except TraceFormatError as error:
            raise TraceFormatError(f"{path}:{number}: {error}") from None
        return document
