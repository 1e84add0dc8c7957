"""What is read of a run: its config, its targets, and the rollouts that they belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError

from forge_composer.config import Config, read
from forge_composer.hints.records import Target
from forge_composer.inspection.records import InspectionError, StepTarget
from forge_composer.traces.store import TraceReader
from forge_composer.types import Rollout


class _Line(BaseModel):
    """What a line of `targets.jsonl` has beside the fields of `Target`."""

    step: NonNegativeInt
    turn: NonNegativeInt


_TARGET = TypeAdapter(Target)


@dataclass(slots=True)
class TargetedRun:
    """A run with its targets, in the order in which they were distilled; `notes` says what was skipped."""

    folder: Path
    config: Config
    targets: list[StepTarget]
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Path:
        """The trained policy if the run exported one, else the policy that it began with."""
        final = self.folder / "checkpoints" / "final_hf"
        return final if final.is_dir() else self.config.model.path

    def rollouts(self, wanted: Collection[str]) -> Iterator[Rollout]:
        """The rollouts of these ids, as they stand in the trace; one at a time is in memory.

        Raises:
            TraceFormatError: a line of the trace is no trajectory.
        """
        reader = TraceReader(self.folder / "traces" / "train.jsonl")
        missing = set(wanted)
        for rollout in reader:
            if rollout.rollout_id in missing:
                missing.remove(rollout.rollout_id)
                yield rollout
                if not missing:
                    break
        self.notes += [str(torn) for torn in reader.torn]


def read_run(folder: Path) -> TargetedRun:
    """Read config and targets of a run, finished or not.

    Raises:
        InspectionError: the folder is no run's, or the run has no targets.
        ConfigError: its config does not fit the schema.
    """
    for name in ("config.toml", "traces/train.jsonl"):
        if not (folder / name).is_file():
            raise InspectionError(
                f"{folder / name} does not exist; name the folder of a run, as --output_dir of "
                "apps.grpo_composer sets it"
            )
    config = read(folder / "config.toml").config  # not `load`: this machine need not be able to train
    file = folder / "targets.jsonl"
    targets, notes = _read_targets(file) if file.is_file() else ([], [])
    if not targets:
        raise InspectionError(f"{file} holds no target: {_why_none(config)}")
    return TargetedRun(folder, config, targets, notes)


def _why_none(config: Config) -> str:
    if config.loss.sdpo.weight == 0:
        return (
            "the run had loss.sdpo.weight = 0, which switches targeted feedback off; train with "
            "--loss.sdpo.weight 0.5"
        )
    return (
        "targeted feedback was on, but no turn was targeted yet; train longer, or see `targets/...` in "
        "metrics.jsonl for what was skipped, and hints.routing, hints.sources and hints.ignore in config.toml"
    )


def _read_targets(file: Path) -> tuple[list[StepTarget], list[str]]:
    """The targets; a last line that its writer did not finish is noted and left out."""
    found: list[StepTarget] = []
    *lines, unfinished = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(StepTarget(_Line.model_validate_json(line).step, _TARGET.validate_json(line)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InspectionError(
                f"{file}:{number}: no target: {f'{where}: ' if where else ''}{first['msg']}; mend the line "
                "or take it out"
            ) from None
    if unfinished.strip():
        return found, [f"{file}:{len(lines) + 1}: torn line, its writer was interrupted"]
    return found, []
