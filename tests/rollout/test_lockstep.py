from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from forge_composer.rollout.lockstep import LockstepGate
from forge_composer.types import Completion, SamplingRequest


class Recorder:
    """Answers batches and remembers how they were composed."""

    def __init__(self, fail: bool = False) -> None:
        self.batches: list[list[str]] = []
        self.fail = fail

    async def generate_batch(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        self.batches.append([request.request_id for request in requests])
        if self.fail:
            raise ValueError("engine")
        return [Completion(request.request_id, [1], [0.0], [0], "stop") for request in requests]


def request(name: str) -> SamplingRequest:
    return SamplingRequest(name, (1,), 4, 0)


async def play(gate: LockstepGate, name: str, turns: int, delay: float) -> None:
    with gate.leaving():
        for turn in range(turns):
            await asyncio.sleep(delay)
            completion = await gate.generate(request(f"{name}/{turn}"))
            assert completion.request_id == f"{name}/{turn}"


@pytest.mark.parametrize("delays", [(0.0, 0.01, 0.02), (0.02, 0.01, 0.0)])
async def test_batches_do_not_depend_on_who_is_fast(delays: tuple[float, ...]) -> None:
    generators = Recorder()
    gate = LockstepGate(generators)
    gate.join(3)
    await asyncio.gather(
        *(play(gate, name, turns, delay) for name, turns, delay in zip("abc", (1, 3, 2), delays, strict=True))
    )
    assert generators.batches == [["a/0", "b/0", "c/0"], ["b/1", "c/1"], ["b/2"]]


async def test_an_engine_failure_reaches_every_waiting_rollout() -> None:
    gate = LockstepGate(Recorder(fail=True))
    gate.join(2)
    results = await asyncio.gather(play(gate, "a", 1, 0), play(gate, "b", 1, 0), return_exceptions=True)
    assert [str(error) for error in results] == ["engine", "engine"]


async def test_a_rollout_that_ends_without_a_turn_does_not_hold_up_the_others() -> None:
    generators = Recorder()
    gate = LockstepGate(generators)
    gate.join(2)
    await asyncio.gather(play(gate, "a", 0, 0.02), play(gate, "b", 1, 0.0))
    assert generators.batches == [["b/0"]]
