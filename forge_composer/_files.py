"""Files that other processes may read or end at any moment: whole or not at all, line by line."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to; it takes the place of `path` when the block ends without an error."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file, whole or not at all; its folder is made.

    Args:
        path: the file.
        text: its content.
        errors: what to do with half a surrogate pair, as for `str.encode`.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", errors=errors)


class LineWriter:
    """Appends lines to one file; a line is there as a whole or not at all. One writer a file.

    Each line goes to the kernel in one `write` on a file opened with O_APPEND, so a killed process leaves at
    most one torn line, the last. The next writer ends that line and goes on below it.
    """

    def __init__(self, path: str | Path, *, fsync: bool = False) -> None:
        """Open or continue a file; folders are made.

        Args:
            path: the file.
            fsync: wait for the disk after each line, so that a line also survives a power cut.

        Raises:
            BlockingIOError: another process is writing to the file.
        """
        self.path = Path(path)
        self.count = 0
        """Lines appended by this writer."""
        self._fsync = fsync
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end_torn_line()
        except BlockingIOError:
            os.close(self._fd)
            raise BlockingIOError(f"{self.path} is being written by another process") from None

    def _end_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append_line(self, content: bytes) -> None:
        """Append one line, given without its end.

        Raises:
            OSError: the line could not be written (disk full); nothing of it is left in the file.
        """
        line = content + b"\n"
        before = os.fstat(self._fd).st_size
        written = 0
        try:
            while written < len(line):  # a single round, unless the disk is full
                written += os.write(self._fd, line[written:])
        except OSError:
            os.ftruncate(self._fd, before)
            raise
        if self._fsync:
            os.fsync(self._fd)
        self.count += 1

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
