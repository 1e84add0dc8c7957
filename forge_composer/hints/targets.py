"""Which turns of a finished rollout went wrong.

A fault belongs to the turn that made it, which is not always the turn after which it shows: a failing test
is reported to the turn that ran the tests, and made by the one that wrote the code. A rollout that failed
without a word (its hidden tests did) has its fault where it last wrote something, since that is what was
graded; the first turn that differs from a successful sibling is often only another way to begin.

A turn may have several faults. They come in the order in which a hint about them helps most: what the
environment reported, that the rollout failed, that the turn repeats an earlier one, its style.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forge_composer.config.hints import StyleRule
from forge_composer.teachers.actions import canonical_action
from forge_composer.types import ParsedAction, Rollout, ToolCall, Turn

LOW_REWARD = "low_reward"
"""Kind of a rollout that failed."""
REPEATED = "repeated_action"
"""Kind of an action that was taken before and cannot have another result."""
TRUNCATED = "truncated_turn"
"""Kind of a turn that its token limit cut off."""
STYLE = "style/"
"""What the kind of a broken style rule begins with."""
FORM_KINDS = frozenset({"malformed_call", "unknown_tool", "bad_arguments", "no_call", "episode_over"})
"""Faults of how something was said, whatever it was."""

_RESULT_KINDS = frozenset({"test_failed", "timeout", "syntax_error"})
"""Faults of what was written, perhaps in an earlier turn."""
_REFUSALS = frozenset({"unknown_tool", "bad_arguments", "episode_over"})
"""Calls that were not carried out."""
_SILENT = frozenset({"malformed_call", "no_call"})
"""Turns whose text is no answer. In a turn that was cut off both follow from that."""


@dataclass(slots=True, frozen=True)
class Fault:
    """A turn that went wrong: `kind` is the environment's key or one of ours.

    `message` is what the environment said about it; empty if it said nothing *to the policy*. Remarks that
    stand in no observation are thus never repeated in a hint.
    """

    turn: int
    kind: str
    message: str


def faults(rollout: Rollout, *, succeeded: bool, style_rules: Sequence[StyleRule] = ()) -> list[Fault]:
    """The faults of a rollout in order of the turns, each kind once a turn.

    Kinds beside the environment's: `repeated_action`, `truncated_turn`, `style/NAME` and, if the rollout did
    not succeed, `low_reward` at the last turn that wrote something, or at the last turn if none did.
    """
    found: dict[tuple[int, str], Fault] = {}
    for fault in (
        *_reported(rollout),
        *_low_reward(rollout, succeeded),
        *_repeated(rollout),
        *_style(rollout, style_rules),
    ):
        found.setdefault((fault.turn, fault.kind), fault)
    return sorted(found.values(), key=lambda fault: fault.turn)


def _reported(rollout: Rollout) -> Iterator[Fault]:
    shown = [text for turn in rollout.turns for text in turn.observations]
    for number, turn in enumerate(rollout.turns):
        cut = turn.finish_reason == "length"
        for remark in turn.feedback:
            if cut and remark.kind in _SILENT:
                continue
            made_by = last_write(rollout, number) if remark.kind in _RESULT_KINDS else number
            if made_by is None:
                continue  # tests that ran before anything was written: no fault
            message = remark.message if any(remark.message in text for text in shown) else ""
            yield Fault(made_by, remark.kind, message)
        if cut:
            yield Fault(number, TRUNCATED, "")


def _low_reward(rollout: Rollout, succeeded: bool) -> Iterator[Fault]:
    if succeeded or not rollout.turns:
        return
    last = len(rollout.turns) - 1
    written = last_write(rollout, last)
    yield Fault(last if written is None else written, LOW_REWARD, "")


def _repeated(rollout: Rollout) -> Iterator[Fault]:
    """What was written before, and what was looked at before with nothing new written since."""
    written: set[str] = set()
    looked: set[str] = set()
    for number, turn in enumerate(rollout.turns):
        action = action_key(turn.action)
        writes = _writes(turn)
        if action in written or action in looked:
            yield Fault(number, REPEATED, "")
        elif writes:
            written.add(action)
            looked.clear()
        else:
            looked.add(action)


def _style(rollout: Rollout, rules: Sequence[StyleRule]) -> Iterator[Fault]:
    for number, turn in enumerate(rollout.turns):
        said = [turn.action.text, *_strings([call.arguments for call in turn.action.tool_calls])]
        for rule in rules:
            if any(re.search(rule.pattern, text) for text in said):
                yield Fault(number, f"{STYLE}{rule.name}", "")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def last_write(rollout: Rollout, until: int) -> int | None:
    """The last turn up to `until` that wrote something: a call with arguments that was carried out, or an
    answer in plain text."""
    for number in range(until, -1, -1):
        if _writes(rollout.turns[number]):
            return number
    return None


def written_action(turn: Turn) -> ParsedAction | None:
    """What a turn wrote last: its last call with arguments that was carried out, or its text."""
    if not turn.action.tool_calls:
        silent = any(remark.kind in _SILENT for remark in turn.feedback)
        said = turn.action.text.strip() and not silent and turn.action.error is None
        return ParsedAction(turn.action.text, reasoning=turn.action.reasoning) if said else None
    calls = [call for call in _carried_out(turn) if call.arguments]
    return ParsedAction("", (calls[-1],), turn.action.reasoning) if calls else None


def _writes(turn: Turn) -> bool:
    return written_action(turn) is not None


def _carried_out(turn: Turn) -> list[ToolCall]:
    """The calls whose answer is no refusal; answers come in the order of the calls."""
    refusals = {remark.message for remark in turn.feedback if remark.kind in _REFUSALS}
    answers = [*turn.observations, *[""] * len(turn.action.tool_calls)]
    return [
        call for call, answer in zip(turn.action.tool_calls, answers, strict=False) if answer not in refusals
    ]


def action_key(action: ParsedAction) -> str:
    """Equal for equal actions, also for those that did not parse."""
    return canonical_action(action) or json.dumps(
        [action.error, action.text, [[c.name, c.arguments] for c in action.tool_calls]]
    )
