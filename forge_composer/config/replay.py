"""Options of trace replay: which steps the teachers are asked about, when they count as agreed, what becomes
a pair, and how long a pair is used."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from forge_composer._section import Section
from forge_composer.config.teachers import BudgetConfig
from forge_composer.teachers.actions import TextEquivalence

StepChoice = Literal["all", "every", "failing", "entropy"]
OutcomeGate = Literal["off", "not_worse", "better"]


class PairBufferConfig(Section):
    """The buffer between the replay and the trainer."""

    capacity: PositiveInt = 1024
    """Pairs that are kept; beyond it the oldest one goes."""
    max_lag: int = Field(8, ge=0)
    """Largest age of a pair in policy versions, from the one that sampled its rejected side; older ones
    go."""
    max_uses: PositiveInt = 1
    """Optimizer steps that a pair takes part in."""
    pairs_per_step: PositiveInt = 32
    """Most pairs of one optimizer step."""
    reference: Literal["at_insert", "initial"] = "at_insert"
    """Policy that the log-ratios are measured from: the one in training as the pair comes in, or the one
    that the run starts with, of which the trainer then holds a frozen copy."""


class ReplayLimits(Section):
    """What `apps.replay_teachers` holds a replay against for its verdict."""

    usd_per_trace: PositiveFloat = 5.0
    """Most that a trace may cost, USD."""
    latency_p95_s: PositiveFloat = 30.0
    """Longest 95th percentile of a step's latency, that of its slowest teacher; seconds."""
    errors: int = Field(0, ge=0)
    """Most calls without a usable reply."""
    pairs_per_trace: NonNegativeFloat = 5.0
    """Fewest useful pairs a trace, mean."""
    p_value: float = Field(0.05, gt=0, lt=1)
    """Largest p of the test against teachers who do not look at the step."""


class ReplayConfig(Section):
    """Replay of recorded steps to the `teachers`; in effect when `loss.replay_dpo.weight` is above 0, and in
    `apps.replay_teachers`."""

    traces: Literal["all", "failed"] = "failed"
    """Which rollouts of a run are replayed; `failed`: those with a reward below 1. Void ones never are; a
    trace of others whose reward is unknown is."""
    steps: StepChoice = "failing"
    """Steps of a trace that the teachers are asked about. `all`; `every`: each `every`-th; `failing`: those
    that do not parse or that the environment complained about (a failing test: also the one that wrote the
    code), and of a failed trace the last one and the last that wrote something; `entropy`: the share
    `entropy_share` of the steps that the policy was least sure of (mean negative log-probability of its
    tokens), as an estimate of what an answer is worth; steps without log-probabilities are left out."""
    every: PositiveInt = 2
    """For `steps = "every"`: the first step and each so-manieth after it."""
    entropy_share: float = Field(0.25, gt=0, le=1)
    """For `steps = "entropy"`: share of a trace's steps, at least one."""
    max_steps_per_trace: PositiveInt | None = None
    """Most steps of one trace; the earliest chosen ones come first. None: no limit."""
    samples: PositiveInt = 1
    """Answers of each teacher to a step; a teacher's vote is its most frequent one."""
    text: TextEquivalence = "words"
    """When two turns without a tool call are the same action."""
    quorum: PositiveInt = 2
    """Model families that have to agree."""
    min_quorum: PositiveInt = 2
    """Where fewer than `quorum` families give a valid answer (teachers are down), so many that agree are
    enough; with fewer families than this the step gives no pair."""
    student_samples: int = Field(4, ge=0)
    """Samples of the policy at the step among which the chosen side is looked for: its own words teach
    better than a stronger model's (Step-DPO, arXiv 2406.18629). 0: the agreed action is always rendered."""
    rendered: Literal["keep", "drop"] = "keep"
    """Pairs whose chosen side the policy did not write itself."""
    outcome_gate: OutcomeGate = "off"
    """Play both sides to their end in the environment and keep the pair only if the chosen one is
    `not_worse`, or `better`. Costs two episodes a pair."""
    audit_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the pairs that the environment grades without filtering them: how often the teachers agree
    on something worse (metrics `replay/audit_...`). Under an outcome gate all pairs are played, and counted
    there."""
    max_side_tokens: PositiveInt = 1024
    """Longest side of a pair, tokens."""
    max_length_ratio: PositiveFloat = 4.0
    """Largest ratio of the two sides' lengths in tokens; DPO learns length where it can."""
    concurrency: PositiveInt = 16
    """Steps that are asked about at once."""
    queue: PositiveInt = 512
    """Steps that wait to be asked about, most; beyond it the oldest is given up and counted."""
    buffer: PairBufferConfig = Field(default_factory=PairBufferConfig)
    """The pair buffer."""
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """What may be spent."""
    limits: ReplayLimits = Field(default_factory=ReplayLimits)
    """Limits of the verdict."""

    @model_validator(mode="after")
    def _quorums_fit(self) -> ReplayConfig:
        if self.min_quorum > self.quorum:
            raise ValueError(f"min_quorum = {self.min_quorum} is above quorum = {self.quorum}")
        return self
