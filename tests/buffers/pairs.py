"""Preference pairs by number, for the tests of their buffer."""

from __future__ import annotations

import dataclasses

from forge_composer.preferences.records import PairTokens, PreferencePair, TeacherVote
from forge_composer.types import ParsedAction, ToolCall


def make_pair(number: int, version: int = 0) -> PreferencePair:
    """Everything in it depends on the number, with values that lossy formats would change."""
    call = ToolCall(
        f"call-{number}", "write", {"body": f"x\u2028\U0001f600{number}\ud800", "n": [1, 2.5, None]}
    )
    return PreferencePair(
        trace=f"trace-{number // 3}",
        step=number % 3,
        messages=[{"role": "user", "content": f"do {number}"}],
        tools=[{"type": "function", "function": {"name": "write"}}],
        chosen=ParsedAction("", (call,)),
        rejected=ParsedAction("no", error="no call"),
        source="student",
        families=("a", "b"),
        weight=0.1 + 1 / (number + 3),
        votes=(TeacherVote("one", "a", "ok", "w", 0.1 + 0.2, 1.5, sample=1, attempts=2, cached=True),),
        cost_usd=0.1 * number,
        tokens=PairTokens((number, 1, 2), (3, number), (4, 5, number)),
        version=version,
        temperature=0.7,
        outcome={"chosen": 1.0, "rejected": float("inf")} if number == 7 else None,
        info={"deep": {"number": number}},
    )


def without_tokens(number: int) -> PreferencePair:
    return dataclasses.replace(make_pair(number), tokens=None)
