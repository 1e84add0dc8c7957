"""The verdict: what was measured against the limits of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge_composer.config.replay import ReplayLimits

Result = Literal["pass", "fail", "undecided"]


@dataclass(slots=True, frozen=True)
class Check:
    """One limit.

    Attributes:
        name: its field in `replay.limits`.
        title: what is measured, in words.
        value: what was measured; None if nothing could be.
        limit: from the config.
        at_least: the value has to reach the limit, and not to stay below it.
        result: `undecided` where nothing was measured, or where missing calls could change the answer.
    """

    name: str
    title: str
    value: float | None
    limit: float
    at_least: bool
    result: Result

    @property
    def holds(self) -> bool | None:
        """Whether the limit is held; None if that is open."""
        return {"pass": True, "fail": False, "undecided": None}[self.result]


def judge(
    limits: ReplayLimits,
    *,
    whole: bool,
    usd_per_trace: float | None,
    latency_p95_s: float | None,
    errors: int,
    pairs_per_trace: float | None,
    p_value: float | None,
) -> tuple[Check, ...]:
    """Hold the numbers against the limits.

    Cost and errors only grow: one that is too high already fails whatever is missing. The rest is undecided
    as long as calls are missing.
    """
    return (
        _check("usd_per_trace", "cost a trace, USD", usd_per_trace, limits.usd_per_trace, whole, grows=True),
        _check("latency_p95_s", "p95 of a step, s", latency_p95_s, limits.latency_p95_s, whole),
        _check("errors", "calls without a usable reply", errors, limits.errors, whole, grows=True),
        _check(
            "pairs_per_trace",
            "pairs a trace",
            pairs_per_trace,
            limits.pairs_per_trace,
            whole,
            at_least=True,
        ),
        _check("p_value", "p against chance", p_value, limits.p_value, whole),
    )


def _check(
    name: str,
    title: str,
    value: float | None,
    limit: float,
    whole: bool,
    *,
    grows: bool = False,
    at_least: bool = False,
) -> Check:
    result: Result = "undecided"
    if value is not None:
        held = value >= limit if at_least else value <= limit
        if whole or (grows and not held):
            result = "pass" if held else "fail"
    return Check(name, title, value, limit, at_least, result)
