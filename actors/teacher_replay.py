"""The teacher-replay service in its own process: HTTP clients of all teachers, and the run's ledger.

It asks and classifies; what the answers make of a step is decided by `forge_composer.preferences`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from forge_composer.actors.calls import call_one, each
from forge_composer.config import Config
from forge_composer.config.teachers import TeacherConfig
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.preferences.steps import StepState

if TYPE_CHECKING:
    from forge_composer.preferences.service import ReplayService

MESSAGE_TIMEOUT_S = 60.0
"""Longest wait for an answer that does not wait for a teacher."""


class TeacherReplayActor(Actor):
    """Endpoints are concurrent: many steps are asked about at once."""

    def __init__(self) -> None:
        self.service: ReplayService | None = None

    @property
    def _ready(self) -> ReplayService:
        if self.service is None:
            raise RuntimeError("TeacherReplayActor.setup has not run")
        return self.service

    @concurrent_endpoint
    async def setup(self, config: Config) -> None:
        """Open the ledger and the clients; start the scripted teachers, where the run brings its own."""
        from forge_composer.preferences.service import ReplayService

        service = ReplayService(config)
        await service.start()
        self.service = service

    @concurrent_endpoint
    async def replay(self, state: StepState) -> ReplayedStep:
        """Ask every teacher about one step."""
        return await self._ready.replay(state)

    @concurrent_endpoint
    async def totals(self) -> dict[str, float]:
        """Calls and money so far, over all starts of the run."""
        return await self._ready.totals()

    @concurrent_endpoint
    async def close(self) -> None:
        """Close clients and ledger."""
        service, self.service = self.service, None
        if service is not None:
            await service.stop()


class TeacherReplayClient:
    """The actor as `TeacherReplay` (`forge_composer.services`)."""

    def __init__(self, mesh: Any, config: Config) -> None:
        self.config = config
        (self.actor,) = each(mesh.spawn("teacher_replay", TeacherReplayActor))
        self.patience = MESSAGE_TIMEOUT_S + config.replay.samples * max(
            (_longest_ask(teacher, config.replay.concurrency) for teacher in config.teachers), default=0.0
        )

    async def setup(self) -> None:
        """Open the ledger and the clients."""
        await call_one(self.actor, "setup", self.config, timeout=self.config.runtime.start_timeout_s)

    async def replay(self, state: StepState) -> ReplayedStep:
        """Ask every teacher about one step."""
        step: ReplayedStep = await call_one(self.actor, "replay", state, timeout=self.patience)
        return step

    async def totals(self) -> dict[str, float]:
        """Calls and money so far."""
        totals: dict[str, float] = await call_one(self.actor, "totals", timeout=MESSAGE_TIMEOUT_S)
        return totals

    async def close(self) -> None:
        """Close clients and ledger."""
        await call_one(self.actor, "close", timeout=self.config.runtime.stop_timeout_s)


def _longest_ask(teacher: TeacherConfig, at_once: int) -> float:
    """Bound on the seconds that one answer can take, the wait for a slot included; a bench ends earlier."""
    retry = teacher.retry
    one = retry.attempts * (teacher.timeout_s + retry.backoff_max_s + retry.retry_after_max_s)
    queued = -(-at_once // teacher.concurrency)
    return one * queued
