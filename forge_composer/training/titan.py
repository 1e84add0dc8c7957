"""torchtitan, seen from one place: every import from it, and what a CPU needs.

torchtitan moves fast and is used here as a library of parts (docs/decisions/0003-torchtitan-as-parts.md).
The rest of the project imports those parts from this module, and `tests/training/test_titan_contract.py`
pins what is relied on, so that a new version breaks here and not in the middle of a run.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

import torch
import torchtitan.distributed.utils as dist_utils
import torchtitan.tools.utils as titan_utils
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CommConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module

from forge_composer.config.schema import ParallelismConfig as LayoutConfig

SPMD_BACKEND = "partial_dtensor"
"""The default, `spmd_types`, needs the FSDP2 of torch 2.14."""


def select_device(device: str) -> torch.device:
    """Make torchtitan use `device` ("cpu" or "cuda"), and return this rank's device.

    torchtitan picks its device at import, takes CUDA when it finds no accelerator at all, and its modules
    copy the choice by name: so the copies are replaced too.
    """
    device_module: ModuleType = torch.cuda if device == "cuda" else torch.cpu
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchtitan" and hasattr(module, "device_type"):
            vars(module).update(device_type=device, device_module=device_module)
    if device == "cpu":
        return torch.device("cpu")
    local: torch.device = titan_utils.get_local_device()
    torch.cuda.set_device(local)
    return local


def join_process_group(timeout_s: float, folder: str) -> int:
    """Start torch.distributed (gloo or NCCL, after `select_device`) from the environment; the world size.

    Raises:
        RuntimeError: a variable of the environment is missing.
    """
    missing = [
        name
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise RuntimeError(
            f"the trainer needs {', '.join(missing)} in the environment: start it through torchrun or "
            "Monarch's setup_torch_elastic_env"
        )
    seconds = max(1, round(timeout_s))
    comm = CommConfig(init_timeout_seconds=seconds, train_timeout_seconds=seconds, trace_buf_size=0)
    world_size: int = dist_utils.init_distributed(comm, base_folder=folder)
    dist_utils.set_spmd_backend(SPMD_BACKEND)
    return world_size


def parallelism_config(layout: LayoutConfig) -> ParallelismConfig:
    """Our layout in torchtitan's terms."""
    return ParallelismConfig(
        data_parallel_replicate_degree=layout.dp_replicate,
        data_parallel_shard_degree=layout.dp_shard,
        tensor_parallel_degree=layout.tp,
        spmd_backend=SPMD_BACKEND,
    )


def parallel_dims(layout: LayoutConfig, world_size: int) -> ParallelDims:
    """The device meshes of a layout.

    Raises:
        ValueError: the layout does not use exactly the processes that there are.
    """
    wanted = layout.dp_replicate * layout.dp_shard * layout.tp
    if wanted != world_size:
        raise ValueError(
            f"trainer.parallelism: dp_replicate x dp_shard x tp = {wanted}, "
            f"but the trainer has {world_size} processes"
        )
    dims = ParallelDims.from_config(parallelism_config(layout), world_size)
    dims.build_mesh()
    return dims


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """The FSDP2 units of a parallelised model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sum_gradients_on_gloo(model: torch.nn.Module) -> None:
    """Reduce gradients by plain sums: torchtitan's unit divide factor asks for an operation gloo lacks."""
    for module in fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(True)


__all__ = [
    "SPMD_BACKEND",
    "CheckpointManager",
    "CompileConfig",
    "CosSinRoPE",
    "Embedding",
    "FlexAttention",
    "FullAC",
    "LRSchedulersContainer",
    "Linear",
    "Module",
    "OptimizersContainer",
    "ParallelDims",
    "ParallelismConfig",
    "ParamGroupConfig",
    "Qwen3Model",
    "Qwen3StateDictAdapter",
    "Qwen3TransformerBlock",
    "RMSNorm",
    "SelectiveAC",
    "TrainingConfig",
    "VarlenAttention",
    "dist_utils",
    "fsdp_modules",
    "get_attention_config",
    "join_process_group",
    "make_ffn_config",
    "make_gqa_config",
    "parallel_dims",
    "parallelism_config",
    "parallelize_qwen3",
    "select_device",
    "set_qwen3_sharding_config",
    "skip_param_init",
    "sum_gradients_on_gloo",
]
