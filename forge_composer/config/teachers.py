"""Options of the teachers: endpoint, sampling, prices, limits, retries; and what a replay may spend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from forge_composer._section import Section
from forge_composer.config.endpoints import plain_url

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_OWN_FIELDS = frozenset(
    {
        "model", "messages", "tools", "stream", "n", "seed", "temperature", "top_p", "max_tokens",
        "max_completion_tokens", "reasoning_effort", "reasoning",
    }
)  # fmt: skip


class PriceConfig(Section):
    """What an endpoint charges, USD per million tokens."""

    input: NonNegativeFloat
    """Tokens of the prompt."""
    cached_input: NonNegativeFloat | None = None
    """Tokens of the prompt that the endpoint had in its cache; None: as `input`."""
    output: NonNegativeFloat
    """Tokens of the answer, its reasoning included."""


class TeacherSampling(Section):
    """How a teacher samples; what is None is left to the endpoint."""

    temperature: NonNegativeFloat | None = None
    """Sampling temperature."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    max_tokens: PositiveInt = 4096
    """Longest answer in tokens, reasoning included; it bounds what a call can cost."""
    seed: int | None = None
    """Seed, where the endpoint takes one; sample k of a step uses `seed + k`."""


class RetryConfig(Section):
    """When a call is sent again: after 429, 5xx, a lost connection, a time-out, a body that is cut short and
    an empty reply."""

    attempts: PositiveInt = 6
    """Times that a call is sent, the first included."""
    backoff_s: PositiveFloat = 0.5
    """The wait after the first failure is drawn from 0 to this; the range doubles with each failure."""
    backoff_max_s: PositiveFloat = 30.0
    """Most that the range grows to."""
    retry_after_max_s: NonNegativeFloat = 120.0
    """Longest wait that an endpoint can ask for with Retry-After; the drawn wait comes on top."""


class BreakerConfig(Section):
    """When a teacher that only fails is left alone."""

    failures: PositiveInt = 8
    """Failed attempts in a row that bench a teacher; a refused key or an empty account does so at once."""
    bench_s: PositiveFloat = 30.0
    """Time on the bench before one call probes the teacher; doubles with each probe that fails."""
    bench_max_s: PositiveFloat = 600.0
    """Longest time on the bench."""


class TeacherConfig(Section):
    """One teacher: an OpenAI-compatible endpoint."""

    name: str = Field(min_length=1)
    """Name in tables and ledgers."""
    model: str = Field(min_length=1)
    """Model id at the endpoint."""
    base_url: str
    """Base URL of the endpoint, up to `/v1`."""
    family: str | None = None
    """Model family; teachers of one family have one vote. None: what stands before the `/` of the model id,
    else the model id."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None for an endpoint without one."""
    dialect: Literal["auto", "openai", "openrouter"] = "auto"
    """How reasoning is asked for: `openai` sends `reasoning_effort`, `openrouter` a `reasoning` table. `auto`
    goes by the host."""
    sampling: TeacherSampling = Field(default_factory=TeacherSampling)
    """Sampling."""
    reasoning_effort: ReasoningEffort | None = None
    """How long the teacher thinks; None leaves it to the endpoint."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Under which name `sampling.max_tokens` is sent; OpenAI's reasoning models want the second."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, as they are: OpenRouter's `provider`, vLLM's `chat_template_kwargs`, ..."""
    price: PriceConfig | None = None
    """Prices. They bound what a call can cost before it is sent, and price a reply without `usage.cost`.
    Needed for every endpoint that is not on this machine."""
    concurrency: PositiveInt = 8
    """Calls at once."""
    requests_per_minute: PositiveInt | None = None
    """Most calls in a minute; None: no limit."""
    tokens_per_minute: PositiveInt | None = None
    """Most tokens in a minute, prompts and answers; None: no limit."""
    timeout_s: PositiveFloat = 120.0
    """Longest wait for one reply."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """Retries."""
    breaker: BreakerConfig = Field(default_factory=BreakerConfig)
    """Circuit breaker."""

    @property
    def family_name(self) -> str:
        """The family that the teacher counts for."""
        return (self.family or self.model.partition("/")[0]).strip().casefold()

    @field_validator("base_url")
    @classmethod
    def _is_plain_url(cls, url: str) -> str:
        return plain_url(url, fragment=False)

    @field_validator("extra_body")
    @classmethod
    def _leaves_own_fields(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OWN_FIELDS & extra.keys()):
            raise ValueError(f"{', '.join(taken)}: set by the teacher's own options, not here")
        return extra

    @model_validator(mode="after")
    def _has_a_price(self) -> TeacherConfig:
        if self.price is None and urlsplit(self.base_url).hostname not in _THIS_MACHINE:
            raise ValueError(
                f"teacher {self.name!r} has no price, so no budget would hold: set price.input and "
                "price.output (USD per million tokens; 0 for an endpoint that costs nothing)"
            )
        return self


def doubled_names(teachers: Sequence[TeacherConfig]) -> list[str]:
    """Names that more than one teacher has, in order."""
    return sorted(name for name, count in Counter(one.name for one in teachers).items() if count > 1)


def too_few_families(teachers: Sequence[TeacherConfig], min_quorum: int) -> str | None:
    """Why no step could give a pair, in words; None if the teachers are of enough model families."""
    families = {teacher.family_name for teacher in teachers}
    if len(families) >= min_quorum:
        return None
    return f"the teachers are of {len(families)} model families, so that no step could give a pair"


_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


class BudgetConfig(Section):
    """What a replay may spend. A call that does not fit is not sent."""

    run_usd: NonNegativeFloat = 25.0
    """Most that a run spends on teachers, USD, over all its starts."""
    per_trace_usd: NonNegativeFloat = 5.0
    """Most that one trace costs, USD."""
