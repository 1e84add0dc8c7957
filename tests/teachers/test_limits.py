"""Rate limits, Retry-After and the circuit breaker, on a clock that does not wait."""

from __future__ import annotations

import asyncio
from email.utils import formatdate

import pytest

from forge_composer.config.teachers import BreakerConfig
from forge_composer.teachers.breaker import Breaker, BreakerState
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.limits import RateLimits, TokenBucket, retry_after
from tests.teachers.endpoint import FakeClock


def most_in_a_minute(times: list[float], amounts: list[float]) -> float:
    """Largest sum over 60 seconds that begin with an entry."""
    return max(
        sum(amount for at, amount in zip(times, amounts, strict=True) if start <= at < start + 60 - 1e-6)
        for start in times
    )


@pytest.mark.parametrize("per_minute", [1, 2, 7, 60, 600])
async def test_requests_stay_below_the_limit_and_near_it(per_minute: int) -> None:
    clock = FakeClock()
    bucket = TokenBucket.of_requests(per_minute, clock)
    times = []
    for _ in range(4 * per_minute):
        await bucket.take(1)
        times.append(clock.now)
    assert most_in_a_minute(times, [1.0] * len(times)) == per_minute
    assert clock.now - 1000.0 <= 60 * 4 * 1.25  # all of them in the time that the limit needs


async def test_tokens_stay_below_the_limit() -> None:
    clock = FakeClock()
    limits = RateLimits(None, 6000, clock)
    times = []
    amounts = [400.0, 900.0, 100.0, 1000.0] * 10  # 24,000 tokens: 4 minutes
    for amount in amounts:
        await limits.take(int(amount))
        times.append(clock.now)
    assert most_in_a_minute(times, amounts) <= 6000
    assert 200 <= clock.now - 1000.0 <= 300


async def test_a_request_larger_than_the_bucket_is_paid_off_later() -> None:
    clock = FakeClock()
    bucket = TokenBucket(capacity=10, rate=1, clock=clock)
    await bucket.take(25)
    assert clock.now == 1000.0
    await bucket.take(5)  # the level is -15: 20 seconds until it is 5
    assert clock.now == pytest.approx(1020.0)


async def test_tokens_that_were_not_used_are_given_back() -> None:
    clock = FakeClock()
    limits = RateLimits(None, 60, clock)  # holds 10, gains 50 a minute
    await limits.take(10)
    limits.correct(10, 4)
    await limits.take(6)
    assert clock.slept == []
    limits.correct(6, 11)
    await limits.take(5)  # 5 in debt
    assert clock.now == pytest.approx(1000 + 10 / (50 / 60))


async def test_first_come_first_served() -> None:
    clock = FakeClock()
    bucket = TokenBucket(capacity=1, rate=1, clock=clock)
    order: list[int] = []

    async def one(number: int) -> None:
        await bucket.take(1)
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]
    assert clock.now == pytest.approx(1004.0)


async def test_a_pause_holds_all_calls() -> None:
    clock = FakeClock()
    limits = RateLimits(None, None, clock)
    limits.pause(30)
    limits.pause(10)
    await limits.take(1)
    assert clock.now == 1030.0


def test_an_impossible_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        TokenBucket(capacity=0, rate=1, clock=FakeClock())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        ("0.25", 0.25),
        ("-3", 0.0),
        ("100000", 120.0),
        ("inf", 120.0),
        ("nan", None),
        ("soon", None),
        ("", None),
        (formatdate(1_700_000_030, usegmt=True), 30.0),
        (formatdate(1_699_999_000, usegmt=True), 0.0),
        (formatdate(1_800_000_000, usegmt=True), 120.0),
        ("Wed, 99 Nov 2023 99:99:99 GMT", None),
    ],
)
def test_retry_after(value: str, expected: float | None) -> None:
    assert retry_after({"Retry-After": value}, now=1_700_000_000.0, most_s=120.0) == expected


def test_no_retry_after() -> None:
    assert retry_after({}, now=0.0, most_s=1.0) is None


def test_breaker_benches_probes_and_comes_back() -> None:
    clock = FakeClock()
    breaker = Breaker(BreakerConfig(failures=3, bench_s=10, bench_max_s=25), clock)
    for kind in ("timeout", "connection", "ok", "server_error", "server_error"):
        assert breaker.admit()
        breaker.record(ReplyKind(kind))
    assert breaker.state is BreakerState.CLOSED  # never three in a row
    breaker.record(ReplyKind.EMPTY)
    assert not breaker.admit()
    for bench in (10, 20, 25, 25):
        clock.now += bench - 0.1
        assert not breaker.admit()
        clock.now += 0.2
        assert breaker.admit()
        assert not breaker.admit()  # one probe at a time
        breaker.record(ReplyKind.TIMEOUT)
    clock.now += 25.1
    assert breaker.admit()
    breaker.record(ReplyKind.OVER_BUDGET)  # the probe was not sent: the next call is one
    assert breaker.admit()
    breaker.record(ReplyKind.REFUSAL)  # an answer, if no good one
    assert breaker.state is BreakerState.CLOSED
    assert breaker.benchings == 5


def test_busy_is_not_dead_but_busy_to_the_end_is() -> None:
    breaker = Breaker(BreakerConfig(failures=2), FakeClock())
    for _ in range(20):
        breaker.record(ReplyKind.RATE_LIMITED)
    assert breaker.admit()
    breaker.record(ReplyKind.RATE_LIMITED, last=True)
    breaker.record(ReplyKind.RATE_LIMITED, last=True)
    assert not breaker.admit()


@pytest.mark.parametrize("kind", ["unauthorized", "payment_required"])
def test_a_refused_key_or_an_empty_account_benches_at_once(kind: str) -> None:
    breaker = Breaker(BreakerConfig(), FakeClock())
    breaker.record(ReplyKind(kind))
    assert not breaker.admit()
