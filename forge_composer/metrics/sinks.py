"""Where metrics go: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

Kind = Literal["step", "eval"]

TIME_PREFIX = "time/"
"""Everything that depends on the clock has this prefix."""


class MetricsSink(Protocol):
    """Takes the metrics of a step or of an evaluation."""

    def write(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Take one record; `step` is the trainer's policy version."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class JsonlSink:
    """One JSON object a line: `kind`, `step`, then the metrics by name. Non-finite numbers are null."""

    def __init__(self, path: str | Path) -> None:
        """Append to a file; folders are made."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self.path.open("a", encoding="utf-8")

    def write(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and hand it to the kernel."""
        record: dict[str, Any] = {"kind": kind, "step": step}
        record |= {key: finite_or_none(metrics[key]) for key in sorted(metrics)}
        self._stream.write(json.dumps(record, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardSink:
    """Scalars as TensorBoard events, through TensorBoard's own writer."""

    def __init__(self, folder: str | Path) -> None:
        """Write event files into a folder."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(str(folder))

    def write(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event that holds all metrics; non-finite numbers are left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=metrics[key])
            for key in sorted(metrics)
            if math.isfinite(metrics[key])
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a torn last line of an interrupted run is left out.

    Raises:
        ValueError: another line is not JSON; the message names file and line.
    """
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return  # without its newline: the writer was interrupted
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        yield record


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without what depends on the clock: equal between two synchronous runs of one seed."""
    return {key: value for key, value in record.items() if not key.startswith(TIME_PREFIX)}


def finite_or_none(value: float) -> float | None:
    """The number, or None where JSON has none."""
    return value if math.isfinite(value) else None
