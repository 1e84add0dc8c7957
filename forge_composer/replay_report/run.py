"""Asking the teachers over one ledger; the scripted ones are started, and Ctrl-C stops in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forge_composer.preferences.replay import OnStep, ReplayedStep, StepReplayer
from forge_composer.preferences.steps import StepState
from forge_composer.replay_report.questions import Question, questions
from forge_composer.replay_report.settings import ReplaySettings
from forge_composer.teachers.ledger import CallRecord
from forge_composer.teachers.opened import open_teachers


@dataclass(slots=True, frozen=True)
class Asked:
    """What came of asking.

    Attributes:
        questions: what the replay consists of, by teacher and request hash.
        steps: steps that all teachers were asked about, in the order of the traces.
        calls: every entry of the ledger on the questions of this replay, of earlier starts, too.
        earlier: id of the last entry that was there before this start; 0: none.
        recovered: calls that were in flight when an earlier start was killed.
        seconds: this start's wall time of asking.
        interrupted: it was told to stop before it was done.
    """

    questions: dict[tuple[str, str], Question]
    steps: list[ReplayedStep]
    calls: list[CallRecord]
    earlier: int
    recovered: int
    seconds: float
    interrupted: bool


async def ask_teachers(
    settings: ReplaySettings,
    states: Sequence[StepState],
    *,
    stop: asyncio.Event | None = None,
    on_step: OnStep | None = None,
) -> Asked:
    """Ask about all steps that the ledger has no answer for, until done or told to stop.

    Args:
        settings: teachers, budget, output folder.
        states: the steps.
        stop: set, it ends the asking: calls in flight are given up, and count at their bound.
        on_step: called with each step as it is done.

    Raises:
        BlockingIOError: another process works in the output folder.
        LedgerError: the ledger cannot be used.
        ValueError: a key is not in the environment.
    """
    opening = open_teachers(
        settings.output_dir, settings.teachers, settings.local_teachers, settings.replay.budget
    )
    async with opening as (pool, ledger):
        earlier = max((call.id for call in ledger.calls()), default=0)
        began = time.monotonic()
        steps, interrupted = await _replay(StepReplayer(pool, settings.replay), states, stop, on_step)
        seconds = time.monotonic() - began
        asked = questions(settings, states)
        calls = [call for call in ledger.calls() if (call.teacher, call.request) in asked]
        return Asked(asked, steps, calls, earlier, ledger.recovered, seconds, interrupted)


async def _replay(
    replayer: StepReplayer,
    states: Sequence[StepState],
    stop: asyncio.Event | None,
    on_step: OnStep | None,
) -> tuple[list[ReplayedStep], bool]:
    """The steps that were done, in the order of `states`, and whether it was stopped."""
    done: dict[str, ReplayedStep] = {}

    def note(step: ReplayedStep) -> None:
        done[step.state.step_id] = step
        if on_step is not None:
            on_step(step)

    asking = asyncio.ensure_future(replayer.replay_all(states, note))
    told = asyncio.ensure_future((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({asking, told}, return_when=asyncio.FIRST_COMPLETED)
        stopped = not asking.done()
    finally:
        told.cancel()
        asking.cancel()
        await asyncio.wait({asking})
    if not stopped:
        asking.result()  # raises what the replay raised
    return [done[state.step_id] for state in states if state.step_id in done], stopped
