"""Environment workers: each holds many OpenEnv sessions, against a server of its own or a given URL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from forge_composer.actors.calls import call_one, each
from forge_composer.config import Config
from forge_composer.types import EpisodeStart, EpisodeStep, ParsedAction

if TYPE_CHECKING:
    from forge_composer.envs.server import LocalServer
    from forge_composer.envs.session import SessionPool

MESSAGE_SLACK_S = 30.0
"""Time beyond an environment's own deadline that a message may take."""


class EnvironmentActor(Actor):
    """One worker. Model-written code never runs here: it runs in the server's sandbox."""

    def __init__(self) -> None:
        self.server: LocalServer | None = None
        self.pool: SessionPool | None = None

    @property
    def _ready(self) -> SessionPool:
        if self.pool is None:
            raise RuntimeError("EnvironmentActor.setup has not run")
        return self.pool

    @concurrent_endpoint
    async def setup(self, config: Config, index: int) -> str:
        """Start the server unless a URL is configured, and the session pool; returns the URL."""
        from forge_composer.envs.server import LocalServer
        from forge_composer.envs.session import SessionPool

        url = config.environment.url
        if url is None:
            log = Path(config.output_dir) / "logs" / f"environment_server_{index}.log"
            self.server = LocalServer(config.environment, log_file=log)
            url = await asyncio.to_thread(self.server.start)
        self.pool = SessionPool(url, config.environment)
        return url

    @concurrent_endpoint
    async def start(self, rollout_id: str, index: int, split: str, seed: int) -> EpisodeStart:
        """Open an episode."""
        return await self._ready.start(rollout_id, index=index, split=split, seed=seed)

    @concurrent_endpoint
    async def step(self, rollout_id: str, action: ParsedAction, finish: bool) -> EpisodeStep:
        """Carry out one assistant turn."""
        return await self._ready.step(rollout_id, action, finish=finish)

    @concurrent_endpoint
    async def end(self, rollout_id: str) -> None:
        """Give the episode's session back."""
        await self._ready.end(rollout_id)

    @concurrent_endpoint
    async def close(self) -> None:
        """Close all sessions and the server."""
        if self.pool is not None:
            await self.pool.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)
        self.pool = self.server = None


class EnvironmentService:
    """All workers as one `Environments` (`forge_composer.services`)."""

    def __init__(self, mesh: Any, config: Config) -> None:
        self.config = config
        self.workers: list[Any] = each(mesh.spawn("environment", EnvironmentActor))
        self._open = [0] * len(self.workers)
        self._worker_of: dict[str, int] = {}

    async def setup(self) -> list[str]:
        """Start every worker; returns the URLs of their servers."""
        limit = self.config.runtime.start_timeout_s
        urls: list[str] = await asyncio.gather(
            *(call_one(w, "setup", self.config, i, timeout=limit) for i, w in enumerate(self.workers))
        )
        return urls

    async def start(self, rollout_id: str, *, index: int, split: str, seed: int) -> EpisodeStart:
        """Open an episode on the worker with the fewest."""
        worker = min(range(len(self.workers)), key=lambda i: (self._open[i], i))
        self._worker_of[rollout_id] = worker
        self._open[worker] += 1
        # Waiting for a free session is part of the start, and the rollout has a deadline of its own.
        limit = self.config.rollout.timeout_s
        started: EpisodeStart = await call_one(
            self.workers[worker], "start", rollout_id, index, split, seed, timeout=limit
        )
        return started

    async def step(self, rollout_id: str, action: ParsedAction, *, finish: bool) -> EpisodeStep:
        """Carry out one assistant turn."""
        worker = self.workers[self._worker_of[rollout_id]]
        limit = self.config.environment.step_timeout_s + MESSAGE_SLACK_S
        step: EpisodeStep = await call_one(worker, "step", rollout_id, action, finish, timeout=limit)
        return step

    async def end(self, rollout_id: str) -> None:
        """Give the episode's session back."""
        worker = self._worker_of.pop(rollout_id, None)
        if worker is None:
            return
        self._open[worker] -= 1
        limit = self.config.environment.step_timeout_s + MESSAGE_SLACK_S
        await call_one(self.workers[worker], "end", rollout_id, timeout=limit)

    async def close(self) -> None:
        """Close all sessions and servers."""
        limit = self.config.runtime.stop_timeout_s
        await asyncio.gather(*(call_one(worker, "close", timeout=limit) for worker in self.workers))
