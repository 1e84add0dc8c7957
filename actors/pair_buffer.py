"""The pair buffer in its own process, so that its pairs are not in the controller's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from forge_composer.actors.calls import call_one, each
from forge_composer.batching.preference_rows import TokenPair
from forge_composer.buffers.pair_buffer import PairBuffer
from forge_composer.config import Config
from forge_composer.config.replay import PairBufferConfig
from forge_composer.preferences.records import PreferencePair

MESSAGE_TIMEOUT_S = 60.0
"""Longest wait for an answer; none of them waits for anything."""


class PairBufferActor(Actor):
    """Endpoints are concurrent; each is done without a pause."""

    def __init__(self, config: PairBufferConfig, seed: int) -> None:
        self.buffer = PairBuffer(config, seed=seed)

    @concurrent_endpoint
    async def put(self, pairs: Sequence[PreferencePair]) -> None:
        """Take pairs in."""
        await self.buffer.put(pairs)

    @concurrent_endpoint
    async def unscored(self, most: int) -> list[PreferencePair]:
        """Pairs without a reference."""
        return await self.buffer.unscored(most)

    @concurrent_endpoint
    async def set_references(self, references: Mapping[str, tuple[float, float]]) -> None:
        """References by pair id."""
        await self.buffer.set_references(references)

    @concurrent_endpoint
    async def sample(self, version: int, most: int) -> list[TokenPair]:
        """Pairs for an optimizer step."""
        return await self.buffer.sample(version, most)

    @concurrent_endpoint
    async def stats(self) -> dict[str, float]:
        """Counts."""
        return await self.buffer.stats()

    @concurrent_endpoint
    async def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return await self.buffer.state_dict()

    @concurrent_endpoint
    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved buffer."""
        await self.buffer.load_state_dict(state)


class PairBufferClient:
    """The actor as a `PairStore` (`forge_composer.services`)."""

    def __init__(self, mesh: Any, config: Config) -> None:
        (self.actor,) = each(mesh.spawn("pair_buffer", PairBufferActor, config.replay.buffer, config.seed))

    async def _call(self, name: str, *args: Any) -> Any:
        return await call_one(self.actor, name, *args, timeout=MESSAGE_TIMEOUT_S)

    async def put(self, pairs: Sequence[PreferencePair]) -> None:
        """Take pairs in; the oldest go where there is no room."""
        await self._call("put", list(pairs))

    async def unscored(self, most: int) -> list[PreferencePair]:
        """Pairs without a reference; each is handed out once."""
        pairs: list[PreferencePair] = await self._call("unscored", most)
        return pairs

    async def set_references(self, references: Mapping[str, tuple[float, float]]) -> None:
        """Summed log-probabilities (nats) of the chosen and the rejected side, by pair id."""
        await self._call("set_references", dict(references))

    async def sample(self, version: int, most: int) -> list[TokenPair]:
        """Fresh pairs with a reference, for the optimizer step of a policy version."""
        pairs: list[TokenPair] = await self._call("sample", version, most)
        return pairs

    async def stats(self) -> dict[str, float]:
        """Counts, by name."""
        counts: dict[str, float] = await self._call("stats")
        return counts

    async def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types, for the checkpoint."""
        state: dict[str, Any] = await self._call("state_dict")
        return state

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: it is no saved buffer.
        """
        await self._call("load_state_dict", dict(state))
