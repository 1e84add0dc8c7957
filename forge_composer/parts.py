"""What a controller is made of: the services that it drives, and who keeps what happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_composer.hints.records import Target
from forge_composer.preferences.records import PreferencePair
from forge_composer.rollout.episode import EpisodeRunner
from forge_composer.services import (
    Environments,
    Generators,
    GroupBuffer,
    PairStore,
    TeacherReplay,
    Trainer,
)
from forge_composer.types import Rollout


class Recorder(Protocol):
    """Keeps what happens: traces, metrics, the terminal view."""

    def rollout(self, rollout: Rollout) -> None:
        """Append one finished rollout to the trace."""
        ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one optimizer step (or of a batch with nothing to train on)."""
        ...

    def evaluation(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Record an evaluation."""
        ...

    def targets(self, step: int, targets: Sequence[Target]) -> None:
        """Record the turns that a step distils, with their hints."""
        ...

    def pairs(self, pairs: Sequence[PreferencePair]) -> None:
        """Record preference pairs, with all that they were made from."""
        ...

    def warn(self, message: str) -> None:
        """Tell the user."""
        ...


@dataclass(slots=True, frozen=True)
class Parts:
    """The services that the controller drives."""

    trainer: Trainer
    generators: Generators
    environments: Environments
    buffer: GroupBuffer
    runner: EpisodeRunner
    recorder: Recorder
    teachers: TeacherReplay | None = None
    pairs: PairStore | None = None
