"""Reading the sizes in a Hugging Face checkpoint folder, and what such a folder must hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers of a Qwen3 dense `config.json`."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention with QK norms, gated MLP, two norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied head is counted once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


_QWEN3_VOCAB, _QWEN3_POSITIONS = 151936, 40960
PUBLISHED = {
    name: ModelSizes(layers, hidden, intermediate, heads, 8, 128, _QWEN3_VOCAB, _QWEN3_POSITIONS, tied)
    for name, layers, hidden, intermediate, heads, tied in (
        ("Qwen3-0.6B", 28, 1024, 3072, 16, True),
        ("Qwen3-1.7B", 28, 2048, 6144, 16, True),
        ("Qwen3-4B", 36, 2560, 9728, 32, True),
        ("Qwen3-8B", 36, 4096, 12288, 32, False),
        ("Qwen3-14B", 40, 5120, 17408, 40, False),
        ("Qwen3-32B", 64, 5120, 25600, 64, False),
    )
}
"""Sizes of the published models, so that a plan can be made where the checkpoint is not."""


def read_config(folder: Path) -> dict[str, Any] | None:
    """`config.json` as a dict; None if it is missing or is no JSON object."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def sizes_of(content: dict[str, Any]) -> ModelSizes:
    """The sizes in a `config.json`.

    Raises:
        ValueError: naming the keys that are missing or are no numbers.
    """
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    bad = [name for name in names if not isinstance(content.get(name), int) or content[name] < 1]
    if bad:
        raise ValueError(f"config.json lacks a positive whole number for {', '.join(bad)}")
    layers, hidden, intermediate, heads, kv_heads, vocab, positions = (content[name] for name in names)
    return ModelSizes(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=content.get("head_dim") or hidden // heads,
        vocab=vocab,
        max_positions=positions,
        tied=bool(content.get("tie_word_embeddings", False)),
    )


def missing_files(folder: Path) -> list[str]:
    """What a checkpoint folder lacks to be a policy, in words; `config.json` is looked at elsewhere."""
    lacks = []
    index = folder / "model.safetensors.index.json"
    if index.exists():
        lacks += _missing_shards(index)
    elif not any(folder.glob("*.safetensors")):
        lacks.append("weights (*.safetensors)")
    has_vocab = (folder / "vocab.json").exists() and (folder / "merges.txt").exists()
    if not (folder / "tokenizer.json").exists() and not has_vocab:
        lacks.append("a tokenizer (tokenizer.json)")
    if not _has_chat_template(folder):
        lacks.append("a chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    return lacks


def _missing_shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        return [f"a readable {index.name}"]
    return [f"the weight file {shard}" for shard in shards if not (index.parent / shard).exists()]


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(settings.get("chat_template"))
