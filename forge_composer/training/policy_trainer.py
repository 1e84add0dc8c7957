"""One rank of the policy trainer: forward, loss, backward, step, and what the generators need of it.

All methods are collectives: every rank calls them with the same arguments, in the same order.
Gradients are sums over ranks and micro-batches of losses whose weights hold the global divisor, so a
global batch has one gradient, whatever the layout.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_composer.batching.packing import GlobalBatch
from forge_composer.config.schema import LossConfig, ModelConfig, OptimizerConfig, TrainerConfig
from forge_composer.kernels.token_logprobs import shard_start, token_logprobs
from forge_composer.losses.grpo import grpo_loss
from forge_composer.training import titan
from forge_composer.training.model import Attention, build_policy
from forge_composer.training.step_metrics import StepMetrics
from forge_composer.types import ScoreRequest


class PolicyTrainer:
    """The trainer of one rank; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

    Args:
        config: layout, optimizer, precision.
        model: the policy's folder and the kind of attention.
        loss: the losses.
        temperature: sampling temperature of training rollouts; logits are divided by it.
        total_steps: optimizer steps of the run, for the learning-rate schedule.
        seed: fixes the random state. Nothing is drawn from it in a step: there is no dropout.
        output_dir: run folder; checkpoints go to `checkpoints/` in it.
        device: "cpu" (gloo) or "cuda" (NCCL).
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        loss: LossConfig,
        *,
        temperature: float,
        total_steps: int,
        seed: int,
        output_dir: Path,
        device: str,
    ) -> None:
        self.config = config
        self.loss = loss
        self.temperature = temperature
        self.version = 0
        """Optimizer steps taken."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        self.parallel_dims = self._join(config, output_dir, device)
        self.device = torch.device(device)
        training = titan.TrainingConfig(seq_len=config.seq_len, mixed_precision_param=config.dtype)
        self.policy = build_policy(
            model.path,
            attention=_attention(model, device),
            parallelism=self._parallelism,
            training=training,
            activation_checkpointing=config.activation_checkpointing,
            parallel_dims=self.parallel_dims,
            device=device,
        )
        self.optimizers = _optimizer(config.optimizer, device).build(model_parts=[self.policy.model])
        self.schedulers = _scheduler(config).build(optimizers=self.optimizers, training_steps=total_steps)
        self.checkpoints = self._checkpoint_manager(output_dir)
        self.num_parameters = sum(p.numel() for p in self.policy.model.parameters())

    def _join(self, config: TrainerConfig, output_dir: Path, device: str) -> Any:
        """Enter the process group and lay the device mesh."""
        layout = config.parallelism
        self._parallelism = titan.ParallelismConfig(
            data_parallel_replicate_degree=layout.dp_replicate,
            data_parallel_shard_degree=layout.dp_shard,
            tensor_parallel_degree=layout.tp,
            spmd_backend=titan.SPMD_BACKEND,
        )
        if device == "cuda":
            import os

            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        world = titan.dist_utils.init_distributed(titan.CommConfig(), base_folder=str(output_dir))
        parallel_dims = titan.ParallelDims.from_config(self._parallelism, dist.get_world_size() or world)
        titan.dist_utils.set_spmd_backend(titan.SPMD_BACKEND)
        parallel_dims.build_mesh()
        self._context = titan.dist_utils.get_spmd_context(parallel_dims=parallel_dims)
        batch, tensor = parallel_dims.get_optional_mesh("batch"), parallel_dims.get_optional_mesh("tp")
        self.dp_group = batch.get_group() if batch is not None else None
        self.dp_rank = batch.get_local_rank() if batch is not None else 0
        self.tp_group = tensor.get_group() if tensor is not None else None
        return parallel_dims

    def _checkpoint_manager(self, output_dir: Path) -> Any:
        config = titan.CheckpointManager.Config(
            enable=self.config.checkpoint_every > 0,
            folder="checkpoints",
            interval=1,  # the loop decides when
            last_save_model_only=False,
            keep_latest_k=self.config.keep_checkpoints,
            async_mode="async",
        )
        return config.build(
            dataloader=None,
            model_parts=[self.policy.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=self.policy.adapter,
            base_folder=str(output_dir),
        )

    # -- what a checkpoint holds beside model, optimizer and schedule --------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Version and random state."""
        return {"version": torch.tensor(self.version), "torch_rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a version and its random state."""
        self.version = int(state["version"])
        torch.set_rng_state(state["torch_rng"])

    # -- training -----------------------------------------------------------------------------------

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """One optimizer step on one global batch; the metrics are those of the whole batch."""
        metrics = StepMetrics(self.device)
        self.policy.model.train()
        self.optimizers.zero_grad()
        for number in range(batch.num_microbatches):
            with self._context():
                self._forward_backward(self._to_device(batch, number), batch.version, metrics)
        parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        norm = titan.dist_utils.clip_grad_norm_(
            parameters, self.config.optimizer.max_grad_norm, foreach=True
        )
        lr = next(iter(self.schedulers.get_metrics().values()))
        self.optimizers.step()
        self.schedulers.step()
        self.version += 1
        values = metrics.reduce(self.dp_group)
        values |= {"train/grad_norm": float(_whole(norm)), "train/lr": float(lr)}
        return values

    def _to_device(self, batch: GlobalBatch, number: int) -> dict[str, Tensor]:
        names = ("token_ids", "positions", "targets", "mask", "advantages", "logprobs", "versions", "weights")
        return {
            name: torch.from_numpy(np.ascontiguousarray(getattr(batch, name)[number, self.dp_rank])).to(
                self.device
            )
            for name in names
        }

    def _forward_backward(self, part: dict[str, Tensor], version: int, metrics: StepMetrics) -> None:
        mask = part["mask"]
        logp_N, entropy_N = self._token_logprobs(
            self.policy.forward(part["token_ids"], part["positions"]), part["targets"], mask
        )
        options = self.loss.grpo
        output = grpo_loss(
            logp_N,
            logp_N.detach(),  # one step a batch: the proximal policy is the policy at its start
            part["logprobs"][mask],
            part["advantages"][mask],
            part["weights"][mask],
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            tis_cap=options.tis_cap,
        )
        output.loss.backward()
        metrics.add(
            output,
            logp_N=logp_N.detach(),
            entropy_N=entropy_N,
            logp_generator_N=part["logprobs"][mask],
            on_policy_N=part["versions"][mask] == version,
        )

    def _token_logprobs(self, logits_BLV: Tensor, targets_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at the masked positions, [N] each, in row-major order."""
        group, start = None, 0
        if isinstance(logits_BLV, DTensor):
            vocab = logits_BLV.shape[-1]
            if self.tp_group is not None and logits_BLV.placements[-1].is_shard(2):
                group = self.tp_group
                start = shard_start(vocab, dist.get_rank(group), dist.get_world_size(group))
            logits_BLV = logits_BLV.to_local()
        return token_logprobs(
            logits_BLV[mask_BL], targets_BL[mask_BL], temperature=self.temperature, vocab_start=start, group=group
        )

    # -- scoring ------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Log-probabilities of tokens 1..n-1 of each sequence at its temperature; the same on every rank.

        Every rank scores every sequence: the probes are small, and FSDP wants equal forwards.
        """
        self.policy.model.eval()
        trained_at = self.temperature
        scores = []
        try:
            for request in requests:
                ids = torch.tensor([request.token_ids], device=self.device)
                length = ids.shape[1]
                padded = torch.zeros((1, -(-length // 64) * 64), dtype=ids.dtype, device=self.device)
                positions, targets, mask = padded.clone(), padded.clone(), padded.bool()
                padded[:, :length] = ids
                positions[0, :length] = torch.arange(length, device=self.device)
                targets[0, : length - 1] = ids[0, 1:]
                mask[0, : length - 1] = True
                self.temperature = request.temperature
                with self._context():
                    logp_N, _ = self._token_logprobs(self.policy.forward(padded, positions), targets, mask)
                scores.append(cast("list[float]", logp_N.tolist()))
        finally:
            self.temperature = trained_at
        return scores

    # -- weights ------------------------------------------------------------------------------------

    def hf_state_dict(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """Whole weights under Hugging Face names on rank 0, None elsewhere."""
        return self.policy.hf_state_dict(dtype)

    def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, in the dtype that it is trained in."""
        self.policy.export_hf(Path(folder), getattr(torch, self.config.dtype))

    def save_checkpoint(self, step: int) -> None:
        """Write a distributed checkpoint in the background."""
        self.checkpoints.save(step)

    def close(self) -> None:
        """Finish a checkpoint that is being written; leave the process group."""
        if self.config.checkpoint_every:
            self.checkpoints.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _attention(model: ModelConfig, device: str) -> Attention:
    if model.attention != "auto":
        return model.attention
    return "dense" if device == "cpu" else "flex"


def _optimizer(config: OptimizerConfig, device: str) -> Any:
    return titan.OptimizersContainer.Config(
        implementation="foreach" if device == "cpu" else "fused",
        param_groups=[
            titan.ParamGroupConfig(
                pattern=r".*",
                optimizer_name=config.name,
                optimizer_kwargs={
                    "lr": config.lr,
                    "betas": (config.beta1, config.beta2),
                    "eps": config.eps,
                    "weight_decay": config.weight_decay,
                },
            )
        ],
    )


def _scheduler(config: TrainerConfig) -> Any:
    schedule = config.scheduler
    constant = schedule.decay == "none"
    return titan.LRSchedulersContainer.Config(
        warmup_steps=schedule.warmup_steps,
        decay_type="linear" if constant else schedule.decay,
        min_lr_factor=1.0 if constant else schedule.min_lr_factor,
    )
