"""The policy as a torchtitan model: built from a Hugging Face folder, parallelised, loaded, exported."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_composer.training import titan
from forge_composer.training.attention import DenseMaskAttention, PackedQwen3

Attention = Literal["dense", "flex", "varlen"]
_LINEAR_INIT = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
_NORM_INIT = {"weight": nn.init.ones_}

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


class UnsupportedModelError(ValueError):
    """The checkpoint folder holds a model that the trainer cannot build."""


def model_config(folder: Path, attention: Attention) -> Any:
    """torchtitan's config of the Qwen3 dense model in a Hugging Face folder.

    Raises:
        UnsupportedModelError: another architecture, or an option that torchtitan's Qwen3 does not have.
    """
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _refuse_unsupported(hf, folder)
    norm = partial(_norm, eps=float(hf["rms_norm_eps"]))
    dim, heads = hf["hidden_size"], hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or dim // heads
    rope = titan.CosSinRoPE.Config(
        dim=head_dim, max_seq_len=hf["max_position_embeddings"], theta=_rope_theta(hf)
    )
    inner = DenseMaskAttention.Config() if attention == "dense" else titan.get_attention_config(attention)
    layers = [
        titan.Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=titan.make_gqa_config(
                dim=dim,
                n_heads=heads,
                n_kv_heads=hf["num_key_value_heads"],
                head_dim=head_dim,
                wqkv_param_init=_LINEAR_INIT,
                wo_param_init=_LINEAR_INIT,
                inner_attention=inner,
                fuse_qkv=False,  # full state dicts and exports stay simple; Muon wants whole matrices
                rope=rope,
                qk_norm=norm(head_dim),
            ),
            feed_forward=titan.make_ffn_config(
                dim=dim,
                hidden_dim=hf["intermediate_size"],
                w1_param_init=_LINEAR_INIT,
                w2w3_param_init=_LINEAR_INIT,
            ),
        )
        for _ in range(hf["num_hidden_layers"])
    ]
    tied = bool(hf.get("tie_word_embeddings", False))
    return PackedQwen3.Config(
        vocab_size=hf["vocab_size"],
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=titan.Embedding.Config(
            num_embeddings=hf["vocab_size"],
            embedding_dim=dim,
            param_init={"weight": titan.skip_param_init} if tied else {"weight": _LINEAR_INIT["weight"]},
        ),
        lm_head=titan.Linear.Config(
            in_features=dim, out_features=hf["vocab_size"], param_init=_LINEAR_INIT
        ),
        layers=layers,
    )


def _norm(dim: int, eps: float) -> Any:
    return titan.RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=_NORM_INIT)


def _rope_theta(hf: dict[str, Any]) -> float:
    """transformers 5 moved the base into `rope_parameters`."""
    parameters = hf.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)))


def _refuse_unsupported(hf: dict[str, Any], folder: Path) -> None:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    reasons = [
        (hf.get("model_type") != "qwen3", f"model_type {hf.get('model_type')!r} is not 'qwen3'"),
        (bool(hf.get("attention_bias")), "attention_bias"),
        (bool(hf.get("use_sliding_window")), "use_sliding_window"),
        (rope.get("rope_type", "default") != "default", f"rope_type {rope.get('rope_type')!r}"),
    ]
    for wrong, reason in reasons:
        if wrong:
            raise UnsupportedModelError(f"{folder / 'config.json'}: {reason} is not supported; use a Qwen3 dense model")


@dataclass(slots=True)
class Policy:
    """The parallelised model of this rank, and what loads and exports it."""

    model: Any
    adapter: Any
    parallel_dims: Any
    source: Path

    def forward(self, token_ids_BL: Tensor, positions_BL: Tensor) -> Tensor:
        """Logits [B, L, V]; under tensor parallelism a DTensor sharded over the vocabulary."""
        masks = self.model.get_attention_masks(positions_BL)
        logits: Tensor = self.model(token_ids_BL, positions=positions_BL, attention_masks=masks)
        return logits

    def load_hf(self) -> None:
        """Read the source folder's safetensors, each rank its own shards."""
        state = self.adapter.to_hf(self.model.state_dict())
        dcp.load(state, storage_reader=self.adapter.get_hf_storage_reader(str(self.source)))
        self.model.load_state_dict(self.adapter.from_hf(state), strict=False)

    def hf_state_dict(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """All weights under Hugging Face names on rank 0, None elsewhere. A collective on all ranks.

        Gathered one tensor at a time: the peak is one rank's shard plus the result on rank 0.
        """
        keep = dist.get_rank() == 0
        state: dict[str, Tensor] = {}
        for name, value in self.adapter.to_hf(self.model.state_dict()).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if keep:
                state[name] = whole.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        return state if keep else None

    def export_hf(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face folder that transformers and vLLM load. A collective on all ranks."""
        state = self.hf_state_dict(dtype)
        if state is not None:
            from safetensors.torch import save_file

            folder.mkdir(parents=True, exist_ok=True)
            config = json.loads((self.source / "config.json").read_text(encoding="utf-8"))
            config["dtype"] = str(dtype).removeprefix("torch.")
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in TOKENIZER_FILES:
                if (self.source / name).exists():
                    shutil.copyfile(self.source / name, folder / name)
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()


def build_policy(
    folder: Path,
    *,
    attention: Attention,
    parallelism: Any,
    training: Any,
    activation_checkpointing: Literal["none", "selective", "full"],
    parallel_dims: Any,
    device: str,
) -> Policy:
    """Build on the meta device, shard, allocate, load. Weights are never initialised at random on shards."""
    config = model_config(folder, attention)
    runtime = SimpleNamespace(parallelism=parallelism, training=training, debug=titan.DebugConfig())
    config.update_from_config(config=runtime)  # fills in the sharding plan, so before the build
    with torch.device("meta"):
        model = config.build()
    recompute = {"none": None, "selective": titan.SelectiveAC.Config(), "full": titan.FullAC.Config()}
    model = titan.parallelize_qwen3(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=titan.CompileConfig(),
        ac_config=recompute[activation_checkpointing],
        dump_folder="",
    )
    if device == "cpu":
        titan.use_sum_reductions(model)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)  # the rotary tables; weights come next
    policy = Policy(model, titan.Qwen3StateDictAdapter(config, str(folder)), parallel_dims, folder)
    policy.load_hf()
    return policy
