"""The rollout-group buffer in its own process, so that its groups are not in the controller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from forge_composer.actors.calls import call_one, each
from forge_composer.buffers.rollout_buffer import BatchTicket, RolloutBuffer
from forge_composer.config import Config
from forge_composer.types import RolloutGroup

MESSAGE_TIMEOUT_S = 60.0
"""Longest wait for an answer that does not wait for rollouts."""


class RolloutBufferActor(Actor):
    """Endpoints are concurrent: `admit` and `take_batch` wait while others go on."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.buffer = RolloutBuffer(**options)

    @concurrent_endpoint
    async def admit(self, most: int) -> list[int]:
        """Wait for free slots."""
        return await self.buffer.admit(most)

    @concurrent_endpoint
    async def put(self, group: RolloutGroup) -> None:
        """Hand in a finished group."""
        await self.buffer.put(group)

    @concurrent_endpoint
    async def take_batch(self, version: int) -> BatchTicket:
        """Wait for the next batch."""
        return await self.buffer.take_batch(version)

    @concurrent_endpoint
    async def release(self, group_ids: Sequence[int]) -> None:
        """Free slots."""
        await self.buffer.release(group_ids)

    @concurrent_endpoint
    async def close(self) -> None:
        """Wake every waiter."""
        await self.buffer.close()


class RolloutBufferClient:
    """The buffer actor as a `GroupBuffer` (`forge_composer.services`)."""

    def __init__(self, mesh: Any, config: Config) -> None:
        loop = config.loop
        options = {
            "groups_per_step": loop.groups_per_step,
            "max_policy_lag": loop.max_policy_lag,
            "zero_variance": loop.zero_variance,
            "max_untrainable_groups": loop.max_untrainable_batches * loop.groups_per_step,
            "distilled": config.loss.sdpo.weight > 0 or config.loss.replay_dpo.weight > 0,
        }
        (self.actor,) = each(mesh.spawn("rollout_buffer", RolloutBufferActor, options))
        # A batch needs at most the time of its slowest rollout, with its retries, and a replacement.
        self.patience = 2 * config.rollout.timeout_s * (1 + config.rollout.retries)

    async def admit(self, most: int) -> list[int]:
        """Wait for free slots; back-pressure, so the wait has no deadline of its own but the batch's."""
        ids: list[int] = await call_one(self.actor, "admit", most, timeout=10 * self.patience)
        return ids

    async def put(self, group: RolloutGroup) -> None:
        """Hand in a finished group."""
        await call_one(self.actor, "put", group, timeout=MESSAGE_TIMEOUT_S)

    async def take_batch(self, version: int) -> BatchTicket:
        """Wait for the next batch."""
        ticket: BatchTicket = await call_one(self.actor, "take_batch", version, timeout=self.patience)
        return ticket

    async def release(self, group_ids: Sequence[int]) -> None:
        """Free slots."""
        await call_one(self.actor, "release", list(group_ids), timeout=MESSAGE_TIMEOUT_S)

    async def close(self) -> None:
        """Wake every waiter."""
        await call_one(self.actor, "close", timeout=MESSAGE_TIMEOUT_S)
