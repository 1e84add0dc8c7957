"""The ledger's file: its one table and the statements on it. Each statement is a transaction of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.prices import Cost, CostSource

_APPLICATION = 0x46434C47
_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY,
    teacher TEXT NOT NULL,
    request TEXT NOT NULL,
    trace TEXT NOT NULL,
    step TEXT NOT NULL,
    sample INTEGER NOT NULL,
    reserved_at REAL NOT NULL,
    table_bound_nano_usd INTEGER NOT NULL CHECK (table_bound_nano_usd >= 0),
    bound_nano_usd INTEGER NOT NULL CHECK (bound_nano_usd >= table_bound_nano_usd),
    kind TEXT,
    cost_nano_usd INTEGER CHECK (cost_nano_usd >= 0),
    cost_source TEXT,
    seconds REAL,
    status INTEGER,
    prompt_tokens INTEGER,
    cached_tokens INTEGER,
    completion_tokens INTEGER,
    reply TEXT,
    answered INTEGER NOT NULL DEFAULT 0,
    CHECK ((kind IS NULL) = (cost_nano_usd IS NULL))
);
CREATE UNIQUE INDEX IF NOT EXISTS one_answer ON calls (teacher, request) WHERE answered;
CREATE INDEX IF NOT EXISTS by_request ON calls (teacher, request);
"""
_COUNTED = "COALESCE(cost_nano_usd, bound_nano_usd)"


class LedgerError(Exception):
    """The ledger cannot be used."""


@dataclass(slots=True, frozen=True)
class Call:
    """Which call: the teacher's name, the hash of the request, and the step that it is about."""

    teacher: str
    request: str
    trace: str
    step: str
    sample: int = 0


@dataclass(slots=True, frozen=True)
class Reservation:
    """Leave to send a call once. `bound` is what was set aside, nano-USD; `table_bound` what was asked for,
    less than that for a teacher that once charged more than its bound."""

    id: int
    call: Call
    bound: int
    table_bound: int


@dataclass(slots=True, frozen=True)
class Outcome:
    """How a call ended. `seconds` is from sending to the end of the reply; `reply` the JSON that came."""

    kind: ReplyKind
    cost: Cost
    seconds: float
    status: int | None = None
    reply: str | None = None


@dataclass(slots=True, frozen=True)
class Answer:
    """An answered call: the reply, and cost (nano-USD) and seconds of all attempts that it took."""

    kind: ReplyKind
    reply: str | None
    cost_nano_usd: int
    seconds: float


@dataclass(slots=True, frozen=True)
class CallRecord:
    """An entry. `kind` and what follows are None for a call in flight, which counts at its bound."""

    id: int
    teacher: str
    request: str
    trace: str
    step: str
    sample: int
    reserved_at: float
    bound_nano_usd: int
    kind: ReplyKind | None
    cost_nano_usd: int | None
    cost_source: CostSource | None
    seconds: float | None
    status: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    answered: bool

    @property
    def counted_nano_usd(self) -> int:
        """What the call counts against a budget."""
        return self.bound_nano_usd if self.cost_nano_usd is None else self.cost_nano_usd


_COLUMNS = ", ".join(CallRecord.__dataclass_fields__)


def open_file(path: Path, *, fsync: bool) -> sqlite3.Connection:
    """Open or make a ledger for writing.

    Raises:
        LedgerError: see `Ledger`.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        _check_kind(connection, path, may_be_new=True)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise LedgerError(f"{path}: SQLite cannot use WAL here (network folder?); use a local disk")
        connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        connection.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; "
            f"PRAGMA user_version = {_VERSION}; COMMIT;"
        )
    except sqlite3.DatabaseError as error:
        connection.close()
        raise LedgerError(f"{path} cannot be used as a ledger ({error}); name another file") from None
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a ledger for reading.

    Raises:
        LedgerError: there is no file, or it is no ledger.
    """
    if not path.is_file():
        raise LedgerError(f"{path}: there is no such ledger")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        _check_kind(connection, path, may_be_new=False)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise LedgerError(f"{path} cannot be read as a ledger ({error})") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _check_kind(connection: sqlite3.Connection, path: Path, *, may_be_new: bool) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if may_be_new and not tables and not application:
        return
    if application != _APPLICATION:
        raise LedgerError(f"{path} is a database, but no ledger; name another file")
    if version != _VERSION:
        raise LedgerError(f"{path} is a ledger of version {version}, this program writes {_VERSION}")


def close_lost(connection: sqlite3.Connection) -> int:
    """Settle what a dead process left open at its bound; how many there were."""
    return connection.execute(
        f"UPDATE calls SET kind = ?, cost_source = ?, cost_nano_usd = {_COUNTED} WHERE kind IS NULL",
        (ReplyKind.LOST, CostSource.BOUND),
    ).rowcount


def insert(
    connection: sqlite3.Connection, call: Call, bound: int, table_bound: int, now: float
) -> Reservation:
    """Reserve."""
    row = connection.execute(
        "INSERT INTO calls (teacher, request, trace, step, sample, reserved_at, bound_nano_usd, "
        "table_bound_nano_usd) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (call.teacher, call.request, call.trace, call.step, call.sample, now, bound, table_bound),
    ).lastrowid
    assert row is not None
    return Reservation(row, call, bound, table_bound)


def settle(connection: sqlite3.Connection, row: int, outcome: Outcome, *, answered: bool) -> None:
    """Settle; a second answer to one request is kept as a call and not as an answer."""
    cost = outcome.cost
    connection.execute(
        "UPDATE calls SET kind = ?, cost_nano_usd = ?, cost_source = ?, seconds = ?, status = ?, "
        "prompt_tokens = ?, cached_tokens = ?, completion_tokens = ?, reply = ?, "
        "answered = ? AND NOT EXISTS (SELECT 1 FROM calls AS other WHERE other.answered "
        "AND other.teacher = calls.teacher AND other.request = calls.request) WHERE id = ?",
        (
            outcome.kind, cost.nano_usd, cost.source, outcome.seconds, outcome.status,
            cost.prompt_tokens, cost.cached_tokens, cost.completion_tokens, outcome.reply,
            answered, row,
        ),
    )  # fmt: skip


def answer(connection: sqlite3.Connection, teacher: str, request: str) -> Answer | None:
    """The answer to a request, if there is one."""
    found = connection.execute(
        "SELECT kind, reply FROM calls WHERE teacher = ? AND request = ? AND answered", (teacher, request)
    ).fetchone()
    if found is None:
        return None
    cost, seconds = connection.execute(
        f"SELECT SUM({_COUNTED}), TOTAL(seconds) FROM calls WHERE teacher = ? AND request = ?",
        (teacher, request),
    ).fetchone()
    return Answer(ReplyKind(found[0]), found[1], cost, seconds)


def spent_by_trace(connection: sqlite3.Connection) -> list[tuple[str, int]]:
    """Nano-USD that each trace counts."""
    return connection.execute(f"SELECT trace, SUM({_COUNTED}) FROM calls GROUP BY trace").fetchall()


def overruns(connection: sqlite3.Connection) -> dict[str, tuple[float, int]]:
    """Teachers that were charged more than a call's bound: the worst ratio, and the most for one call."""
    rows = connection.execute(
        "SELECT teacher, MAX(1.0 * cost_nano_usd / MAX(1, table_bound_nano_usd) * "
        "(table_bound_nano_usd > 0)), MAX(cost_nano_usd) FROM calls "
        "WHERE cost_nano_usd > bound_nano_usd GROUP BY teacher"
    )
    return {teacher: (max(1.0, ratio), most) for teacher, ratio, most in rows}


def records(connection: sqlite3.Connection) -> Iterator[CallRecord]:
    """All entries, oldest first."""
    for row in connection.execute(f"SELECT {_COLUMNS} FROM calls ORDER BY id"):
        values = dict(zip(CallRecord.__dataclass_fields__, row, strict=True))
        for name, enum in (("kind", ReplyKind), ("cost_source", CostSource)):
            values[name] = None if values[name] is None else enum(values[name])
        values["answered"] = bool(values["answered"])
        yield CallRecord(**values)
