"""A circuit breaker: a teacher that only fails is benched, and probed from time to time."""

from __future__ import annotations

import enum

from forge_composer.config.teachers import BreakerConfig
from forge_composer.teachers.kinds import NOT_SENT, ReplyKind
from forge_composer.teachers.limits import Clock

_FAILURES = frozenset(
    {
        ReplyKind.SERVER_ERROR, ReplyKind.CONNECTION, ReplyKind.TIMEOUT, ReplyKind.TRUNCATED,
        ReplyKind.EMPTY, ReplyKind.TOO_LARGE, ReplyKind.FORBIDDEN, ReplyKind.NOT_FOUND,
    }
)  # fmt: skip
_FATAL = frozenset({ReplyKind.UNAUTHORIZED, ReplyKind.PAYMENT_REQUIRED})
_SAYS_NOTHING = NOT_SENT | {ReplyKind.CANCELLED, ReplyKind.RATE_LIMITED}
"""Neither a sign of life nor of death."""


class BreakerState(enum.StrEnum):
    """Where the breaker stands."""

    CLOSED = "closed"
    """Calls go through."""
    OPEN = "open"
    """The teacher is benched."""
    PROBING = "probing"
    """One call is on its way to see whether the teacher is back."""


class Breaker:
    """Counts failures in a row. Every call that `admit` lets through must end in `record`."""

    def __init__(self, config: BreakerConfig, clock: Clock) -> None:
        """Start closed."""
        self._config, self._clock = config, clock
        self._failures = 0
        self._bench_s = config.bench_s
        self._until = 0.0
        self.state = BreakerState.CLOSED
        self.benchings = 0
        """Times that the teacher was benched, failed probes included."""

    def admit(self) -> bool:
        """True if a call may be sent. On the bench this is True for one call, the probe, when it is time."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.PROBING or self._clock.monotonic() < self._until:
            return False
        self.state = BreakerState.PROBING
        return True

    def record(self, kind: ReplyKind, *, last: bool = False) -> None:
        """Take note of how an admitted call ended.

        Args:
            kind: what came of it.
            last: it will not be tried again. An endpoint that is busy is alive; one that is busy at every
                attempt of a call has failed.
        """
        failed = kind in _FAILURES or (kind is ReplyKind.RATE_LIMITED and last)
        if kind in _SAYS_NOTHING and not failed:
            if self.state is BreakerState.PROBING:  # the next call probes
                self.state = BreakerState.OPEN
        elif kind in _FATAL:
            self._bench()
        elif failed:
            self._failures += 1
            if self.state is BreakerState.PROBING or self._failures >= self._config.failures:
                self._bench()
        elif self.state is not BreakerState.OPEN or kind is ReplyKind.OK:
            self._close()

    def _bench(self) -> None:
        """Onto the bench; calls that were in flight when it began do not make it longer."""
        if self.state is BreakerState.OPEN:
            return
        if self.state is BreakerState.PROBING:
            self._bench_s = min(self._bench_s * 2, self._config.bench_max_s)
        self.state = BreakerState.OPEN
        self._until = self._clock.monotonic() + self._bench_s
        self.benchings += 1

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._bench_s = self._config.bench_s
