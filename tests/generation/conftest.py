"""Tiny models and an engine to sample from."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 96
CONTEXT = 512


def _host_module() -> Any:
    """`engine_host.py` beside this file: tests are no package, so it is loaded by its path."""
    if "engine_host" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "engine_host", Path(__file__).with_name("engine_host.py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["engine_host"] = module
        spec.loader.exec_module(module)
    return sys.modules["engine_host"]


def make_qwen3(seed: int, *, tied: bool = True) -> Any:
    """A random float32 Qwen3 (head_dim 32 is the least that vLLM's CPU attention takes)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        dtype="float32",
        initializer_range=0.3,  # far from uniform, so that wrong weights cannot look right
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def reference_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of tokens 1..n-1, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights under their Hugging Face names, tied ones once."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="session")
def old_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tied model and its checkpoint folder."""
    model, folder = make_qwen3(0), tmp_path_factory.mktemp("old")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="session")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The same architecture with other weights."""
    model, folder = make_qwen3(1), tmp_path_factory.mktemp("new")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="session")
def reference() -> Callable[..., torch.Tensor]:
    return reference_logprobs


@pytest.fixture(scope="session")
def tensors_of() -> Callable[[Any], dict[str, torch.Tensor]]:
    return named_tensors


@pytest.fixture(scope="session")
def qwen3() -> Callable[..., Any]:
    return make_qwen3


@pytest.fixture(scope="session")
def start_host(checkout: Path) -> Iterator[Callable[..., Any]]:
    """Starts engine processes that end with the session, if not before."""
    hosts: list[Any] = []

    def start(model: Path, **config: Any) -> Any:
        defaults = {"max_model_len": CONTEXT, "kv_cache_gib": 0.125, "max_num_seqs": 8}
        hosts.append(_host_module().EngineHost(model, checkout, **{**defaults, **config}))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()
