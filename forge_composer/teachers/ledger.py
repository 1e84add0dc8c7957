"""The spend ledger: every call to a teacher is written down before it is sent, and paid for afterwards.

A call is *reserved* at the most that it can cost, and *settled* at what it cost. What counts against a budget
is the cost of settled calls and the bound of the others, so that no number of calls at once and no crash can
pass it. A call that was in flight when the process died counts at its bound for ever, as its bill is unknown,
and may be made again within the budget. A call that was answered is in the ledger with its reply and is not
made again.

The one thing that the ledger cannot prevent is an endpoint that charges more than its price table says. Such
a teacher's next calls are reserved at as many times their bound.

SQLite in WAL mode, which survives the death of the process at any moment; with `fsync` also a power cut. One
process writes to a ledger, a second one is refused; others may read (`read_calls`). Requests are kept as
hashes, and replies without the key, should an endpoint have put it there.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import TracebackType

from forge_composer.teachers import ledger_store as store
from forge_composer.teachers.kinds import ANSWERED
from forge_composer.teachers.ledger_store import (
    Answer,
    Call,
    CallRecord,
    LedgerError,
    Outcome,
    Reservation,
)
from forge_composer.teachers.prices import NANO, to_usd

__all__ = [
    "Answer",
    "BudgetExceededError",
    "Call",
    "CallRecord",
    "Ledger",
    "LedgerError",
    "Outcome",
    "Reservation",
    "Spend",
    "read_calls",
]


class BudgetExceededError(Exception):
    """A call does not fit into a budget, whatever the calls in flight turn out to cost."""

    def __init__(self, scope: str, limit: int, spent: int, bound: int) -> None:
        """See the class; amounts in nano-USD."""
        super().__init__(
            f"the budget of the {scope} is {to_usd(limit):.6f} USD, {to_usd(spent):.6f} are spent, and this "
            f"call can cost up to {to_usd(bound):.6f}"
        )


@dataclass(slots=True)
class _Account:
    """Nano-USD that are spent, and that are held for calls in flight."""

    spent: int = 0
    held: int = 0


@dataclass(slots=True, frozen=True)
class Spend:
    """Where the money stands, USD: settled, and held for calls in flight."""

    spent_usd: float
    held_usd: float


class Ledger:
    """One run's ledger. Safe from any thread and any event loop of one process.

    Attributes:
        path: the file.
        recovered: calls that were in flight when the process before this one ended.

    Example:
        >>> with Ledger(folder / "ledger.sqlite", budget_usd=5.0) as ledger:
        ...     reservation = await ledger.reserve(call, bound)
        ...     ...  # send it
        ...     ledger.settle(reservation, outcome)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        budget_usd: float | None,
        budget_usd_per_trace: float | None = None,
        fsync: bool = False,
    ) -> None:
        """Open or continue a ledger; folders are made. Calls that a dead process left open become `lost`.

        Args:
            path: the file; `-wal`, `-shm` and `.lock` lie beside it.
            budget_usd: most that the whole ledger may come to, over all its openings; None: no limit.
            budget_usd_per_trace: the same for each trace.
            fsync: wait for the disk at each entry.

        Raises:
            BlockingIOError: another process, or another `Ledger` of this one, has it open.
            LedgerError: the file is no ledger, or lies where SQLite cannot use WAL.
            ValueError: a budget is negative or not a number.
        """
        self.path = Path(path)
        self._limit = _limit("budget_usd", budget_usd)
        self._trace_limit = _limit("budget_usd_per_trace", budget_usd_per_trace)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: list[Future[None]] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _own(self.path)
        try:
            self._connection = store.open_file(self.path, fsync=fsync)
            self.recovered = store.close_lost(self._connection)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._run = _Account()
        self._traces: defaultdict[str, _Account] = defaultdict(_Account)
        for trace, spent in store.spent_by_trace(self._connection):
            self._run.spent += spent
            self._traces[trace].spent = spent
        self._overruns = store.overruns(self._connection)
        self._open: dict[int, Reservation] = {}

    async def reserve(self, call: Call, bound: int) -> Reservation:
        """Set `bound` nano-USD aside; waits while only the calls in flight are in the way.

        Raises:
            BudgetExceededError: it does not fit.
            LedgerError: the ledger is closed, or was opened by another process.
        """
        while True:
            got = self._try_reserve(call, bound)
            if isinstance(got, Reservation):
                return got
            await asyncio.wrap_future(got)

    def _try_reserve(self, call: Call, bound: int) -> Reservation | Future[None]:
        """The reservation, or what to wait for before it is tried again."""
        with self._lock:
            self._check_usable()
            table_bound, bound = bound, self._corrected(call.teacher, bound)
            account = self._traces[call.trace]
            scopes = (("run", self._limit, self._run), (f"trace {call.trace!r}", self._trace_limit, account))
            blocked = False
            for scope, limit, money in scopes:
                if limit is None:
                    continue
                if money.spent + bound > limit:
                    raise BudgetExceededError(scope, limit, money.spent, bound)
                blocked |= money.spent + money.held + bound > limit
            if blocked:
                waiter: Future[None] = Future()
                self._waiting.append(waiter)
                return waiter
            reservation = store.insert(self._connection, call, bound, table_bound, time.time())
            self._run.held += bound
            account.held += bound
            self._open[reservation.id] = reservation
            return reservation

    def settle(self, reservation: Reservation, outcome: Outcome) -> None:
        """Write down how a call ended and what it cost.

        Raises:
            LedgerError: the reservation is settled already, or the ledger is closed.
        """
        with self._lock:
            self._check_usable()
            if reservation.id not in self._open:
                raise LedgerError(f"{self.path}: call {reservation.id} is settled already")
            store.settle(self._connection, reservation.id, outcome, answered=outcome.kind in ANSWERED)
            del self._open[reservation.id]
            cost = outcome.cost.nano_usd
            for money in (self._run, self._traces[reservation.call.trace]):
                money.held -= reservation.bound
                money.spent += cost
            if cost > reservation.bound:
                self._note_overrun(reservation, cost)
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def answer(self, teacher: str, request: str) -> Answer | None:
        """What a teacher answered to a request, in this run or before; None if it has not."""
        with self._lock:
            self._check_usable()
            return store.answer(self._connection, teacher, request)

    def spend(self, trace: str | None = None) -> Spend:
        """Where the run stands, or one trace."""
        with self._lock:
            money = self._run if trace is None else self._traces.get(trace, _Account())
            return Spend(to_usd(money.spent), to_usd(money.held))

    def calls(self) -> list[CallRecord]:
        """All entries, oldest first."""
        with self._lock:
            self._check_usable()
            return list(store.records(self._connection))

    def close(self) -> None:
        """Close; entries that are still open count at their bound from now on. May be called again."""
        with self._lock:
            if self._lock_fd < 0:
                return
            self._connection.close()
            os.close(self._lock_fd)
            self._lock_fd = -1
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:  # they find the ledger closed
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._lock_fd < 0:
            raise LedgerError(f"{self.path}: the ledger is closed")
        if os.getpid() != self._pid:
            raise LedgerError(f"{self.path}: opened by the process {self._pid}; a fork cannot use it")

    def _corrected(self, teacher: str, bound: int) -> int:
        """The bound, made larger for a teacher that was once charged more than its bound."""
        ratio, most = self._overruns.get(teacher, (1.0, 0))
        return max(math.ceil(bound * ratio), most, bound)

    def _note_overrun(self, reservation: Reservation, cost: int) -> None:
        ratio, most = self._overruns.get(reservation.call.teacher, (1.0, 0))
        worse = cost / reservation.table_bound if reservation.table_bound else 1.0
        self._overruns[reservation.call.teacher] = (max(ratio, worse), max(most, cost))


def read_calls(path: str | Path) -> list[CallRecord]:
    """The entries of a ledger, also of one that a run is writing to.

    Raises:
        LedgerError: there is no file, or it is no ledger.
    """
    connection = store.open_to_read(Path(path))
    try:
        return list(store.records(connection))
    finally:
        connection.close()


def _limit(name: str, usd: float | None) -> int | None:
    if usd is None:
        return None
    if not (math.isfinite(usd) and usd >= 0):
        raise ValueError(f"{name} must be 0 or more, got {usd}")
    return int(Decimal(repr(float(usd))) * NANO)  # rounded down, as costs are rounded up


def _own(path: Path) -> int:
    """A lock that the kernel takes back when the process ends, however it ends."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BlockingIOError(
            f"{path} is in use by another run; wait for it, or name another ledger"
        ) from None
    return lock
