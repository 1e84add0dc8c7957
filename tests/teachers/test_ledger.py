"""The ledger holds its caps under concurrency, over a kill and over resumes, and never bills twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.ledger import (
    BudgetExceededError,
    Call,
    Ledger,
    LedgerError,
    Outcome,
    read_calls,
)
from forge_composer.teachers.pool import TeacherPool
from forge_composer.teachers.prices import Cost, CostSource
from tests.teachers.endpoint import READ, Endpoint, ask, teacher

CENT = 10_000_000


def call(request: str, *, teacher: str = "t", trace: str = "a") -> Call:
    return Call(teacher, request, trace, "0")


def cost(nano: int, kind: ReplyKind = ReplyKind.OK, reply: str | None = "{}") -> Outcome:
    return Outcome(kind, Cost(nano, CostSource.TABLE, 10, 0, 5), 0.5, 200, reply)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "ledger.sqlite"


async def test_an_answer_is_kept_over_openings(path: Path) -> None:
    with Ledger(path, budget_usd=1.0) as ledger:
        first = await ledger.reserve(call("r"), 3 * CENT)
        assert (ledger.spend().spent_usd, ledger.spend().held_usd) == (0.0, 0.03)
        ledger.settle(first, cost(CENT, ReplyKind.TIMEOUT, None))
        assert ledger.answer("t", "r") is None
        ledger.settle(await ledger.reserve(call("r"), 3 * CENT), cost(2 * CENT, reply='{"a": 1}'))
    with Ledger(path, budget_usd=1.0) as ledger:
        answer = ledger.answer("t", "r")
        assert answer is not None
        assert (answer.kind, answer.reply, answer.cost_nano_usd, answer.seconds) == (
            "ok",
            '{"a": 1}',
            3 * CENT,
            1.0,
        )
        assert ledger.answer("other", "r") is None
        assert (ledger.spend().spent_usd, ledger.spend("a").spent_usd) == (0.03, 0.03)
        assert ledger.spend("b").spent_usd == 0.0
        assert [(entry.kind, entry.answered) for entry in ledger.calls()] == [
            ("timeout", False),
            ("ok", True),
        ]


async def test_the_cap_of_the_run_and_of_a_trace(path: Path) -> None:
    with Ledger(path, budget_usd=0.05, budget_usd_per_trace=0.03) as ledger:
        for number in range(3):
            ledger.settle(await ledger.reserve(call(str(number)), CENT), cost(CENT))
        with pytest.raises(BudgetExceededError, match=r"trace 'a' is 0\.030000 USD, 0\.030000 are spent"):
            await ledger.reserve(call("3"), 1)
        ledger.settle(await ledger.reserve(call("4", trace="b"), 2 * CENT), cost(2 * CENT))  # to the cent
        with pytest.raises(BudgetExceededError, match="of the run"):
            await ledger.reserve(call("5", trace="c"), 1)
        assert (await ledger.reserve(call("6", trace="c"), 0)).bound == 0


async def test_a_call_waits_for_money_that_is_only_held(path: Path) -> None:
    with Ledger(path, budget_usd=0.03) as ledger:
        first = await ledger.reserve(call("0"), 3 * CENT)
        second = asyncio.create_task(ledger.reserve(call("1"), 2 * CENT))
        third = asyncio.create_task(ledger.reserve(call("2"), 2 * CENT))
        await asyncio.sleep(0.02)
        assert not second.done()
        third.cancel()
        ledger.settle(first, cost(CENT))
        assert (await asyncio.wait_for(second, 5)).bound == 2 * CENT
        fourth = asyncio.create_task(ledger.reserve(call("3"), CENT))
        await asyncio.sleep(0.02)
        ledger.settle(second.result(), cost(2 * CENT))
        with pytest.raises(BudgetExceededError):
            await asyncio.wait_for(fourth, 5)


def test_many_threads_with_loops_of_their_own(path: Path) -> None:
    """4 threads x 50 calls of up to 0.01 USD against 0.5 USD; at no moment more is spent and held."""
    ledger = Ledger(path, budget_usd=0.5)
    made: list[int] = []
    errors: list[BaseException] = []

    async def work(thread: int) -> None:
        rng = random.Random(thread)

        async def one(number: int) -> None:
            try:
                reservation = await ledger.reserve(call(f"{thread}-{number}"), CENT)
            except BudgetExceededError:
                return
            now = ledger.spend()
            assert now.spent_usd + now.held_usd <= 0.5 + 1e-12
            await asyncio.sleep(rng.random() * 0.002)
            paid = rng.randrange(CENT + 1)
            ledger.settle(reservation, cost(paid))
            made.append(paid)

        await asyncio.gather(*(one(number) for number in range(50)))

    def run(thread: int) -> None:
        try:
            asyncio.run(work(thread))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert sum(made) <= 0.5e9
    assert sum(made) > 0.49e9 - 1  # the last cent may stay
    ledger.close()
    assert sum(entry.counted_nano_usd for entry in read_calls(path)) == sum(made)


async def test_what_was_open_counts_at_its_bound_and_may_be_asked_again(path: Path) -> None:
    ledger = Ledger(path, budget_usd=0.05)
    await ledger.reserve(call("0"), 3 * CENT)
    ledger.close()
    with Ledger(path, budget_usd=0.05) as ledger:
        assert ledger.recovered == 1
        assert ledger.spend().spent_usd == 0.03
        assert ledger.answer("t", "0") is None
        with pytest.raises(BudgetExceededError):
            await ledger.reserve(call("0"), 3 * CENT)
        ledger.settle(await ledger.reserve(call("0"), 2 * CENT), cost(CENT))
        assert [entry.kind for entry in ledger.calls()] == ["lost", "ok"]
    with Ledger(path, budget_usd=0.05) as ledger:
        assert ledger.recovered == 0
        assert ledger.spend().spent_usd == 0.04


async def test_a_teacher_that_charges_too_much_is_reserved_for_at_more(path: Path) -> None:
    with Ledger(path, budget_usd=1.0) as ledger:
        ledger.settle(await ledger.reserve(call("0"), CENT), cost(3 * CENT))
        second = await ledger.reserve(call("1"), 2 * CENT)
        assert (second.bound, second.table_bound) == (6 * CENT, 2 * CENT)
        ledger.settle(second, cost(6 * CENT))
        assert (await ledger.reserve(call("2"), CENT)).bound == 6 * CENT - 3 * CENT
        assert (await ledger.reserve(call("2", teacher="other"), CENT)).bound == CENT
        ledger.settle(await ledger.reserve(call("3", teacher="free"), 0), cost(CENT))
        assert (await ledger.reserve(call("4", teacher="free"), 0)).bound == CENT
    with Ledger(path, budget_usd=1.0) as ledger:
        assert (await ledger.reserve(call("5"), 2 * CENT)).bound == 6 * CENT
        assert (await ledger.reserve(call("6", teacher="free"), 0)).bound == CENT


async def test_nothing_is_settled_twice_and_one_answer_is_kept(path: Path) -> None:
    with Ledger(path, budget_usd=None) as ledger:
        one = await ledger.reserve(call("0"), CENT)
        other = await ledger.reserve(call("0"), CENT)
        ledger.settle(one, cost(CENT, reply='"first"'))
        with pytest.raises(LedgerError, match="settled already"):
            ledger.settle(one, cost(CENT))
        ledger.settle(other, cost(CENT, reply='"second"'))
        answer = ledger.answer("t", "0")
        assert answer is not None
        assert (answer.reply, answer.cost_nano_usd) == ('"first"', 2 * CENT)


async def test_one_writer_and_any_reader(path: Path) -> None:
    with Ledger(path, budget_usd=1.0) as ledger:
        with pytest.raises(BlockingIOError, match="in use by another run"):
            Ledger(path, budget_usd=1.0)
        await ledger.reserve(call("0"), CENT)
        (entry,) = read_calls(path)
        assert (entry.kind, entry.counted_nano_usd) == (None, CENT)
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        await ledger.reserve(call("1"), CENT)
    Ledger(path, budget_usd=1.0).close()


def test_a_fork_cannot_write(path: Path) -> None:
    with Ledger(path, budget_usd=1.0) as ledger:
        child = os.fork()
        if child == 0:
            try:
                ledger.calls()
            except LedgerError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def _text(path: Path) -> None:
    path.write_text("notes, and not a few of them, but no database at all\n" * 100)


def _database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (id)")


def _newer(path: Path) -> None:
    Ledger(path, budget_usd=1.0).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")


@pytest.mark.parametrize(
    ("make", "message"),
    [(_text, "cannot be used as a ledger"), (_database, "but no ledger"), (_newer, "of version 9")],
)
def test_other_files_are_refused(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "file"
    make(path)
    before = path.read_bytes()
    for _ in range(2):  # a refusal lets go of the lock
        with pytest.raises(LedgerError, match=message):
            Ledger(path, budget_usd=1.0)
    assert path.read_bytes() == before


def test_no_file_and_no_budget(path: Path) -> None:
    with pytest.raises(LedgerError, match="no such ledger"):
        read_calls(path)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="budget_usd must be 0 or more"):
            Ledger(path, budget_usd=wrong)


async def test_kill_during_twenty_concurrent_calls_and_resume(path: Path, checkout: Path) -> None:
    """20 calls of 0.01 USD at most and 0.005 in truth, budget 0.2: 8 are answered before the kill.

    Counted after it: 8 * 0.005 + 12 * 0.01 = 0.16. The resume sends while what is counted leaves 0.01: at
    0.16, 0.165, ... 0.19, which are 7 calls, and ends at 0.195.
    """
    killed = False

    def script(question: str, count: int) -> Any:
        return READ if killed or int(question[1:]) < 8 else "hang"

    async with Endpoint(script) as endpoint:
        command = [sys.executable, "-m", "tests.teachers.ask_twenty", endpoint.url, str(path), "0.2"]
        child = await asyncio.create_subprocess_exec(*command, cwd=checkout, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            told = [(await child.stdout.readline()).decode() for _ in range(8)]
            await endpoint.until_in_flight(12)
            with pytest.raises(BlockingIOError):
                Ledger(path, budget_usd=0.2)
        finally:
            child.send_signal(signal.SIGKILL)
            await child.wait()
        assert sorted(told) == [f"q{number} ok\n" for number in range(8)]
        assert sum(endpoint.seen.values()) == 20
        killed = True

        with Ledger(path, budget_usd=0.2) as ledger:
            assert ledger.recovered == 12
            assert ledger.spend().spent_usd == pytest.approx(0.16)
            async with TeacherPool([teacher(endpoint.url)], ledger) as pool:
                replies = [r for n in range(20) for r in await pool.ask(ask(f"q{n}"))]
            assert [reply.kind for reply in replies] == ["ok"] * 15 + ["over_budget"] * 5
            assert [reply.cached for reply in replies] == [True] * 8 + [False] * 12
            assert ledger.spend().spent_usd == pytest.approx(0.195)
        assert [endpoint.seen[f"q{n}"] for n in range(20)] == [1] * 8 + [2] * 7 + [1] * 5
        assert sum(endpoint.answered.values()) == 15

        with Ledger(path, budget_usd=0.3) as ledger:  # more money: the rest, and the rest only
            async with TeacherPool([teacher(endpoint.url)], ledger) as pool:
                replies = [r for n in range(20) for r in await pool.ask(ask(f"q{n}"))]
            assert {reply.kind.value for reply in replies} == {"ok"}
            assert sum(not reply.cached for reply in replies) == 5
            assert ledger.spend().spent_usd == pytest.approx(0.22)
    counts = [entry.kind for entry in read_calls(path)]
    assert (counts.count(ReplyKind.OK), counts.count(ReplyKind.LOST), len(counts)) == (20, 12, 32)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(8))
async def test_kill_at_any_moment(path: Path, checkout: Path, moment: int) -> None:
    """Whenever the kill comes, the cap holds, the ledger counts at least the bill, and no answer is lost."""
    rng = random.Random(moment)
    async with Endpoint(lambda question, count: "slow" if rng.random() < 0.5 else READ) as endpoint:
        command = [sys.executable, "-m", "tests.teachers.ask_twenty", endpoint.url, str(path), "0.2"]
        child = await asyncio.create_subprocess_exec(*command, cwd=checkout, stdout=subprocess.DEVNULL)
        await endpoint.until_in_flight(1)
        await asyncio.sleep(moment * 0.004)
        child.send_signal(signal.SIGKILL)
        await child.wait()
        with Ledger(path, budget_usd=0.2) as ledger:
            before = {entry.step for entry in ledger.calls() if entry.answered}
            assert ledger.spend().spent_usd * 1e9 >= 0.005e9 * sum(endpoint.answered.values()) - 1
            seen = endpoint.seen.copy()
            async with TeacherPool([teacher(endpoint.url)], ledger) as pool:
                await asyncio.gather(*(pool.ask(ask(f"q{n}")) for n in range(20)))
            assert ledger.spend().spent_usd <= 0.2
            assert all(endpoint.seen[step] == seen[step] for step in before)
            assert ledger.spend().held_usd == 0
