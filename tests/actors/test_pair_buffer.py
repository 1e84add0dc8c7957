"""The pair buffer in a process of its own: the same as the one here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_composer.actors.pair_buffer import PairBufferClient
from forge_composer.actors.runtime import MonarchRuntime, Role
from forge_composer.buffers.pair_buffer import PairBuffer
from forge_composer.config.load import load
from forge_composer.config.schema import RuntimeConfig
from tests.buffers.pairs import make_pair, without_tokens


async def test_far_buffer_is_the_near_one(checkout: Path) -> None:
    """Put, score, sample, save and restore over messages; what it refuses is raised here."""
    config = load(checkout / "configs" / "cpu.toml", ["--replay.buffer.max_uses=2", "--seed=5"])
    near = PairBuffer(config.replay.buffer, seed=5)
    pairs = [make_pair(number) for number in range(10)]
    references = {pair.pair_id: (-1.5, -2.5) for pair in pairs[:8]}
    async with MonarchRuntime(RuntimeConfig(), (Role("buffer", per_host=1),)) as runtime:
        far = PairBufferClient(runtime.spawn("buffer"), config)
        for buffer in (near, far):
            await buffer.put(pairs)
            assert await buffer.unscored(8) == pairs[:8]
            await buffer.set_references(references)
        assert await far.sample(0, 4) == await near.sample(0, 4)
        assert await far.stats() == await near.stats()
        state = await far.state_dict()
        assert state == await near.state_dict()
        expected = await near.sample(1, 4)
        assert len(expected) == 4
        assert await far.sample(1, 4) == expected
        await far.load_state_dict(json.loads(json.dumps(state)))
        assert await far.sample(1, 4) == expected
        with pytest.raises(ValueError, match="pair trace-3#2 has no tokens"):
            await far.put([without_tokens(11)])
        with pytest.raises(ValueError, match="no saved pair buffer"):
            await far.load_state_dict({"format": "other"})
        assert (await far.stats())["inserted"] == 10.0
