"""Who writes the hint for a target."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forge_composer.config.hints import HintsConfig, HintSourceName
from forge_composer.hints import texts
from forge_composer.hints.filters import already_said
from forge_composer.hints.targets import FORM_KINDS, STYLE, Fault, last_write, written_action
from forge_composer.teachers.actions import canonical_action
from forge_composer.types import ParsedAction, Rollout


@dataclass(slots=True, frozen=True)
class HintRequest:
    """What a source may look at: the fault, its rollout, and the successes of the group, in order."""

    fault: Fault
    rollout: Rollout
    successes: Sequence[Rollout]
    rng: random.Random
    """Seeded by the run, the rollout and the turn."""
    max_chars: int
    """Longest hint that is used."""
    counts: Counter[str] = field(default_factory=Counter)
    """Where a source counts what went wrong."""


class HintSource(Protocol):
    """Writes one hint, or has nothing to say."""

    async def write(self, request: HintRequest) -> str | None:
        """The hint's text, or None. Never raises for what a rollout or an endpoint may hold."""
        ...


class TemplateHints:
    """A reminder for a fault of form or style."""

    def __init__(self, config: HintsConfig) -> None:
        style = {f"{STYLE}{rule.name}": rule.hint for rule in config.style_rules}
        self._style = style

    async def write(self, request: HintRequest) -> str | None:
        """The template of the fault's kind, filled in; a style rule's own text."""
        fault = request.fault
        if fault.kind in self._style:
            return self._style[fault.kind]
        template = texts.TEMPLATES.get(fault.kind)
        if template is None or ("{message}" in template and not fault.message):
            return None
        tools = ", ".join(tool["function"]["name"] for tool in request.rollout.tools)
        return template.format(tools=tools, message=fault.message)


class FeedbackHints:
    """What the environment said about the turn."""

    async def write(self, request: HintRequest) -> str | None:
        """Its message; None for faults that only we found, and if the turn's context holds it already."""
        fault = request.fault
        if not fault.message or already_said(fault.message, request.rollout, fault.turn):
            return None
        return texts.FEEDBACK.format(feedback=fault.message)


class SiblingHints:
    """What a successful rollout of the same group wrote last, picked at random.

    At random, since the shortest one, or always the same, makes the policy collapse to it. The rollout itself
    is no example, an action that is the targeted turn's own says nothing, and half of a demonstration would
    say something wrong: one that is too long is left out.
    """

    def __init__(self, config: HintsConfig) -> None:
        self._strip_thinking = config.strip_thinking

    async def write(self, request: HintRequest) -> str | None:
        """A demonstration, for faults of what was done and not of how it was said."""
        kind = request.fault.kind
        if kind in FORM_KINDS or kind.startswith(STYLE):
            return None
        own = written_action(request.rollout.turns[request.fault.turn])
        demonstrations = [
            demonstration
            for sibling in request.successes
            if sibling.rollout_id != request.rollout.rollout_id
            and (action := _written_last(sibling)) is not None
            and (own is None or canonical_action(action) != canonical_action(own))
            and len(demonstration := self._demonstration(action)) <= request.max_chars
        ]
        return request.rng.choice(demonstrations) if demonstrations else None

    def _demonstration(self, action: ParsedAction) -> str:
        if not action.tool_calls:
            said = texts.ACTION.format(action=action.text)
        else:
            call = action.tool_calls[0]
            body = call.arguments.get("body")
            if isinstance(body, str) and len(call.arguments) == 1:
                said = texts.DEMONSTRATION.format(body=body)
            else:
                written = {"name": call.name, "arguments": call.arguments}
                said = texts.ACTION.format(action=json.dumps(written, ensure_ascii=False))
        if self._strip_thinking or not action.reasoning:
            return said
        return texts.REASONED.format(reasoning=action.reasoning, demonstration=said)


def _written_last(rollout: Rollout) -> ParsedAction | None:
    number = last_write(rollout, len(rollout.turns) - 1)
    return None if number is None else written_action(rollout.turns[number])


def make_sources(config: HintsConfig) -> dict[HintSourceName, HintSource]:
    """The configured sources, in order.

    Raises:
        ValueError: the judge's key is not in the environment.
    """
    sources: dict[HintSourceName, HintSource] = {}
    for name in config.sources:
        match name:
            case "template":
                sources[name] = TemplateHints(config)
            case "feedback":
                sources[name] = FeedbackHints()
            case "sibling":
                sources[name] = SiblingHints(config)
            case "judge":
                from forge_composer.hints.judge import JudgeHints  # its HTTP client, only where it is used

                sources[name] = JudgeHints(config.judge)
    return sources
