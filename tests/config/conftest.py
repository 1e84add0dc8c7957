"""A model folder and a config that are right, for tests to spoil."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """The files of a checkpoint, without sense in them but for config.json."""
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    return folder


@pytest.fixture
def write_config(tmp_path: Path, model_folder: Path) -> Callable[..., Path]:
    """Writes a right config, with the given dotted fields changed (None: removed)."""
    import tomli_w

    def write(**changes: Any) -> Path:
        tree: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(model_folder)},
            "runtime": {"device": "cpu"},
            "trainer": {"nproc": 2, "dtype": "float32", "seq_len": 1024, "parallelism": {"dp_shard": 2}},
            "generator": {"max_model_len": 1024, "sampling": {"max_turn_tokens": 128}},
            "rollout": {"group_size": 4, "max_prompt_tokens": 512, "max_completion_tokens": 256},
            "loop": {"steps": 10, "groups_per_step": 4},
        }
        for dotted, value in changes.items():
            *path, last = dotted.split("__")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            if value is None:
                del node[last]
            else:
                node[last] = value
        file = tmp_path / "run.toml"
        file.write_text(tomli_w.dumps(tree))
        return file

    return write
