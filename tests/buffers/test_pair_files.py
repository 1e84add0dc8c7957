"""A saved pair buffer: there as a whole or not at all, and equal when it is read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_composer.buffers.pair_buffer import PairBuffer
from forge_composer.buffers.pair_files import load_pairs, save_pairs
from forge_composer.config.replay import PairBufferConfig
from tests.buffers.pairs import make_pair


async def test_a_buffer_comes_back_in_the_middle_of_its_use(tmp_path: Path) -> None:
    buffer = PairBuffer(PairBufferConfig(max_uses=2), seed=1)
    await buffer.put([make_pair(number) for number in range(6)])
    waiting = await buffer.unscored(4)
    await buffer.set_references({pair.pair_id: (-1.25, -2.5) for pair in waiting})
    await buffer.sample(0, 2)
    save_pairs(tmp_path, 7, await buffer.state_dict(), keep=2)
    again = PairBuffer(PairBufferConfig(max_uses=2), seed=1)
    state = load_pairs(tmp_path, 7)
    assert state is not None
    await again.load_state_dict(state)
    assert await again.stats() == await buffer.stats()
    for version in (1, 2):
        assert await again.sample(version, 3) == await buffer.sample(version, 3)


def test_old_files_go_and_a_missing_one_is_none(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        save_pairs(tmp_path, step, {"step": step}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs-100.json", "pairs-15.json"]
    assert load_pairs(tmp_path, 100) == {"step": 100}
    assert load_pairs(tmp_path, 5) is None


@pytest.mark.parametrize("content", ['{"format": "x", "ent', "[]", ""])
def test_a_torn_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "pairs-3.json").write_text(content)
    with pytest.raises(ValueError, match=r"pairs-3\.json.*remove the file"):
        load_pairs(tmp_path, 3)


def test_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    save_pairs(tmp_path, 1, {"text": "a\ud83d"}, keep=1)
    assert load_pairs(tmp_path, 1) == {"text": "a\ud83d"}
    assert json.loads((tmp_path / "pairs-1.json").read_text(errors="surrogatepass"))
