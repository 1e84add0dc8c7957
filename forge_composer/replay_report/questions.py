"""Every question of a replay as the ledger knows it, and the most that it can cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forge_composer.preferences.steps import StepState
from forge_composer.replay_report.settings import ReplaySettings
from forge_composer.teachers.prices import upper_bound
from forge_composer.teachers.requests import TeacherRequest, wire_request


@dataclass(slots=True, frozen=True)
class Question:
    """One step, asked of one teacher once. `bound` is the most that one request can cost, nano-USD."""

    trace: str
    step: int
    sample: int
    bound: int


def questions(settings: ReplaySettings, states: Sequence[StepState]) -> dict[tuple[str, str], Question]:
    """The questions by teacher and request hash; equal questions of several steps are one."""
    return dict(reversed(list(_questions(settings, states))))


def _questions(
    settings: ReplaySettings, states: Sequence[StepState]
) -> Iterator[tuple[tuple[str, str], Question]]:
    for state in states:
        for sample in range(settings.replay.samples):
            request = TeacherRequest(state.trace, str(state.step), state.messages, state.tools, sample)
            for teacher in settings.teachers:
                wire = wire_request(teacher, request)
                bound = upper_bound(wire.bound, teacher.price)
                yield (teacher.name, wire.key), Question(state.trace, state.step, sample, bound)
