"""The buffer's promises: order, lag bound, back-pressure, nothing trained twice, no endless waiting."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_composer.buffers.rollout_buffer import NoProgressError, RolloutBuffer
from forge_composer.types import ParsedAction, Rollout, RolloutGroup, RolloutStatus, Turn


def group(group_id: int, rewards: list[float | None], version: int = 0) -> RolloutGroup:
    rollouts = []
    for index, reward in enumerate(rewards):
        turn = Turn([1], [2], [-0.5], [version], "stop", ParsedAction(""))
        status = RolloutStatus.FAILED if reward is None else RolloutStatus.COMPLETED
        rollouts.append(
            Rollout(f"r-{group_id}-{index}", group_id, index, "t", 0, [], [], [turn], status, reward)
        )
    return RolloutGroup(group_id, "t", version, rollouts)


async def test_batches_come_in_order_of_admission_whatever_the_order_of_finishing() -> None:
    buffer = RolloutBuffer(groups_per_step=2, max_policy_lag=1)
    assert await buffer.admit(4) == [0, 1, 2, 3]
    for group_id in (3, 1, 2, 0):
        await buffer.put(group(group_id, [0.0, 1.0]))
    first, second = await buffer.take_batch(0), await buffer.take_batch(1)
    assert [g.group_id for g in first.groups] == [0, 1]
    assert [g.group_id for g in second.groups] == [2, 3]
    assert (first.depth, second.depth) == (2, 0)


async def test_admission_waits_until_slots_are_released() -> None:
    buffer = RolloutBuffer(groups_per_step=2, max_policy_lag=0)
    assert await buffer.admit(5) == [0, 1]
    waiting = asyncio.create_task(buffer.admit(5))
    for group_id in (0, 1):
        await buffer.put(group(group_id, [0.0, 1.0]))
    ticket = await buffer.take_batch(0)
    await asyncio.sleep(0.01)
    assert not waiting.done(), (
        "a taken batch still holds its slots: its update has not reached the generators"
    )
    await buffer.release(ticket.slots)
    assert await waiting == [2, 3]


async def test_a_group_is_handed_in_once() -> None:
    buffer = RolloutBuffer(groups_per_step=1, max_policy_lag=0)
    await buffer.admit(1)
    await buffer.put(group(0, [0.0, 1.0]))
    with pytest.raises(KeyError, match="group 0 is not awaited"):
        await buffer.put(group(0, [0.0, 1.0]))
    await buffer.take_batch(0)
    with pytest.raises(KeyError, match="group 0 is not awaited"):
        await buffer.put(group(0, [0.0, 1.0]))


async def test_zero_variance_is_dropped_in_place_or_replaced() -> None:
    for mode, trained, slots in (("drop", [1], [0, 1]), ("resample", [1, 2], [1, 2])):
        buffer = RolloutBuffer(groups_per_step=2, max_policy_lag=1, zero_variance=mode)
        await buffer.admit(3)
        await buffer.put(group(0, [1.0, 1.0]))
        await buffer.put(group(1, [0.0, 1.0]))
        await buffer.put(group(2, [1.0, 0.0]))
        ticket = await buffer.take_batch(0)
        assert [g.group_id for g in ticket.groups] == trained
        assert ticket.slots == slots
        assert [g.group_id for g in ticket.zero_variance] == [0]


async def test_a_stale_group_is_refused_and_its_slot_freed() -> None:
    buffer = RolloutBuffer(groups_per_step=1, max_policy_lag=1)
    await buffer.admit(2)
    await buffer.put(group(0, [0.0, 1.0], version=3))
    await buffer.put(group(1, [0.0, 1.0], version=4))
    ticket = await buffer.take_batch(5)
    assert [g.group_id for g in ticket.stale] == [0]
    assert [g.group_id for g in ticket.groups] == [1]
    assert buffer.free == 1


async def test_unscorable_groups_are_replaced_and_counted() -> None:
    buffer = RolloutBuffer(groups_per_step=1, max_policy_lag=0)
    assert await buffer.admit(1) == [0]
    await buffer.put(group(0, [None, 1.0]))
    taking = asyncio.create_task(buffer.take_batch(0))
    assert await buffer.admit(1) == [1]
    await buffer.put(group(1, [None, 1.0, 0.0]))
    ticket = await taking
    assert [g.group_id for g in ticket.unscorable] == [0]
    assert [g.group_id for g in ticket.groups] == [1]


async def test_no_progress_ends_with_the_reasons() -> None:
    buffer = RolloutBuffer(
        groups_per_step=4, max_policy_lag=0, zero_variance="resample", max_untrainable_groups=3
    )
    await buffer.admit(4)
    await buffer.put(group(0, [0.0, 0.0]))
    await buffer.put(group(1, [None, None]))
    await buffer.put(group(2, [0.0, 0.0]))
    with pytest.raises(NoProgressError, match=r"2 x all rewards equal to 0, 1 x unscorable"):
        await buffer.take_batch(0)


async def test_closing_wakes_everyone() -> None:
    buffer = RolloutBuffer(groups_per_step=1, max_policy_lag=0)
    await buffer.admit(1)
    admitting, taking = asyncio.create_task(buffer.admit(1)), asyncio.create_task(buffer.take_batch(0))
    await asyncio.sleep(0)
    await buffer.close()
    assert await admitting == []
    assert (await taking).closed


@settings(max_examples=60, deadline=None)
@given(
    per_step=st.integers(1, 4),
    lag=st.integers(0, 3),
    speeds=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    barren=st.sets(st.integers(0, 60)),
    resample=st.booleans(),
)
def test_no_trained_group_is_older_than_the_bound(
    per_step: int, lag: int, speeds: list[int], barren: set[int], resample: bool
) -> None:
    """Any speeds of groups, any zero-variance groups: the lag bound holds and no group is stale."""

    async def run() -> list[int]:
        buffer = RolloutBuffer(
            groups_per_step=per_step,
            max_policy_lag=lag,
            zero_variance="resample" if resample else "drop",
            max_untrainable_groups=1000,
        )
        version, lags, running = 0, [], set()

        async def one(group_id: int, start: int) -> None:
            for _ in range(speeds[group_id % len(speeds)]):
                await asyncio.sleep(0)
            await buffer.put(group(group_id, [1.0, 1.0] if group_id in barren else [0.0, 1.0], start))

        async def produce() -> None:
            while ids := await buffer.admit(1):
                running.add(asyncio.create_task(one(ids[0], version)))

        producer = asyncio.create_task(produce())
        for _ in range(10):
            ticket = await buffer.take_batch(version)
            assert not ticket.stale
            lags += [version - g.version_min for g in ticket.groups]
            version += 1
            await asyncio.sleep(0)
            await buffer.release(ticket.slots)
        await buffer.close()
        await producer
        for task in running:
            task.cancel()
        return lags

    assert max(asyncio.run(run()), default=0) <= lag
