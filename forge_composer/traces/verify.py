"""Does a trace hold what the renderer would make of it again?

From a rollout's messages, tools and sampled ids alone, each turn's prompt is rebuilt and compared with
the recorded ids. A difference means that the trace was written with another tokenizer, template or
renderer, and that training on it would not be training on what was sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import parse_action, to_message
from forge_composer.rollout.episode import observation_messages
from forge_composer.types import Message, ParsedAction, Rollout, Turn


@dataclass(slots=True, frozen=True)
class Mismatch:
    """One difference between a trace and its re-rendering."""

    rollout_id: str
    turn: int
    """Number of the turn, from 0."""
    what: str
    """`prompt_ids`, `opens_sample` or `action`."""
    detail: str

    def __str__(self) -> str:
        return f"{self.rollout_id}, turn {self.turn}, {self.what}: {self.detail}"


def verify_rollout(rollout: Rollout, renderer: ChatRenderer) -> list[Mismatch]:
    """Render a rollout again; returns what differs, an empty list if nothing does."""
    found: list[Mismatch] = []

    def report(turn: int, what: str, detail: str) -> None:
        found.append(Mismatch(rollout.rollout_id, turn, what, detail))

    history = list(rollout.messages)
    previous: Turn | None = None
    for number, turn in enumerate(rollout.turns):
        expected, opens = _prompt(rollout, history, previous, renderer)
        if expected != turn.prompt_ids:
            report(number, "prompt_ids", _first_difference(turn.prompt_ids, expected))
        if opens != turn.opens_sample:
            report(number, "opens_sample", f"recorded {turn.opens_sample}, rendered {opens}")
        read = parse_action(renderer.decode(turn.completion_ids))
        if _without_ids(read) != _without_ids(turn.action):
            report(number, "action", f"recorded {turn.action!r}, read from the sampled ids {read!r}")
        history.append(to_message(turn.action))
        history.extend(observation_messages(turn))
        previous = turn
    return found


def _prompt(
    rollout: Rollout, history: list[Message], previous: Turn | None, renderer: ChatRenderer
) -> tuple[list[int], bool]:
    """The ids of the next prompt, and whether they open a sample."""
    if previous is None:
        return renderer.initial_ids(history, rollout.tools), True
    answers = len(observation_messages(previous))
    past, latest = history[: len(history) - answers], history[len(history) - answers :]
    suffix = renderer.continuation_ids(past, latest, rollout.tools)
    if suffix is None:
        return renderer.rerender_ids(history, rollout.tools), True
    return [*previous.prompt_ids, *previous.completion_ids, *suffix], False


def _without_ids(action: ParsedAction) -> ParsedAction:
    calls = tuple(dataclasses.replace(call, id="") for call in action.tool_calls)
    return dataclasses.replace(action, tool_calls=calls)


def _first_difference(recorded: Sequence[int], rendered: Sequence[int]) -> str:
    shared = min(len(recorded), len(rendered))
    at = next((i for i in range(shared) if recorded[i] != rendered[i]), shared)
    return (
        f"{len(recorded)} ids recorded, {len(rendered)} rendered; they part at {at}: "
        f"{list(recorded[at : at + 4])} recorded, {list(rendered[at : at + 4])} rendered"
    )
