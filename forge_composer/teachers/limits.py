"""How fast a teacher may be asked: requests and tokens per minute, and pauses that the endpoint asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

_WINDOW_S = 60.0
_BURST = 6
"""A full bucket holds this part of a minute's worth."""


class Clock:
    """Time as the client sees it. Tests put one in that does not wait."""

    def monotonic(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class TokenBucket:
    """A bucket of `capacity` units that is refilled at `rate` units a second; who takes waits until there
    are enough. First come, first served. For one event loop.

    What is larger than the bucket is let through once the bucket is full, and leaves it in debt: the next one
    waits for that.
    """

    def __init__(self, *, capacity: float, rate: float, clock: Clock) -> None:
        """Start full.

        Raises:
            ValueError: capacity or rate is not positive.
        """
        if capacity <= 0 or rate <= 0:
            raise ValueError(f"capacity and rate must be positive, got {capacity} and {rate}")
        self._capacity, self._rate, self._clock = capacity, rate, clock
        self._level, self._at = capacity, clock.monotonic()
        self._turn = asyncio.Lock()

    @classmethod
    def of_requests(cls, per_minute: int, clock: Clock) -> TokenBucket:
        """At most `per_minute` requests in any 60 seconds."""
        capacity = max(1, per_minute // _BURST)
        return cls(capacity=capacity, rate=(per_minute - capacity + 1) / _WINDOW_S, clock=clock)

    @classmethod
    def of_tokens(cls, per_minute: int, clock: Clock) -> TokenBucket:
        """At most `per_minute` tokens in any 60 seconds; a call of more than a sixth of them can pass the
        limit by its own size."""
        capacity = per_minute / _BURST
        return cls(capacity=capacity, rate=(per_minute - capacity) / _WINDOW_S, clock=clock)

    async def take(self, amount: float) -> None:
        """Wait for `amount` units and take them."""
        async with self._turn:
            enough = min(amount, self._capacity)
            while (missing := enough - self._refilled()) > 1e-9:
                await self._clock.sleep(missing / self._rate)
            self._level -= amount

    def give_back(self, amount: float) -> None:
        """Put units back that were taken and not used; a negative amount takes more without waiting."""
        self._level = min(self._capacity, self._refilled() + amount)

    def _refilled(self) -> float:
        now = self._clock.monotonic()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level


class RateLimits:
    """The limits of one teacher."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None, clock: Clock) -> None:
        """None is no limit."""
        self._clock = clock
        self._requests = TokenBucket.of_requests(requests_per_minute, clock) if requests_per_minute else None
        self._tokens = TokenBucket.of_tokens(tokens_per_minute, clock) if tokens_per_minute else None
        self._paused_until = 0.0

    async def take(self, tokens: int) -> None:
        """Wait until a call of about this many tokens may be sent."""
        if self._tokens is not None:
            await self._tokens.take(tokens)
        if self._requests is not None:
            await self._requests.take(1)
        while (left := self._paused_until - self._clock.monotonic()) > 0:
            await self._clock.sleep(left)

    def correct(self, taken: int, used: int) -> None:
        """Put right what a call was taken to need, when its reply says what it used."""
        if self._tokens is not None:
            self._tokens.give_back(taken - used)

    def pause(self, seconds: float) -> None:
        """Let no call through for so long."""
        self._paused_until = max(self._paused_until, self._clock.monotonic() + seconds)


def retry_after(headers: Mapping[str, str], *, now: float, most_s: float) -> float | None:
    """Seconds that an answer asks to wait (RFC 9110, section 10.2.3), at most `most_s`; None if it does not.

    Args:
        headers: the answer's headers; `Retry-After` is a number of seconds or an HTTP date.
        now: seconds since the epoch.
        most_s: cap, seconds.
    """
    value = headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now
    if seconds != seconds:
        return None
    return min(max(seconds, 0.0), most_s)
