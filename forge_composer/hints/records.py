"""What travels from the hints to the trainer. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Target:
    """One assistant turn of a rollout, and the hint that stands before it in the teacher's context.

    `kind` is what went wrong, `source` who wrote the hint, `weight` the target's weight in the loss.
    """

    rollout_id: str
    turn: int
    kind: str
    hint: str
    source: str
    weight: float = 1.0


@dataclass(slots=True)
class DistillTarget:
    """A target in token ids.

    `positions` are the indices of the turn's sampled tokens in the training sample, the `sample_index`-th of
    the rollout; `teacher_positions` those of the same tokens in `teacher_ids`, the context with the hint.
    """

    rollout_id: str
    turn: int
    kind: str
    source: str
    sample_index: int
    positions: list[int]
    teacher_ids: list[int]
    teacher_positions: list[int]
    weight: float = 1.0


@dataclass(slots=True, frozen=True)
class Misaligned:
    """A target that could not be aligned, and why; dropped and counted."""

    rollout_id: str
    turn: int
    reason: str
