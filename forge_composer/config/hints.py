"""Options of targeted textual feedback: which turns are targeted, who writes the hint, where it stands."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from forge_composer._section import Section
from forge_composer.config.endpoints import plain_url

HintSourceName = Literal["template", "sibling", "feedback", "judge"]
HintPosition = Literal["user", "system", "observation"]


class StyleRule(Section):
    """What a turn must not look like."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """Short name; the fault's kind is `style/` and this."""
    pattern: str = Field(min_length=1)
    """Regular expression; a turn breaks the rule where it is found in the text or in a string argument of a
    call. The reasoning does not count."""
    hint: str = Field(min_length=1)
    """What the teacher is told."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class JudgeConfig(Section):
    """A model that writes hints, at an OpenAI-compatible endpoint. It reads the rollout and nothing else."""

    base_url: str | None = None
    """Base URL of the endpoint, up to `/v1`."""
    model: str | None = None
    """Model id at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None for an endpoint without one."""
    timeout_s: PositiveFloat = 20.0
    """Longest wait for one hint, retries and the wait for a free slot included; there is none after it."""
    attempts: PositiveInt = 2
    """Times that a hint is asked for when the endpoint cannot be reached, is busy or fails."""
    max_concurrent: PositiveInt = 8
    """Requests at once."""
    max_tokens: PositiveInt = 512
    """Longest answer, tokens; a judge that thinks first needs more."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    max_trace_chars: int = Field(12_000, ge=1000)
    """Most characters of the rollout that the judge is shown; the targeted turn is kept."""

    @field_validator("base_url")
    @classmethod
    def _is_plain_url(cls, url: str | None) -> str | None:
        return None if url is None else plain_url(url)


class GuardConfig(Section):
    """What a run that distils must not do. Limits are relative to the mean of the run's first window."""

    action: Literal["off", "lower", "stop"] = "lower"
    """`lower`: multiply alpha by `factor` and warn. `stop`: end the run with the reason. `off`: do
    nothing."""
    window: PositiveInt = 8
    """Steps that are averaged; the first so many are the measure for the others."""
    max_jsd_growth: PositiveFloat = 3.0
    """Largest divergence of teacher and student."""
    min_entropy: float = Field(0.1, ge=0)
    """Smallest entropy of the policy."""
    max_entropy: PositiveFloat = 3.0
    """Largest entropy of the policy."""
    min_length: float = Field(0.25, ge=0)
    """Smallest mean number of sampled tokens a rollout."""
    max_length: PositiveFloat = 2.5
    """Largest mean number of sampled tokens a rollout."""
    max_reward_drop: PositiveFloat = 0.15
    """Largest fall of the mean held-out reward below the best evaluation of the run; absolute."""
    factor: float = Field(0.5, ge=0, lt=1)
    """What `lower` multiplies alpha by, each time."""
    floor: float = Field(0.1, ge=0, lt=1)
    """Below this share of alpha the channel is switched off."""


class HintsConfig(Section):
    """Targets and hints of the SDPO channel; in effect when `loss.sdpo.weight` is above 0."""

    sources: tuple[HintSourceName, ...] = Field(("template", "sibling", "feedback"), min_length=1)
    """Who writes the hint; the first that has something to say does. `template`: a reminder for what the
    environment reports (malformed call, unknown tool, wrong arguments). `sibling`: what a successful rollout
    of the same group did. `feedback`: the environment's own message. `judge`: a model (`judge`)."""
    position: HintPosition = "user"
    """Where the hint stands, just before the targeted turn: a `user` or `system` message of its own, or at
    the end of the last `observation`."""
    scope: Literal["turn", "rollout"] = "turn"
    """What is distilled. `turn`: the turn that went wrong, with the hint just before it (Composer 2.5).
    `rollout`: all turns, with the first target's hint before the first one (SDPO, arXiv 2601.20802)."""
    max_targets_per_rollout: PositiveInt = 2
    """Most turns of one rollout that are targeted; the earliest faults come first."""
    max_hint_chars: PositiveInt = 600
    """A longer hint is cut, at the end of a line where there is one; a longer demonstration is not used."""
    routing: Literal["failed", "all"] = "failed"
    """`failed`: only rollouts under `success_threshold` are distilled, correct ones are left to GRPO (SRPO,
    arXiv 2604.02288: distilling them is one cause of collapse). `all`: every rollout."""
    success_threshold: float = 1.0
    """Reward from which on a rollout is a success: not targeted, and a demonstration for its siblings."""
    strip_thinking: bool = True
    """Leave the reasoning out of demonstrations."""
    weight_by_success: bool = False
    """Weigh targets by sqrt(p (1 - p)) with the group's success rate p (SC-SDPO, arXiv 2605.27765)."""
    ignore: tuple[str, ...] = ()
    """Kinds of faults that are not targeted (`test_failed`, `unknown_tool`, `repeated_action`, ...)."""
    style_rules: tuple[StyleRule, ...] = ()
    """Rules of style (array of tables); a turn that breaks one is targeted if nothing else is wrong with
    it."""
    regrade_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the targets whose turn is taken again, with the hint and without it, and played to the end:
    how often the teacher is the better one (metrics `regrade/...`). Each costs two episodes; the step
    waits."""
    guard: GuardConfig = Field(default_factory=GuardConfig)
    """The guard against collapse."""
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """The judge, if it is among the `sources`."""

    @model_validator(mode="after")
    def _sources_can_speak(self) -> HintsConfig:
        if len(set(self.sources)) != len(self.sources):
            raise ValueError("hints.sources: each source once")
        if "judge" in self.sources and (self.judge.base_url is None or self.judge.model is None):
            raise ValueError("hints.sources has 'judge': set hints.judge.base_url and hints.judge.model")
        if len({rule.name for rule in self.style_rules}) != len(self.style_rules):
            raise ValueError("hints.style_rules: two rules of one name")
        return self
