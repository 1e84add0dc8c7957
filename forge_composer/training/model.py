"""The policy: a Qwen3 dense model of any size, from a Hugging Face folder to sharded parameters and back.

Shape suffixes: B = rows, L = positions, D = hidden size, N = selected tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor

from forge_composer.config.model_folder import ModelSizes, read_config, sizes_of
from forge_composer.training import titan
from forge_composer.training.attention import DocumentAttention, document_spans
from forge_composer.training.lm_head import HeadReader, LMHead


class PolicyModel(titan.Qwen3Model):  # type: ignore[misc]  # torchtitan ships no types
    """torchtitan's Qwen3 with the LM head applied to selected positions only.

    Most tokens of a rollout are context; their logits would be the largest tensor of the step and are never
    looked at. The selection is inside `forward`, so that FSDP's hooks see one forward pass.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Qwen3Model.Config):  # type: ignore[misc]
        """As torchtitan's."""

    _skip_lm_head = True

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        positions_BL: Tensor,
        attention_masks: Any,
        select_N: Tensor,
        reader: HeadReader,
    ) -> tuple[Tensor, ...]:
        """What `reader` makes of the hidden states at the flat positions `select_N` (row x L + position)."""
        hidden_BLD = super().forward(tokens_BL, positions_BL, attention_masks)
        if isinstance(hidden_BLD, DTensor):  # replicated over the tensor-parallel ranks
            hidden_BLD = hidden_BLD.to_local()
        hidden_ND = hidden_BLD.flatten(0, 1).index_select(0, select_N)
        result: tuple[Tensor, ...] = self.lm_head(hidden_ND, reader)
        return result

    def parallelize(self, parallel_dims: titan.ParallelDims) -> None:
        """Shard over the tensor-parallel ranks, and tie again what that has untied.

        torchtitan ties once more after sharding, but FSDP by then holds two parameters; where the rows do not
        divide evenly each pads its own copy, and the optimizer's updates reach only one of them.
        """
        super().parallelize(parallel_dims)
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight

    def get_attention_masks(self, positions_BL: Tensor) -> Any:
        """What the configured attention needs to keep documents apart; they start at position 0."""
        if isinstance(self.config.first_attention.inner_attention, DocumentAttention.Config):
            return document_spans(positions_BL)
        return super().get_attention_masks(positions_BL)


def resolve_attention(attention: str, device: str) -> str:
    """`auto` for the device; otherwise the name itself.

    Raises:
        ValueError: the attention needs CUDA and the device is another.
    """
    if attention == "auto":
        return "flex" if device == "cuda" else "dense"
    if attention != "dense" and device != "cuda":
        raise ValueError(f"model.attention = {attention!r} needs CUDA; use 'dense' or 'auto' on {device}")
    return attention


def model_config(folder: Path, *, attention: str, tp: int) -> PolicyModel.Config:
    """torchtitan's model config for a Hugging Face folder.

    Args:
        folder: holds `config.json` of a Qwen3 dense model.
        attention: `dense`, `flex` or `varlen`.
        tp: tensor-parallel degree.

    Raises:
        ValueError: the folder holds another architecture, or an option that is not supported.
    """
    content = read_config(folder)
    if content is None:
        raise ValueError(f"model.path: {folder} has no readable config.json")
    _refuse_unsupported(content, folder, tp)
    sizes = sizes_of(content)
    norm_eps = float(content.get("rms_norm_eps", 1e-6))
    rope = content.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta", content.get("rope_theta", 10000.0)))
    inner_attention = (
        DocumentAttention.Config() if attention == "dense" else titan.get_attention_config(attention)
    )
    config = PolicyModel.Config(
        vocab_size=sizes.vocab,
        dim=sizes.hidden,
        enable_weight_tying=sizes.tied,
        norm=_norm(sizes.hidden, norm_eps),
        tok_embeddings=titan.Embedding.Config(
            num_embeddings=sizes.vocab, embedding_dim=sizes.hidden, param_init=_NO_INIT
        ),
        lm_head=LMHead.Config(in_features=sizes.hidden, out_features=sizes.vocab, param_init=_NO_INIT),
        layers=[_layer(sizes, norm_eps, theta, inner_attention) for _ in range(sizes.layers)],
    )
    titan.set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)
    return config


_NO_INIT = {"weight": titan.skip_param_init}
"""Weights always come from a checkpoint. (Drawing them here would be wrong on CPU as well: without a DTensor
random-number tracker every rank draws the same numbers for its own shard.)"""


def _norm(size: int, eps: float) -> Any:
    return titan.RMSNorm.Config(normalized_shape=size, eps=eps, param_init=_NO_INIT)


def _layer(sizes: ModelSizes, norm_eps: float, theta: float, inner_attention: Any) -> Any:
    return titan.Qwen3TransformerBlock.Config(
        attention_norm=_norm(sizes.hidden, norm_eps),
        ffn_norm=_norm(sizes.hidden, norm_eps),
        attention=titan.make_gqa_config(
            dim=sizes.hidden,
            n_heads=sizes.heads,
            n_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            wqkv_param_init=_NO_INIT,
            wo_param_init=_NO_INIT,
            inner_attention=inner_attention,
            fuse_qkv=False,
            rope=titan.CosSinRoPE.Config(dim=sizes.head_dim, max_seq_len=sizes.max_positions, theta=theta),
            qk_norm=_norm(sizes.head_dim, norm_eps),
        ),
        feed_forward=titan.make_ffn_config(
            dim=sizes.hidden,
            hidden_dim=sizes.intermediate,
            w1_param_init=_NO_INIT,
            w2w3_param_init=_NO_INIT,
        ),
    )


def _refuse_unsupported(content: dict[str, Any], folder: Path, tp: int) -> None:
    """Everything in a `config.json` that would silently give another model."""
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    problems = [
        f"{field} = {content.get(field)!r} ({remedy})"
        for field, wrong, remedy in (
            ("model_type", content.get("model_type") != "qwen3", "only Qwen3 dense models are supported"),
            ("hidden_act", content.get("hidden_act", "silu") != "silu", "only silu is supported"),
            ("attention_bias", bool(content.get("attention_bias")), "biases are not supported"),
            ("use_sliding_window", bool(content.get("use_sliding_window")), "set it to false"),
        )
        if wrong
    ]
    if rope_type != "default":
        problems.append(f"rope type {rope_type!r} (remove the scaling; only 'default' is supported)")
    for field in ("num_attention_heads", "num_key_value_heads"):
        if isinstance(content.get(field), int) and content[field] % tp:
            problems.append(f"{field} = {content[field]} (trainer.parallelism.tp = {tp} must divide it)")
    if problems:
        raise ValueError(f"model.path: {folder / 'config.json'} has " + "; ".join(problems))


def share_rope_caches(model: PolicyModel) -> None:
    """Let all layers read one table of rotations; each layer of torchtitan's model would keep its own."""
    caches = [layer.attention.rope for layer in model.layers.values()]
    for rope in caches[1:]:
        rope.cache = caches[0].cache


def load_hf(model: PolicyModel, folder: Path) -> None:
    """Load the folder's safetensors, each rank only its shards; other dtypes are converted.

    Raises:
        ValueError: a weight is missing or has another shape.
    """
    adapter = titan.Qwen3StateDictAdapter(model.config, None)
    wanted = adapter.to_hf(model.state_dict())
    try:
        load_distributed(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)))
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise ValueError(
            f"model.path: the safetensors in {folder} do not fit its config.json: {error}"
        ) from error
    model.load_state_dict(adapter.from_hf(wanted), strict=True)


def hf_tensors(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under Hugging Face names, one at a time; a tied LM head is left out.

    A collective: every rank iterates to the end. The tensors may share memory with the parameters.
    """
    adapter = titan.Qwen3StateDictAdapter(model.config, None)
    for name, value in adapter.to_hf(model.state_dict()).items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value
