"""Actors that tests spawn; importable, so that child processes load them by name."""

from __future__ import annotations

import os
import signal
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank


class Toy(Actor):
    def __init__(self) -> None:
        self.rank = current_rank().rank

    @concurrent_endpoint
    async def about(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "group": os.getpgid(0),
        }

    @concurrent_endpoint
    async def fail(self) -> None:
        raise KeyError("what the actor raised")

    @concurrent_endpoint
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @concurrent_endpoint
    async def sleep(self) -> None:
        import asyncio

        await asyncio.sleep(3600)
