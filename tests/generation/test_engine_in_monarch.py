"""The engine inside a Monarch actor: concurrent endpoints on its loop, weights through shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_composer.types import SamplingRequest, ScoreRequest
from forge_composer.weights.transport import make_sender

pytestmark = pytest.mark.slow


def actor_class() -> Any:
    """Defined in a function, so that it travels by value: the actor's process cannot import this file."""
    from monarch.actor import Actor, concurrent_endpoint

    class GeneratorUnderTest(Actor):  # type: ignore[misc]
        def __init__(self, model: str) -> None:
            from forge_composer.config.schema import GeneratorConfig, ModelConfig
            from forge_composer.generation.engine import GenerationEngine
            from forge_composer.weights.transport import make_receiver

            config = GeneratorConfig(max_model_len=512, kv_cache_gib=0.125, max_num_seqs=8)
            self.engine = GenerationEngine(ModelConfig(path=model), config, device="cpu", seed=0)
            self.receiver = make_receiver("shared_memory", device="cpu")

        @concurrent_endpoint
        async def start(self) -> float:
            return await self.engine.start()

        @concurrent_endpoint
        async def generate(self, request: SamplingRequest) -> Any:
            return await self.engine.generate(request)

        @concurrent_endpoint
        async def score(self, requests: list[ScoreRequest]) -> Any:
            return await self.engine.score(requests)

        @concurrent_endpoint
        async def update(self, manifest: Any) -> float:
            return await self.receiver.load_into(self.engine, manifest)

        @concurrent_endpoint
        async def close(self) -> None:
            await self.engine.close()

    return GeneratorUnderTest


async def test_engine_in_an_actor(
    old_model: tuple[Any, Path],
    new_model: tuple[Any, Path],
    reference: Callable[..., torch.Tensor],
    tensors_of: Callable[..., dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    checkout: Path,
    tmp_path: Path,
    monarch_faults: list[Any],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    from monarch.actor import this_host

    mesh = this_host().spawn_procs(per_host={"gpus": 1}, name="generator")
    sender = make_sender("shared_memory", fallback_dir=tmp_path, device="cpu")
    try:
        actor = mesh.spawn("generator", actor_class(), str(old_model[1]))
        assert await asyncio.wait_for(actor.start.call_one().as_asyncio(), 120) > 0

        asked = [SamplingRequest(f"r{i}", tuple(range(10, 30 + i)), 150, seed=i) for i in range(6)]
        running = [asyncio.ensure_future(actor.generate.call_one(one).as_asyncio()) for one in asked]
        short = SamplingRequest("short", (5, 6, 7), 2, seed=0)
        await asyncio.wait_for(actor.generate.call_one(short).as_asyncio(), 60)
        assert not all(future.done() for future in running)  # the actor answers while others are decoded

        manifest = sender.publish(1, tensors_of(new_model[0]).items())
        assert 0 < await asyncio.wait_for(actor.update.call_one(manifest).as_asyncio(), 60) < 5
        completions = await asyncio.wait_for(asyncio.gather(*running), 60)
        assert all(len(one.token_ids) == 150 for one in completions)
        assert all(one.versions[0] == 0 and one.versions[-1] == 1 for one in completions)

        tokens = tuple(range(3, 90))
        (scores,) = await asyncio.wait_for(actor.score.call_one([ScoreRequest(tokens)]).as_asyncio(), 60)
        wanted = reference(new_model[0], list(tokens))
        torch.testing.assert_close(torch.tensor(scores), wanted, atol=1e-4, rtol=0)
        await asyncio.wait_for(actor.close.call_one().as_asyncio(), 30)
    finally:
        await asyncio.wait_for(mesh.stop().as_asyncio(), 20)
        sender.close()
    assert not monarch_faults
