"""A preference pair, with everything that it was made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from forge_composer.types import Message, ParsedAction

ChosenSource = Literal["student", "rendered"]
"""`student`: the chosen tokens were sampled by the policy itself and match the agreed action. `rendered`: the
agreed action in the policy's chat template (or in its messages' form), which the policy never wrote."""


@dataclass(slots=True, frozen=True)
class TeacherVote:
    """What one teacher's reply came to. `action` is canonical; None where the reply could not be used."""

    teacher: str
    family: str
    kind: str
    """Kind of the reply (`forge_composer.teachers.kinds`)."""
    action: str | None
    cost_usd: float
    latency_s: float
    """On the wire, of all attempts, seconds; of a reply out of the ledger, when it was made."""
    sample: int = 0
    attempts: int = 0
    """Requests that were sent for it; 0 for a reply out of the ledger."""
    cached: bool = False
    """The reply came out of the ledger."""


@dataclass(slots=True, frozen=True)
class PairTokens:
    """The pair as the policy sees it: one context, two continuations, each with its turn-end token."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class PreferencePair:
    """One step of one trace where enough teachers agreed on something else than the student did.

    Attributes:
        trace: id of the trace.
        step: turn of the trace, from 0.
        messages: what the policy was given at the step.
        tools: that it could call.
        chosen: the agreed action, as it was said.
        rejected: the student's action.
        source: where the chosen side's words come from.
        families: model families that agree.
        weight: families that agree / families that gave a valid answer.
        votes: every reply on the step.
        cost_usd: spent on the step, all replies.
        tokens: None where no policy was at hand to tokenise for.
        version: policy version that sampled the rejected side; -1 if that is unknown.
        temperature: that it was sampled at.
        outcome: what playing both sides in the environment gave, where that was done: `chosen`, `rejected`.
        info: anything else, JSON-able.
    """

    trace: str
    step: int
    messages: list[Message]
    tools: list[dict[str, Any]]
    chosen: ParsedAction
    rejected: ParsedAction
    source: ChosenSource
    families: tuple[str, ...]
    weight: float
    votes: tuple[TeacherVote, ...]
    cost_usd: float
    tokens: PairTokens | None = None
    version: int = -1
    temperature: float = 1.0
    outcome: dict[str, float] | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def pair_id(self) -> str:
        """Names the pair within a run: trace and step."""
        return f"{self.trace}#{self.step}"
