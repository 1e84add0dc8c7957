"""What the ledger says about a replay: money, tokens, requests, time. The same over any number of starts.

Bound of the wall time. No schedule is faster than

    max over teachers t of  (seconds of all its calls) / concurrency_t
    the longest call, its retries one after the other
    (sum over steps of the step's slowest call) / replay.concurrency

where seconds are those on the wire. Waits for rate limits, Retry-After and back-off are not in it: it says
what the concurrency permits, not what an endpoint asks for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.ledger import CallRecord
from forge_composer.teachers.prices import to_usd

_UNKNOWN_BILL = frozenset({ReplyKind.LOST, ReplyKind.CANCELLED})


@dataclass(slots=True, frozen=True)
class Account:
    """Sums over ledger entries, each of which is one HTTP request.

    Attributes:
        requests: requests that were sent.
        retries: how many of them were not the first for their question.
        cost_usd: what they count; a bill that is not known counts at its bound.
        unknown_bills: requests that were in flight when the process died or the replay was stopped.
        unknown_usd: their part of `cost_usd`.
        prompt_tokens: as far as replies said; so are the next two.
        cached_tokens: part of the prompt tokens that the endpoint had in its cache.
        completion_tokens: of the answers.
    """

    requests: int
    retries: int
    cost_usd: float
    unknown_bills: int
    unknown_usd: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def account(calls: Sequence[CallRecord]) -> Account:
    """The sums."""
    unknown = [call for call in calls if call.kind is None or call.kind in _UNKNOWN_BILL]
    return Account(
        requests=len(calls),
        retries=len(calls) - len({(call.teacher, call.request) for call in calls}),
        cost_usd=_usd(calls),
        unknown_bills=len(unknown),
        unknown_usd=_usd(unknown),
        prompt_tokens=sum(call.prompt_tokens or 0 for call in calls),
        cached_tokens=sum(call.cached_tokens or 0 for call in calls),
        completion_tokens=sum(call.completion_tokens or 0 for call in calls),
    )


def _usd(calls: Iterable[CallRecord]) -> float:
    return to_usd(sum(call.counted_nano_usd for call in calls))


def lower_bound_s(calls: Sequence[CallRecord], concurrency: Mapping[str, int], steps_at_once: int) -> float:
    """The bound of the wall time, seconds; see the module. 0 for no calls.

    Args:
        calls: the entries.
        concurrency: calls at once that each teacher takes.
        steps_at_once: `replay.concurrency`.
    """
    chains: defaultdict[tuple[str, str, str, int], float] = defaultdict(float)
    for call in calls:
        chains[call.trace, call.step, call.teacher, call.sample] += call.seconds or 0.0
    by_teacher: defaultdict[str, list[float]] = defaultdict(list)
    slowest: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (trace, step, teacher, _), seconds in chains.items():
        by_teacher[teacher].append(seconds)
        slowest[trace, step] = max(slowest[trace, step], seconds)
    bounds = [math.fsum(seconds) / concurrency[teacher] for teacher, seconds in by_teacher.items()]
    longest = max(chains.values(), default=0.0)
    return max([longest, math.fsum(slowest.values()) / steps_at_once, *bounds])


def busy_s(calls: Iterable[CallRecord]) -> float:
    """Seconds in which at least one of the calls was in flight. One whose process died counts as none."""
    spans = sorted((call.reserved_at, call.reserved_at + (call.seconds or 0.0)) for call in calls)
    total, end = 0.0, -math.inf
    for begin, finish in spans:
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


def wall_s(calls: Sequence[CallRecord], earlier: int, seconds: float) -> float:
    """Wall time of asking over all starts.

    This start's own, if it sent anything; of starts before it the time in which calls were in flight, since
    one that was killed left no other record.

    Args:
        calls: the entries.
        earlier: id of the last entry before this start.
        seconds: what this start took.
    """
    before = [call for call in calls if call.id <= earlier]
    return busy_s(before) + (seconds if len(calls) > len(before) else 0.0)
