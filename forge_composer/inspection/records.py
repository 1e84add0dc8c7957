"""What is found out about a target. Plain data, free of torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_composer.hints.records import Target

LEVELS = (0.001, 0.01, 0.05, 0.2)
"""Divergences, nats, at which a token's colour grows stronger; a Jensen-Shannon divergence of even shares is
at most ln 2 = 0.69."""
NO_EFFECT = LEVELS[0]
"""A target with a smaller mean divergence has a hint that changes nothing."""

REASONS = {
    "no hint": "the hint is empty",
    "no token": "no token of the turn was sampled by the policy itself",
    "template": "the chat template cannot render this history, or cannot go on after the turn before",
    "context": "the turn's context, rendered again, is not the one it was sampled in: another tokenizer, "
    "chat template or version than the run's",
    "hidden": "the chat template leaves the hint out",
    "rewritten": "with the hint the chat template renders more than the hint differently",
    "too long": "with the hint the context is longer than trainer.seq_len, whatever is left out",
    "no rollout": "traces/train.jsonl does not hold the rollout",
    "no turn": "the rollout has no such turn",
}
"""Why a target has no teacher context, in words."""


class InspectionError(ValueError):
    """Something given cannot be used; the message says what, and what to do."""


@dataclass(slots=True, frozen=True)
class StepTarget:
    """A target, and the optimizer step that it was distilled in."""

    step: int
    target: Target


@dataclass(slots=True, frozen=True)
class TokenView:
    """One sampled token of a distilled turn, as both sides see it.

    Divergence and log-probabilities are in nats. `best_text` is the token that the teacher finds likeliest in
    this place, `best_probability` its probability.
    """

    token_id: int
    text: str
    jsd: float
    student_logprob: float
    teacher_logprob: float
    best_id: int
    best_text: str
    best_probability: float

    @property
    def advantage(self) -> float:
        """log p_T - log p_S: below 0 the hint speaks against the token."""
        return self.teacher_logprob - self.student_logprob

    @property
    def level(self) -> int:
        """Strength of the colour, 0 (none) to `len(LEVELS)`."""
        return sum(self.jsd >= edge for edge in LEVELS)


@dataclass(slots=True, frozen=True)
class ContextView:
    """The teacher's context in text: what is the student's too, what the hint put in its place, the rest."""

    before: str
    inserted: str
    after: str
    shortened: bool
    """Old observations were left out to make room: `inserted` then holds more than the hint."""


@dataclass(slots=True, frozen=True)
class TurnView:
    """A distilled turn, counted from 0: what it answers, as (role, text), and its tokens."""

    number: int
    before: Sequence[tuple[str, str]]
    tokens: Sequence[TokenView]


@dataclass(slots=True, frozen=True)
class TargetView:
    """A target with both sides' view of its turn; of several turns under `hints.scope = "rollout"`.

    `answers` is what came back after the last turn, as (role, text).
    """

    step: int
    target: Target
    task_id: str
    reward: float | None
    rollout_turns: int
    turns: Sequence[TurnView]
    answers: Sequence[tuple[str, str]]
    context: ContextView

    @property
    def tokens(self) -> list[TokenView]:
        """The tokens of all its turns."""
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def jsd(self) -> float:
        """Mean divergence of the tokens, nats."""
        return statistics.fmean(token.jsd for token in self.tokens)

    @property
    def advantage(self) -> float:
        """Mean of log p_T - log p_S over the tokens, nats."""
        return statistics.fmean(token.advantage for token in self.tokens)


@dataclass(slots=True, frozen=True)
class Unaligned:
    """A target whose teacher context could not be built and checked; `reason` is a key of `REASONS`."""

    step: int
    target: Target
    reason: str

    @property
    def explanation(self) -> str:
        """The reason in words."""
        return REASONS.get(self.reason, self.reason)


@dataclass(slots=True, frozen=True)
class Summary:
    """Several targets in numbers.

    Attributes:
        targets: how many were measured.
        tokens: their tokens.
        jsd: mean divergence, nats; over tokens, as `sdpo/jsd` is.
        advantage: mean of log p_T - log p_S, nats; over tokens, as `sdpo/teacher_advantage` is.
        positive: share of targets whose teacher finds the turn likelier than the student does.
        no_effect: share of targets with a mean divergence below `NO_EFFECT`.
    """

    targets: int
    tokens: int
    jsd: float
    advantage: float
    positive: float
    no_effect: float


@dataclass(slots=True, frozen=True)
class Inspection:
    """What the command shows.

    `shown` are the targets with all their tokens; the summaries are over everything that was measured, which
    is more where the targets were sorted by a measurement.
    """

    run: Path
    model: Path
    settings: Mapping[str, float | int | str]
    found: int
    """Targets of the run that fit the selection."""
    order: str
    """How the shown ones were chosen, in words."""
    shown: Sequence[TargetView]
    unaligned: Sequence[Unaligned]
    total: Summary | None
    by_kind: Mapping[str, Summary]
    by_source: Mapping[str, Summary]
    notes: Sequence[str] = field(default_factory=tuple)
