"""Building the trainer's parts from torchtitan's: sharded model, optimizer, schedule, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forge_composer.config.schema import OptimizerConfig, SchedulerConfig, TrainerConfig
from forge_composer.training import titan
from forge_composer.training.model import PolicyModel, share_rope_caches

_CHECKPOINTING = {"none": None, "selective": titan.SelectiveAC, "full": titan.FullAC}


def build_model(
    model_config: PolicyModel.Config,
    config: TrainerConfig,
    parallel_dims: titan.ParallelDims,
    device: torch.device,
) -> PolicyModel:
    """The model, sharded as configured, in memory on `device`; its weights are not set yet."""
    with torch.device("meta"):
        model = model_config.build()
    policy = _CHECKPOINTING[config.activation_checkpointing]
    titan.parallelize_qwen3(
        model,
        parallel_dims=parallel_dims,
        training=titan.TrainingConfig(seq_len=config.seq_len, mixed_precision_param=config.dtype),
        parallelism=titan.parallelism_config(config.parallelism),
        compile_config=titan.CompileConfig(),
        ac_config=None if policy is None else policy.Config(),
        dump_folder="",
    )
    if device.type == "cpu":
        titan.sum_gradients_on_gloo(model)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states()
    share_rope_caches(model)
    built: PolicyModel = model
    return built


def build_optimizer(config: OptimizerConfig, model: PolicyModel, device: str) -> titan.OptimizersContainer:
    """Adam or AdamW over all parameters."""
    group = titan.ParamGroupConfig(
        pattern=".*",
        optimizer_name=config.name,
        optimizer_kwargs={
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        },
    )
    implementation = "fused" if device == "cuda" else "foreach"
    settings = titan.OptimizersContainer.Config(param_groups=[group], implementation=implementation)
    return settings.build(model_parts=[model])


def build_scheduler(
    config: SchedulerConfig, optimizers: titan.OptimizersContainer, total_steps: int
) -> titan.LRSchedulersContainer:
    """Linear warm-up, then constant or decaying to `min_lr_factor` over the rest of the run."""
    settings = titan.LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps,
        decay_ratio=0.0 if config.decay == "none" else None,
        decay_type="linear" if config.decay == "none" else config.decay,
        min_lr_factor=config.min_lr_factor,
    )
    return settings.build(optimizers=optimizers, training_steps=total_steps)


def build_checkpointer(config: TrainerConfig, trainer: Any, output_dir: Path) -> titan.CheckpointManager:
    """torchtitan's checkpoint manager over `trainer`'s parts; switched off without `checkpoint_every`."""
    settings = titan.CheckpointManager.Config(
        enable=config.checkpoint_every > 0,
        folder="checkpoints",
        interval=1,  # the loop decides when
        keep_latest_k=config.keep_checkpoints,
        async_mode="async",
        initial_load_model_only=False,
        last_save_model_only=False,
    )
    return settings.build(
        dataloader=None,
        model_parts=[trainer.model],
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.schedulers,
        states={"train_state": trainer, **({"teacher": trainer.teacher} if trainer.teacher else {})},
        sd_adapter=None,
        base_folder=str(output_dir.absolute()),
    )
