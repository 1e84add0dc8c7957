"""Sums over ledger entries, and the bound of the wall time, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_composer.replay_report.calls import account, busy_s, lower_bound_s, wall_s
from forge_composer.teachers.kinds import ReplyKind
from tests.replay_report.small_replays import entry


def test_the_account() -> None:
    calls = [
        entry(1, kind=ReplyKind.TIMEOUT, cost=30),
        entry(2, cost=20),
        entry(3, teacher="b", kind=ReplyKind.LOST, cost=100),
        entry(4, teacher="b", step="1", kind=None, cost=None, bound=500),
    ]
    found = account(calls)
    assert (found.requests, found.retries, found.unknown_bills) == (4, 1, 2)
    assert found.cost_usd == pytest.approx(650e-9)
    assert found.unknown_usd == pytest.approx(600e-9)
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (28, 8, 12)


def test_each_part_of_the_bound() -> None:
    """Teacher a: 6 s of calls at 2 at once. The step with the retry: 2 + 1 s one after the other."""
    calls = [
        entry(1, step="0", seconds=2.0, kind=ReplyKind.TIMEOUT),
        entry(2, step="0", seconds=1.0),
        entry(3, step="1", seconds=3.0),
        entry(4, teacher="b", step="0", seconds=0.5),
        entry(5, teacher="b", step="1", seconds=None, kind=ReplyKind.LOST),
    ]
    assert lower_bound_s(calls, {"a": 1, "b": 1}, 16) == pytest.approx(6.0)  # teacher a
    assert lower_bound_s(calls, {"a": 4, "b": 1}, 16) == pytest.approx(3.0)  # the longest call
    assert lower_bound_s(calls, {"a": 4, "b": 1}, 1) == pytest.approx(6.0)  # a step at a time: 3 + 3
    assert lower_bound_s([], {"a": 1}, 1) == 0.0


def test_busy_time_is_the_union_of_the_calls() -> None:
    calls = [
        entry(1, at=10.0, seconds=2.0),
        entry(2, at=11.0, seconds=0.5),
        entry(3, at=11.5, seconds=1.0),
        entry(4, at=20.0, seconds=1.0),
        entry(5, at=30.0, seconds=None, kind=ReplyKind.LOST),
    ]
    assert busy_s(calls) == pytest.approx(3.5)


def test_the_wall_time_of_several_starts() -> None:
    calls = [entry(1, at=10.0, seconds=2.0), entry(2, step="1", at=50.0, seconds=1.0)]
    assert wall_s(calls, 1, 1.25) == pytest.approx(3.25)
    assert wall_s(calls, 2, 0.05) == pytest.approx(3.0)  # nothing was sent by this start
    assert wall_s(calls, 0, 41.5) == 41.5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.01, 5.0)), min_size=1, max_size=24),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_no_schedule_beats_the_bound(
    lengths: list[tuple[str, float]], slots_a: int, slots_b: int, steps_at_once: int
) -> None:
    """A greedy schedule under all three limits, simulated event by event."""
    steps = [lengths[index : index + 2] for index in range(0, len(lengths), 2)]
    calls, number = [], 0
    for index, step in enumerate(steps):
        for sample, (name, seconds) in enumerate(step):
            number += 1
            calls.append(entry(number, teacher=name, step=str(index), sample=sample, seconds=seconds))
    free = {"a": [0.0] * slots_a, "b": [0.0] * slots_b}
    workers, end = [0.0] * steps_at_once, 0.0
    for step in steps:
        workers.sort()
        begin, done = workers[0], 0.0
        for name, seconds in step:
            free[name].sort()
            finish = max(begin, free[name][0]) + seconds
            free[name][0] = finish
            done = max(done, finish)
        workers[0], end = done, max(end, done)
    assert lower_bound_s(calls, {"a": slots_a, "b": slots_b}, steps_at_once) <= end + 1e-9
