"""From trace files to the steps that teachers are asked about; bad lines are reported and do not end it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.steps import (
    StepState,
    choose_steps,
    conversation_is_replayed,
    rollout_is_replayed,
    steps_of_conversation,
    steps_of_rollout,
)
from forge_composer.replay_report.settings import TraceFormatName
from forge_composer.traces.atif import NAMESPACE, TraceFormatError, rollout_from_trajectory, validate
from forge_composer.traces.formats.files import BadLine, ConversationReader
from forge_composer.types import Rollout


@dataclass(slots=True)
class Gathered:
    """The steps of a replay and where they are from.

    Attributes:
        states: steps to ask about, trace by trace.
        traces: ids of the traces that are replayed, those without a chosen step included.
        read: traces that were read.
        read_steps: steps of the replayed traces before some were chosen.
        bad_lines: documents that could not be read.
        warnings: what lenient readers passed over: documents with doubts.
    """

    states: list[StepState] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    read: int = 0
    read_steps: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    warnings: int = 0


def gather(paths: Sequence[Path], format: TraceFormatName, config: ReplayConfig) -> Gathered:
    """Read all traces and choose the steps.

    Args:
        paths: files, folders, run folders; what is named twice is read once.
        format: how they are written.
        config: which traces and which steps.

    Raises:
        FileNotFoundError: a path does not exist.
        OSError: a file cannot be read.
    """
    found = Gathered()
    seen: dict[str, int] = {}
    for file in _files(paths):
        for steps in _traces(file, format, config, found):
            found.read += 1
            if not steps:
                continue
            identity = _unique(steps[0].trace, seen)
            found.traces.append(identity)
            found.read_steps += len(steps)
            named = [dataclasses.replace(step, trace=identity) for step in steps]
            found.states += choose_steps(named, config)
    return found


def _files(paths: Sequence[Path]) -> list[Path]:
    """The trace files; of a run folder only its traces."""
    files: dict[Path, None] = {}
    for path in paths:
        traces = path / "traces"
        reader = ConversationReader(traces if traces.is_dir() else path)
        files |= dict.fromkeys(file.resolve() for file in reader.files)
    return list(files)


def _traces(
    file: Path, format: TraceFormatName, config: ReplayConfig, found: Gathered
) -> Iterator[list[StepState]]:
    """The steps of each trace of a file; empty for a trace that is not replayed."""
    if format == "run" or (format == "auto" and _is_ours(file)):
        for rollout in _rollouts(file, found):
            yield steps_of_rollout(rollout) if rollout_is_replayed(rollout, config) else []
        return
    reader = ConversationReader(file, format=None if format == "auto" else format)
    for conversation in reader:
        found.warnings += bool(conversation.warnings)
        taken = conversation_is_replayed(conversation, config)
        yield steps_of_conversation(conversation) if taken else []
    found.bad_lines += reader.problems


def _rollouts(file: Path, found: Gathered) -> Iterator[Rollout]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
                validate(document)
                yield rollout_from_trajectory(document)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                found.bad_lines.append(BadLine(file, number, f"not JSON: {error}"))
            except TraceFormatError as error:
                found.bad_lines.append(BadLine(file, number, str(error)))


def _is_ours(file: Path) -> bool:
    """Whether the first line that is JSON is a rollout of ours."""
    with file.open("rb") as stream:
        for line in stream:
            try:
                document: Any = json.loads(line)
            except (ValueError, RecursionError):
                continue
            extra = document.get("extra") if isinstance(document, dict) else None
            return isinstance(extra, dict) and NAMESPACE in extra
    return False


def _unique(identity: str, seen: dict[str, int]) -> str:
    """The id, with a number after it where another file has a trace of this id: budgets go by it."""
    seen[identity] = seen.get(identity, 0) + 1
    return identity if seen[identity] == 1 else f"{identity}#{seen[identity]}"
