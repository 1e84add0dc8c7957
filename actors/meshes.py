"""The meshes of a run, started together and ended together.

In a notebook::

    config = forge_composer.config.load("configs/cpu.toml")
    async with Meshes(config) as meshes:
        completion = await meshes.generators.generate(request)

A script wraps the same in `apps.grpo_composer`.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from forge_composer.actors.environment import EnvironmentService
from forge_composer.actors.generator import GeneratorService
from forge_composer.actors.pair_buffer import PairBufferClient
from forge_composer.actors.replay_buffer import RolloutBufferClient
from forge_composer.actors.runtime import MonarchRuntime, Role
from forge_composer.actors.teacher_replay import TeacherReplayClient
from forge_composer.actors.trainer import TrainerClient
from forge_composer.config import Config
from forge_composer.config.machine import resolve_device
from forge_composer.weights.shared_memory import SHARED_MEMORY, sweep

CLOSE_TIMEOUT_S = 3.0
"""Longest wait for the actors' own clean-up before their processes are stopped."""


def roles_of(config: Config) -> tuple[Role, ...]:
    """The roles of a run and the processes of each."""
    runtime = config.runtime
    threads = {"OMP_NUM_THREADS": str(runtime.threads)}
    one_thread = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    roles = (
        Role("trainer", config.trainer.nproc // runtime.trainer_hosts, runtime.trainer_hosts, threads),
        Role(
            "generator",
            config.generator.replicas // runtime.generator_hosts,
            runtime.generator_hosts,
            threads,
        ),
        Role("environment", config.environment.workers, 1, one_thread),
        Role("buffer", 1, 1, one_thread),
    )
    return (*roles, Role("teacher_replay", 1, 1, one_thread)) if replays(config) else roles


def replays(config: Config) -> bool:
    """Whether traces are replayed to teachers."""
    return config.loss.replay_dpo.weight > 0


class Meshes:
    """Trainer, generators, environments, buffers and teachers of one run; an asynchronous context manager."""

    trainer: TrainerClient
    generators: GeneratorService
    environments: EnvironmentService
    buffer: RolloutBufferClient
    pairs: PairBufferClient | None = None
    """There where traces are replayed, as `teachers`; in the process of the rollout buffer."""
    teachers: TeacherReplayClient | None = None

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = resolve_device(config)
        self.runtime = MonarchRuntime(config.runtime, roles_of(config))
        self.start_seconds: dict[str, float] = {}
        """Seconds that each role took to come up."""

    async def __aenter__(self) -> Meshes:
        await self.runtime.__aenter__()
        try:
            self._spawn()
            await self._setup()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _spawn(self) -> None:
        buffers = self.runtime.spawn("buffer")
        self.buffer = RolloutBufferClient(buffers, self.config)
        if replays(self.config):
            self.pairs = PairBufferClient(buffers, self.config)
            self.teachers = TeacherReplayClient(self.runtime.spawn("teacher_replay"), self.config)
        self.environments = EnvironmentService(self.runtime.spawn("environment"), self.config)
        self.generators = GeneratorService(self.runtime.spawn("generator"), self.config)
        self.trainer = TrainerClient(self.runtime.spawn("trainer"), self.config)

    async def _setup(self) -> None:
        """All roles come up side by side; the slowest decides."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._timed("environment", self.environments.setup()))
            tasks.create_task(self._timed("generator", self.generators.setup(self.device)))
            tasks.create_task(self._timed("trainer", self.trainer.setup(self.device)))
            if self.teachers is not None:
                tasks.create_task(self._timed("teacher_replay", self.teachers.setup()))

    async def _timed(self, role: str, coming_up: object) -> None:
        began = asyncio.get_running_loop().time()
        await coming_up  # type: ignore[misc]
        self.start_seconds[role] = asyncio.get_running_loop().time() - began

    async def close(self) -> None:
        """Let the actors clean up, then stop their processes. Bounded, and repeatable."""
        parts = [getattr(self, name, None) for name in ("environments", "generators", "trainer", "teachers")]
        closing = [part.close() for part in parts if part is not None]
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*closing, return_exceptions=True)
        await self.runtime.stop()
        if self.config.weights.transport == "shared_memory":
            sweep(SHARED_MEMORY)  # what a trainer that was killed has left
