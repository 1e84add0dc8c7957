"""Asking a teacher: limits, ledger, HTTP, retries, and what the reply is.

`TeacherClient.ask` never fails for what an endpoint does: what came of the call is the `kind` of its reply.
Keys are read from the environment once and go into the Authorization header only; a key that an endpoint
sends back is cut out of the reply before anything else sees it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import tenacity

from forge_composer.config.teachers import TeacherConfig
from forge_composer.teachers.breaker import Breaker
from forge_composer.teachers.keys import ApiKey
from forge_composer.teachers.kinds import ANSWERED, NOT_SENT, RETRIED, ReplyKind, is_free, status_kind
from forge_composer.teachers.ledger import BudgetExceededError, Call, Ledger, Outcome, Reservation
from forge_composer.teachers.ledger_store import Answer
from forge_composer.teachers.limits import Clock, RateLimits, retry_after
from forge_composer.teachers.prices import Cost, CostSource, cost_of, has_usage, to_usd, upper_bound
from forge_composer.teachers.replies import Reading, classify, decode
from forge_composer.teachers.requests import TeacherRequest, WireRequest, wire_request
from forge_composer.teachers.transport import Received, post
from forge_composer.types import ParsedAction

_EXPLAINED = frozenset({ReplyKind.BAD_REQUEST, ReplyKind.NOT_FOUND, ReplyKind.FORBIDDEN})
"""Errors whose message helps; that of a refused key may show parts of the key."""
_LONGEST_DETAIL = 300


@dataclass(slots=True, frozen=True)
class TeacherReply:
    """What one teacher said to one request. `action` is there if and only if `kind` is `ok`.

    Attributes:
        cost_usd: of all attempts; for a `cached` reply, what it cost when it was made.
        seconds: on the wire, of all attempts; waits for limits, slots and retries do not count.
        attempts: requests that were sent for it now; 0 for a cached reply.
        status: last HTTP status.
        detail: the endpoint's own words on a request that it did not accept; never in the ledger.
    """

    teacher: str
    family: str
    request: TeacherRequest
    kind: ReplyKind
    action: ParsedAction | None = None
    cost_usd: float = 0.0
    seconds: float = 0.0
    attempts: int = 0
    cached: bool = False
    status: int | None = None
    detail: str = ""


@dataclass(slots=True, frozen=True)
class _Attempt:
    """One request, or none where `kind` says so."""

    kind: ReplyKind
    action: ParsedAction | None = None
    nano_usd: int = 0
    seconds: float = 0.0
    status: int | None = None
    retry_after_s: float | None = None
    detail: str = ""


class TeacherClient:
    """One teacher. For one event loop; the ledger may be shared.

    Attributes:
        counts: replies by kind, one a call of `ask`.
        cached: how many of them came from the ledger.
        breaker: the teacher's circuit breaker.
    """

    def __init__(
        self,
        config: TeacherConfig,
        ledger: Ledger,
        session: aiohttp.ClientSession,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Read the key from the environment.

        Raises:
            ValueError: the variable holds no key, or none that a header can carry.
        """
        self.config = config
        self.counts: Counter[ReplyKind] = Counter()
        self.cached = 0
        self._clock = clock or Clock()
        self.breaker = Breaker(config.breaker, self._clock)
        self._ledger, self._session = ledger, session
        self._key = ApiKey(config)
        self._url = config.base_url.rstrip("/") + "/chat/completions"
        self._slots = asyncio.Semaphore(config.concurrency)
        self._limits = RateLimits(config.requests_per_minute, config.tokens_per_minute, self._clock)
        self._same: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._backoff = tenacity.wait_random_exponential(
            multiplier=config.retry.backoff_s, max=config.retry.backoff_max_s
        )

    async def ask(self, request: TeacherRequest) -> TeacherReply:
        """The teacher's reply: from the ledger, if it has one, else from the endpoint.

        Raises:
            LedgerError: the ledger is closed.
        """
        wire = wire_request(self.config, request)
        one_at_a_time = self._same.setdefault(wire.key, asyncio.Lock())
        async with one_at_a_time:
            known = self._ledger.answer(self.config.name, wire.key)
            reply = await self._call(request, wire) if known is None else self._recall(request, known)
        self.counts[reply.kind] += 1
        self.cached += reply.cached
        return reply

    def _recall(self, request: TeacherRequest, answer: Answer) -> TeacherReply:
        reading = Reading(answer.kind)
        if answer.reply is not None:
            reading = classify(json.loads(answer.reply), request.tools)
        return self._reply(
            request,
            reading.kind,
            action=reading.action,
            cost_usd=to_usd(answer.cost_nano_usd),
            seconds=answer.seconds,
            cached=True,
        )

    async def _call(self, request: TeacherRequest, wire: WireRequest) -> TeacherReply:
        made: list[_Attempt] = []
        most = self.config.retry.attempts

        async def attempt() -> _Attempt:
            made.append(await self._attempt(request, wire, last=len(made) + 1 == most))
            return made[-1]

        await tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(most),
            wait=self._wait,
            retry=tenacity.retry_if_result(lambda result: result.kind in RETRIED),
            sleep=self._clock.sleep,
            retry_error_callback=lambda state: None,
        )(attempt)
        sent = [one for one in made if one.kind not in NOT_SENT]
        # A teacher that is benched between two attempts has failed at the first.
        last = sent[-1] if sent and made[-1].kind is ReplyKind.BENCHED else made[-1]
        return self._reply(
            request,
            last.kind,
            action=last.action,
            cost_usd=to_usd(sum(one.nano_usd for one in sent)),
            seconds=sum(one.seconds for one in sent),
            attempts=len(sent),
            status=last.status,
            detail=last.detail,
        )

    def _reply(self, request: TeacherRequest, kind: ReplyKind, **rest: Any) -> TeacherReply:
        return TeacherReply(self.config.name, self.config.family_name, request, kind, **rest)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Back-off with full jitter, on top of what the endpoint asked for."""
        assert state.outcome is not None
        return float(self._backoff(state)) + (state.outcome.result().retry_after_s or 0.0)

    async def _attempt(self, request: TeacherRequest, wire: WireRequest, *, last: bool) -> _Attempt:
        async with self._slots:
            if not self.breaker.admit():
                return _Attempt(ReplyKind.BENCHED)
            kind = ReplyKind.CANCELLED
            try:
                await self._limits.take(wire.tokens)
                result = await self._send(request, wire)
                kind = result.kind
            finally:
                self.breaker.record(kind, last=last)
            if kind is ReplyKind.RATE_LIMITED and result.retry_after_s:
                self._limits.pause(result.retry_after_s)
            return result

    async def _send(self, request: TeacherRequest, wire: WireRequest) -> _Attempt:
        """Reserve, send, read, settle."""
        call = Call(self.config.name, wire.key, request.trace, request.step, request.sample)
        try:
            reservation = await self._ledger.reserve(call, upper_bound(wire.bound, self.config.price))
        except BudgetExceededError as error:
            self._limits.correct(wire.tokens, 0)
            return _Attempt(ReplyKind.OVER_BUDGET, detail=str(error))
        started = self._clock.monotonic()
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self._key.headers()}
        try:
            received = await post(
                self._session, self._url, wire.body, headers=headers, timeout_s=self.config.timeout_s
            )
        except BaseException:
            unknown = Cost(reservation.bound, CostSource.BOUND)
            seconds = self._clock.monotonic() - started
            self._ledger.settle(reservation, Outcome(ReplyKind.CANCELLED, unknown, seconds))
            raise
        return self._settle(request, wire, reservation, received, self._clock.monotonic() - started)

    def _settle(
        self,
        request: TeacherRequest,
        wire: WireRequest,
        reservation: Reservation,
        received: Received,
        seconds: float,
    ) -> _Attempt:
        reading, body, reply = self._read(request, received)
        cost = self._cost(wire, reservation, received, reading, body)
        kept = reply if reading.kind in ANSWERED else None
        status = reading.status or received.status
        self._ledger.settle(reservation, Outcome(reading.kind, cost, seconds, status, kept))
        used = 0 if cost.source is CostSource.NONE else wire.tokens if cost.tokens is None else cost.tokens
        self._limits.correct(wire.tokens, used)
        return _Attempt(
            reading.kind,
            reading.action,
            cost.nano_usd,
            seconds,
            status,
            retry_after(received.headers, now=self._clock.wall(), most_s=self.config.retry.retry_after_max_s),
            _detail(body) if reading.kind in _EXPLAINED else "",
        )

    def _read(self, request: TeacherRequest, received: Received) -> tuple[Reading, Any, str | None]:
        """The reading of what came back, its JSON value, and that as text; both without the key."""
        if received.fault is not None:
            failed = received.status is not None and received.status >= 300
            kind = status_kind(received.status) if failed and received.status else received.fault
            return Reading(kind), None, None
        fault, body = decode(received.body)
        text: str | None = None
        if fault is None:
            try:
                body = self._key.cut_out(body)
                text = json.dumps(body)
            except RecursionError:
                fault, body, text = ReplyKind.WRONG_SCHEMA, None, None
        if not received.is_success:
            return Reading(status_kind(received.status or 0)), body, text
        return (Reading(fault) if fault is not None else classify(body, request.tools)), body, text

    def _cost(
        self, wire: WireRequest, reservation: Reservation, received: Received, reading: Reading, body: Any
    ) -> Cost:
        """What was billed: the provider's word, else nothing where no model ran, else the bound."""
        if not received.reached:
            return Cost(0, CostSource.NONE)
        status = reading.status if received.is_success else received.status
        if status is not None and is_free(status) and not has_usage(body):
            return Cost(0, CostSource.NONE)
        if body is None:
            return Cost(reservation.bound, CostSource.BOUND)
        return cost_of(body, wire.bound, self.config.price)


def _detail(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:_LONGEST_DETAIL] if isinstance(message, str) else ""
