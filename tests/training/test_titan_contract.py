"""What the trainer relies on in torchtitan, so that another version fails here, with a name."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import sys

import pytest
import torch

from forge_composer.config.schema import ParallelismConfig
from forge_composer.training import titan


def fields(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_version() -> None:
    """Another version needs this contract and decision 0003 read again."""
    assert importlib.metadata.version("torchtitan") == "0.3.0"


def test_configs_have_the_fields_that_are_set() -> None:
    assert fields(titan.ParallelismConfig) >= {
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "spmd_backend",
    }
    assert fields(titan.TrainingConfig) >= {"seq_len", "mixed_precision_param", "mixed_precision_reduce"}
    assert fields(titan.OptimizersContainer.Config) >= {"param_groups", "implementation"}
    assert fields(titan.ParamGroupConfig) == {"pattern", "optimizer_name", "optimizer_kwargs"}
    assert fields(titan.LRSchedulersContainer.Config) >= {
        "warmup_steps",
        "decay_ratio",
        "decay_type",
        "min_lr_factor",
    }
    assert fields(titan.CheckpointManager.Config) >= {
        "enable",
        "folder",
        "interval",
        "keep_latest_k",
        "async_mode",
        "initial_load_model_only",
        "last_save_model_only",
    }
    assert fields(titan.Qwen3Model.Config) >= {
        "vocab_size",
        "dim",
        "enable_weight_tying",
        "norm",
        "tok_embeddings",
        "lm_head",
        "layers",
    }


def test_functions_take_what_they_are_given() -> None:
    assert parameters(titan.parallelize_qwen3) >= {
        "model",
        "parallel_dims",
        "training",
        "parallelism",
        "compile_config",
        "ac_config",
        "dump_folder",
    }
    assert parameters(titan.make_gqa_config) >= {"inner_attention", "fuse_qkv", "rope", "qk_norm", "head_dim"}
    assert parameters(titan.set_qwen3_sharding_config) == {"config", "enable_sp", "enable_ep"}
    assert parameters(titan.Qwen3Model.forward) == {"self", "tokens", "positions", "attention_masks"}
    assert parameters(titan.FlexAttention.forward) >= {"q_BLNH", "k_BLNH", "v_BLNH", "attention_masks"}
    assert titan.Qwen3Model._skip_lm_head is False


def test_master_weights_and_reductions_are_float32() -> None:
    training = titan.TrainingConfig(seq_len=8, mixed_precision_param="bfloat16")
    assert training.dtype == "float32"
    assert training.mixed_precision_reduce == "float32"


def test_select_device_reaches_every_copy() -> None:
    """torchtitan's modules copy the device's name; all copies follow."""
    copies = [
        module
        for name, module in sys.modules.items()
        if name.startswith("torchtitan") and hasattr(module, "device_type")
    ]
    assert {module.__name__ for module in copies} >= {
        "torchtitan.tools.utils",
        "torchtitan.distributed.utils",
        "torchtitan.distributed.parallel_dims",
    }
    for module in copies:
        module.device_type = "cuda"
    assert titan.select_device("cpu") == torch.device("cpu")
    assert {module.device_type for module in copies} == {"cpu"}


def test_process_group_needs_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        titan.join_process_group(10.0, "")


def test_layout_must_use_all_processes() -> None:
    with pytest.raises(ValueError, match=r"dp_replicate x dp_shard x tp = 4, but the trainer has 2"):
        titan.parallel_dims(ParallelismConfig(dp_shard=2, tp=2), 2)
