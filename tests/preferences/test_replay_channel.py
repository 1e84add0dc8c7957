"""The trace-replay channel in the loop: scripted teachers over HTTP, real environment, real buffer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forge_composer.buffers.pair_buffer import PairBuffer
from forge_composer.config.load import load
from forge_composer.config.schema import Config
from forge_composer.preferences.channel import FAILURES, ReplayChannel
from forge_composer.preferences.records import PreferencePair
from forge_composer.preferences.service import ReplayService
from forge_composer.preferences.steps import StepState
from forge_composer.types import Rollout, ScoreRequest
from tests.rendering.chat_fixtures import make_renderer
from tests.rollout.micro_episodes import (
    RIGHT,
    SUBMIT,
    WRONG,
    MicroEnvironments,
    Policy,
    episode,
    make_runner,
    turns,
    write,
)

RENDERER = make_renderer()
NAMES = ("one", "two", "three")
AT = 'base_url="http://local/v1", price={input=1.0, output=5.0}'
TEACHERS = ", ".join(f'{{name="{name}", model="scripted/{name}", {AT}}}' for name in NAMES)
SERVED = ", ".join(f'{{name="scripted/{name}", family="{name}", skill=1.0}}' for name in NAMES)


def make_config(checkout: Path, tmp_path: Path, *overrides: str) -> Config:
    """Three teachers that are always right, of three families (their model ids' names)."""
    families = [f"--teachers.{number}.family={name}" for number, name in enumerate("abc")]
    return load(
        checkout / "configs" / "cpu.toml",
        [
            f"--output_dir={tmp_path / 'run'}",
            f"--teachers=[{TEACHERS}]",
            f"--local_teachers.teachers=[{SERVED}]",
            "--local_teachers.latency_scale=0.0",
            *families,
            "--loss.replay_dpo.weight=1.0",
            "--replay.steps=all",
            "--generator.max_model_len=2048",
            *overrides,
        ],
    )


class Trainer:
    """Scores like a policy that gives every token the log-probability -0.5."""

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []

    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        self.requests += requests
        return [[-0.5] * (len(request.token_ids) - 1) for request in requests]


class Dead:
    """A service whose process has died."""

    def __init__(self) -> None:
        self.asked = 0

    async def replay(self, state: StepState) -> Any:
        self.asked += 1
        raise RuntimeError("the process that ran replay() died")

    async def totals(self) -> dict[str, float]:
        raise RuntimeError("the process that ran totals() died")


@dataclasses.dataclass
class Table:
    channel: ReplayChannel
    buffer: PairBuffer
    policy: Policy
    trainer: Trainer
    pairs: list[PreferencePair]
    warnings: list[str]


def make_table(config: Config, teachers: Any, says: Any = None) -> Table:
    policy = Policy(RENDERER, says or (lambda prompt, request: write(RIGHT)))
    runner = make_runner(RENDERER, MicroEnvironments())
    buffer, trainer = PairBuffer(config.replay.buffer, seed=config.seed), Trainer()
    pairs: list[PreferencePair] = []
    warnings: list[str] = []
    rollouts: list[Rollout] = []
    scorer: Any = trainer
    generators: Any = policy
    channel = ReplayChannel(
        config, runner, generators, teachers, buffer, scorer,
        record=pairs.extend, record_rollout=rollouts.append, warn=warnings.append,
    )  # fmt: skip
    return Table(channel, buffer, policy, trainer, pairs, warnings)


async def record(*said: str, number: int = 0) -> Rollout:
    runner = make_runner(RENDERER, MicroEnvironments())
    spec = episode(f"train-000001-00{number}")
    rollout = await runner.run(spec, Policy(RENDERER, turns(*said)))
    assert rollout.reward is not None, rollout.error
    return rollout


SYNCHRONOUS = "--loop.max_policy_lag=0"


async def test_from_a_failed_rollout_to_a_batch(checkout: Path, tmp_path: Path) -> None:
    """Write a wrong body, submit. The teachers would have written the right one, and then test it again."""
    config = make_config(checkout, tmp_path, SYNCHRONOUS)
    service = ReplayService(config)
    await service.start()
    try:
        table = make_table(config, service)
        table.channel.submit([await record(write(WRONG), SUBMIT), await record(write(RIGHT), SUBMIT)])
        found, metrics = await table.channel.pairs(0)
    finally:
        await service.stop()
    assert table.warnings == []
    assert metrics["replay/steps"] == 2.0  # the rollout that succeeded is not replayed
    assert metrics["teachers/replies"] == 6.0
    assert metrics["teachers/errors"] == 0.0
    assert metrics["teachers/cost_usd"] > 0.0
    assert len(found) == len(table.pairs) == metrics["replay/pairs"] == metrics["pairs/inserted"]
    by_step = {pair.step: pair for pair in table.pairs}
    first = by_step[0]
    assert (first.source, first.families, first.weight) == ("student", ("a", "b", "c"), 1.0)
    assert first.chosen.tool_calls[0].arguments == {"body": RIGHT}
    assert first.rejected.tool_calls[0].arguments == {"body": WRONG}
    assert first.tokens is not None
    pair = next(pair for pair in found if pair.context_ids == first.tokens.prompt_ids)
    assert pair.chosen_ids == first.tokens.chosen_ids
    assert pair.rejected_ids == first.tokens.rejected_ids
    assert pair.reference_chosen == pytest.approx(-0.5 * len(pair.chosen_ids))
    assert pair.reference_rejected == pytest.approx(-0.5 * len(pair.rejected_ids))
    assert {request.temperature for request in table.trainer.requests} == {0.8}
    # All samples of all steps in one batch, in the order of their ids.
    (batch,) = table.policy.batches
    assert batch == sorted(batch)
    assert len(batch) == 4 * 2


async def test_asynchronous_steps_take_what_is_ready(checkout: Path, tmp_path: Path) -> None:
    """`pairs` does not wait for the teachers; what comes later is there at the next step."""
    config = make_config(checkout, tmp_path)
    service = ReplayService(config)
    await service.start()
    released = asyncio.Event()

    class Slow:
        async def replay(self, state: StepState) -> Any:
            await released.wait()
            return await service.replay(state)

        async def totals(self) -> dict[str, float]:
            return await service.totals()

    table = make_table(config, Slow())
    try:
        table.channel.submit([await record(write(WRONG), SUBMIT)])
        assert (await asyncio.wait_for(table.channel.pairs(0), 5.0))[0] == []
        released.set()
        async with asyncio.timeout(20):
            while not table.pairs:  # noqa: ASYNC110 - nothing announces a pair
                await asyncio.sleep(0.02)
        found, metrics = await table.channel.pairs(1)
        assert len(found) >= 1
        assert metrics["replay/queued"] == 0.0
    finally:
        await table.channel.close()
        await service.stop()


async def test_a_queue_that_is_full_gives_up_the_oldest(checkout: Path, tmp_path: Path) -> None:
    config = make_config(checkout, tmp_path, SYNCHRONOUS, "--replay.queue=3")
    table = make_table(config, Dead())
    rollouts = [await record(write(WRONG), SUBMIT, number=number) for number in range(4)]
    table.channel.submit(rollouts)
    assert table.channel.counts["given_up"] == 5
    assert [(state.trace, state.step) for state in table.channel._queue] == [
        ("train-000001-002", 1), ("train-000001-003", 0), ("train-000001-003", 1)
    ]  # fmt: skip


async def test_a_service_that_is_gone_costs_pairs_and_not_the_run(checkout: Path, tmp_path: Path) -> None:
    config = make_config(checkout, tmp_path, SYNCHRONOUS)
    dead = Dead()
    table = make_table(config, dead)
    table.channel.submit([await record(write(WRONG), SUBMIT, number=number) for number in range(4)])
    found, metrics = await table.channel.pairs(0)
    assert found == []
    assert FAILURES <= dead.asked <= 8
    assert table.channel.resting
    assert any("rests" in warning for warning in table.warnings)
    table.channel.submit([await record(write(WRONG), SUBMIT)])
    assert (await table.channel.pairs(1))[0] == []
    assert dead.asked <= 8
    assert math.isfinite(metrics["replay/failed"])


async def test_a_schedule_at_zero_takes_no_pairs_and_keeps_them(checkout: Path, tmp_path: Path) -> None:
    config = make_config(
        checkout, tmp_path, SYNCHRONOUS, "--loop.steps=8",
        "--loss.replay_dpo.schedule.decay=linear", "--loss.replay_dpo.schedule.decay_steps=2",
    )  # fmt: skip
    service = ReplayService(config)
    await service.start()
    try:
        table = make_table(config, service)
        table.channel.submit([await record(write(WRONG), SUBMIT)])
        assert table.channel.rests(7)
        found, metrics = await table.channel.pairs(7)
        assert found == []
        assert metrics["pairs/ready"] == metrics["replay/pairs"] > 0
    finally:
        await service.stop()


async def test_two_teachers_are_down(checkout: Path, tmp_path: Path) -> None:
    """With `min_quorum = 1` the third one's word is enough; with 2 the channel has nothing to say."""
    down = [f"--teachers.{number}.base_url=http://127.0.0.1:9/v1" for number in (1, 2)]
    quick = [f"--teachers.{number}.retry.attempts=1" for number in (1, 2)]
    for least, expected in ((1, True), (2, False)):
        folder = tmp_path / str(least)
        options = [SYNCHRONOUS, *down, *quick, f"--replay.min_quorum={least}"]
        config = make_config(checkout, folder, *options)
        service = ReplayService(config)
        await service.start()
        try:
            table = make_table(config, service)
            table.channel.submit([await record(write(WRONG), SUBMIT)])
            found, metrics = await table.channel.pairs(0)
        finally:
            await service.stop()
        assert bool(found) is expected
        assert metrics["teachers/errors"] == 4.0
        assert expected or metrics["replay/skipped/too_few_families"] == 2.0
