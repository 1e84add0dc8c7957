"""Fixtures and process settings that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch or Monarch: the tests run beside each other on few cores, and a dead process
# is to be noticed within a second.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHECKOUT = Path(__file__).resolve().parent.parent

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The least chat template that has roles and turn ends."""


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The repository's root."""
    return CHECKOUT


@pytest.fixture(scope="session")
def tiny_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint folder of a random Qwen3: 2 layers, hidden 64, 259 byte-level tokens, tied."""
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    tokenizer = _byte_tokenizer()
    tokenizer.save_pretrained(folder)
    _tiny_model(tokenizer).save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:
    """Bytes as tokens, so that any text has ids and decodes to itself; three ChatML specials after them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def _tiny_model(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(config)
        return model.eval()


@pytest.fixture(autouse=True)
def monarch_faults() -> Iterator[list[Any]]:
    """Collects Monarch's unhandled faults where a test uses Monarch.

    Its own hook interrupts the main thread, which would end the whole test session.
    """
    faults: list[Any] = []
    actor: Any = sys.modules.get("monarch.actor")
    if actor is None:
        yield faults
        return
    previous = actor.unhandled_fault_hook
    actor.unhandled_fault_hook = faults.append
    yield faults
    actor.unhandled_fault_hook = previous
