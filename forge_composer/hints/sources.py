"""Who writes the hint for a target.

Nothing here can tell more than the policy's own group has seen: templates and feedback repeat what the
environment said to the policy, a demonstration is what a sibling wrote. Hidden tests never leave the
environment's server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_composer.config.hints import HintSourceName
from forge_composer.hints import texts
from forge_composer.hints.targets import Fault, last_write
from forge_composer.rendering.tool_calls import to_message
from forge_composer.teachers.actions import canonical_action
from forge_composer.types import ParsedAction, Rollout


@dataclass(slots=True, frozen=True)
class HintRequest:
    """What a source may look at: the fault, its rollout, and the successes of the group, in order."""

    fault: Fault
    rollout: Rollout
    successes: Sequence[Rollout]
    rng: random.Random
    """Seeded by the run and the rollout."""


class HintSource(Protocol):
    """Writes one hint, or has nothing to say."""

    def write(self, request: HintRequest) -> str | None:
        """The hint's text, or None."""
        ...


class TemplateHints:
    """A reminder for a fault of form."""

    def write(self, request: HintRequest) -> str | None:
        """The template of the fault's kind, filled in."""
        template = texts.TEMPLATES.get(request.fault.kind)
        if template is None:
            return None
        tools = ", ".join(tool["function"]["name"] for tool in request.rollout.tools)
        return template.format(tools=tools, message=request.fault.message)


class FeedbackHints:
    """What the environment said about the turn."""

    def write(self, request: HintRequest) -> str | None:
        """Its message; None for faults that only we found."""
        message = request.fault.message
        return texts.FEEDBACK.format(feedback=message) if message else None


class SiblingHints:
    """What a successful rollout of the same group wrote last, picked at random.

    At random, since the shortest one, or always the same, makes the policy collapse to it. The rollout itself
    is no example, and an action that is the targeted turn's own says nothing.
    """

    def write(self, request: HintRequest) -> str | None:
        """A demonstration, for faults of what was written."""
        if request.fault.kind in texts.TEMPLATES:
            return None
        own = canonical_action(request.rollout.turns[request.fault.turn].action)
        actions = [
            action
            for sibling in request.successes
            if sibling.rollout_id != request.rollout.rollout_id
            and (action := _written(sibling)) is not None
            and canonical_action(action) != own
        ]
        return _demonstration(request.rng.choice(actions)) if actions else None


def _written(rollout: Rollout) -> ParsedAction | None:
    number = last_write(rollout, len(rollout.turns) - 1)
    return None if number is None else rollout.turns[number].action


def _demonstration(action: ParsedAction) -> str:
    """The text of the only argument there is, or the whole action; without its reasoning."""
    arguments = [value for call in action.tool_calls for value in call.arguments.values()]
    if len(arguments) == 1 and isinstance(arguments[0], str):
        return texts.DEMONSTRATION.format(body=arguments[0])
    message = to_message(action)
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return texts.ACTION.format(action=json.dumps(calls) if calls else message["content"])


SOURCES: dict[HintSourceName, HintSource] = {
    "template": TemplateHints(),
    "sibling": SiblingHints(),
    "feedback": FeedbackHints(),
}
