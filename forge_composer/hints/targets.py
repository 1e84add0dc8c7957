"""Which turns of a finished rollout went wrong.

A fault belongs to the turn that made it, which is not always the turn after which it shows: a failing test is
reported to the turn that ran the tests, and made by the one that wrote the code. Turns are targeted from the
first on, since later ones stand on what came before; a turn has one fault, the first that is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge_composer.teachers.actions import canonical_action
from forge_composer.types import Rollout, Turn

LOW_REWARD = "low_reward"
"""Kind of a rollout that failed and in which nothing showed."""
_RESULT_KINDS = frozenset({"test_failed", "timeout", "syntax_error"})
"""Faults of what was written, which may be an earlier turn."""


@dataclass(slots=True, frozen=True)
class Fault:
    """A turn that went wrong: `kind` is the environment's key or one of ours, `message` what was said."""

    turn: int
    kind: str
    message: str


def faults(rollout: Rollout, *, succeeded: bool) -> list[Fault]:
    """The faults of a rollout, one a turn, in order of the turns.

    Kinds beside the environment's: `repeated_action` (the same action as in an earlier turn),
    `truncated_turn` (cut off by its token limit) and, if the rollout did not succeed and nothing else was
    found about what it wrote, `low_reward` at the last turn that wrote something.
    """
    first: dict[int, Fault] = {}
    for fault in _found(rollout):
        first.setdefault(fault.turn, fault)
    written = last_write(rollout, len(rollout.turns) - 1)
    if not succeeded and written is not None and written not in first:
        first[written] = Fault(written, LOW_REWARD, "")
    return [first[turn] for turn in sorted(first)]


def _found(rollout: Rollout) -> Iterator[Fault]:
    seen: set[str] = set()
    for number, turn in enumerate(rollout.turns):
        for remark in turn.feedback:
            made_by = last_write(rollout, number) if remark.kind in _RESULT_KINDS else number
            yield Fault(number if made_by is None else made_by, remark.kind, remark.message)
        if turn.finish_reason == "length":
            yield Fault(number, "truncated_turn", "")
        action = canonical_action(turn.action)
        if action is not None and turn.action.tool_calls and _writes(turn):
            if action in seen:
                yield Fault(number, "repeated_action", "")
            seen.add(action)


def last_write(rollout: Rollout, until: int) -> int | None:
    """The last turn up to `until` that wrote something: called a tool with arguments, or answered in text."""
    for number in range(until, -1, -1):
        if _writes(rollout.turns[number]):
            return number
    return None


def _writes(turn: Turn) -> bool:
    calls = turn.action.tool_calls
    return any(call.arguments for call in calls) if calls else bool(turn.action.text.strip())
