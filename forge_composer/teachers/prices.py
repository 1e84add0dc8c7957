"""What a call costs: a bound before it is sent, the price of its reply afterwards.

Money is counted in whole nano-USD (1e-9 USD), always rounded up, so that sums are exact and a budget is a
comparison of integers.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any

from forge_composer.config.teachers import PriceConfig

NANO = 1_000_000_000
"""Nano-USD in a USD."""
_MOST_TOKENS = 10_000_000
_MOST_USD = 1000.0
"""A reply that claims more than these is not believed."""
_EMPTY: dict[str, Any] = {}


class CostSource(enum.StrEnum):
    """Where the cost of a call is from."""

    PROVIDER = "provider"
    """The reply's `usage.cost`."""
    TABLE = "table"
    """The reply's token counts and the price table."""
    BOUND = "bound"
    """Nobody said, for one part at least: the upper bound."""
    NONE = "none"
    """Nothing was charged."""


@dataclass(slots=True, frozen=True)
class TokenBound:
    """Most tokens that a call can use."""

    prompt: int
    completion: int


@dataclass(slots=True, frozen=True)
class Cost:
    """What a call cost (nano-USD), where that is from, and its tokens as far as the reply said."""

    nano_usd: int
    source: CostSource
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def tokens(self) -> int | None:
        """All tokens, None if a part is not known."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens


def to_nano(usd: float) -> int:
    """USD as nano-USD, rounded up."""
    return _ceil(Decimal(repr(float(usd))) * NANO)


def to_usd(nano_usd: int) -> float:
    """Nano-USD as USD."""
    return nano_usd / NANO


def upper_bound(bound: TokenBound, price: PriceConfig | None) -> int:
    """Most that a call can cost by the price table, nano-USD; 0 without a table.

    No prompt is cheaper for being cached here, since nobody knows before.
    """
    return _by_table(bound.prompt, 0, bound.completion, price)


def cost_of(body: Any, bound: TokenBound, price: PriceConfig | None) -> Cost:
    """The cost of a reply, from its `usage`. Never raises.

    `usage.cost` counts where it is a sensible number; with a key of one's own at OpenRouter (`is_byok`) what
    the provider behind it charges is added. Else the token counts are priced by the table; a count that is
    missing, negative or no whole number is taken at its bound.

    Args:
        body: the decoded reply, anything.
        bound: most tokens that the call could use.
        price: the teacher's table; without one tokens cost nothing.
    """
    usage = _table(body, "usage")
    prompt = _count(usage.get("prompt_tokens"))
    completion = _count(usage.get("completion_tokens"))
    cached = _count(_table(usage, "prompt_tokens_details").get("cached_tokens"))
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    tokens = (prompt, cached, completion)
    if (said := _charged(usage)) is not None:
        return Cost(to_nano(said), CostSource.PROVIDER, *tokens)
    known = prompt is not None and completion is not None
    nano = _by_table(
        bound.prompt if prompt is None else prompt,
        cached or 0,
        bound.completion if completion is None else completion,
        price,
    )
    return Cost(nano, CostSource.TABLE if known else CostSource.BOUND, *tokens)


def has_usage(body: Any) -> bool:
    """True if a reply says anything about what it used."""
    return bool(_table(body, "usage"))


def _by_table(prompt: int, cached: int, completion: int, price: PriceConfig | None) -> int:
    if price is None:
        return 0
    full, output = Decimal(repr(price.input)), Decimal(repr(price.output))
    reduced = full if price.cached_input is None else Decimal(repr(price.cached_input))
    per_million = (prompt - cached) * full + cached * reduced + completion * output
    return _ceil(per_million * (NANO // 1_000_000))


def _charged(usage: dict[str, Any]) -> float | None:
    cost = _amount(usage.get("cost"))
    if cost is None or usage.get("is_byok") is not True:
        return cost
    upstream = _amount(_table(usage, "cost_details").get("upstream_inference_cost"))
    return None if upstream is None else cost + upstream


def _table(value: Any, key: str) -> dict[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else _EMPTY


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value <= _MOST_TOKENS or value != int(value):
        return None
    return int(value)


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _MOST_USD and math.isfinite(value) else None


def _ceil(value: Decimal) -> int:
    return int(value.to_integral_value(rounding=ROUND_CEILING))
