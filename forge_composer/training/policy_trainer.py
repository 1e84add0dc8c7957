"""One rank of the policy trainer: FSDP2, HSDP and tensor parallelism on CPU and CUDA by the same code.

Every public method is a collective: all ranks call it with equal arguments.

Shape suffixes: R = rows, L = positions, N = selected tokens, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from forge_composer.batching.packing import GlobalBatch, Microbatch
from forge_composer.config.schema import LossConfig, ModelConfig, TrainerConfig
from forge_composer.losses.schedule import scheduled_share
from forge_composer.training import titan
from forge_composer.training.balance import ChannelWeight, GradientGauge
from forge_composer.training.frozen import FrozenPolicy
from forge_composer.training.hf_folder import folder_dtype, write_hf_folder
from forge_composer.training.lm_head import HeadReader, token_logprobs_reader
from forge_composer.training.metrics import StepMetrics
from forge_composer.training.model import hf_tensors, load_hf, model_config, resolve_attention
from forge_composer.training.scoring import ScoreBatch, plan_scores
from forge_composer.training.setup import build_checkpointer, build_model, build_optimizer, build_scheduler
from forge_composer.training.teacher import SelfTeacher
from forge_composer.training.unified_step import UnifiedStep
from forge_composer.types import ScoreRequest


class PolicyTrainer:
    """Holds this rank's shard of the policy and of its optimizer."""

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        loss: LossConfig,
        *,
        temperature: float,
        max_completion_tokens: int,
        total_steps: int,
        seed: int,
        output_dir: Path,
        device: str,
        dpo_reference: Literal["at_insert", "initial"] = "at_insert",
    ) -> None:
        """Join the process group, build and shard the model, load its weights.

        RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be in the environment.

        Args:
            config: layout, optimizer, sequence length.
            model: the Hugging Face folder and the attention.
            loss: the loss.
            temperature: that the training tokens are sampled at, and scored at.
            max_completion_tokens: Dr. GRPO's constant.
            total_steps: length of the learning-rate schedule, in optimizer steps.
            seed: of torch's generator; the same on all ranks.
            output_dir: the run's folder; checkpoints go to `checkpoints` in it.
            device: "cpu" or "cuda".
            dpo_reference: what the log-ratios of preference pairs are measured from: the values that each
                pair brings, or the policy that the run starts with, of which this holds a frozen copy.

        Raises:
            ValueError: the model folder or the layout is not supported; the message names field and remedy.
        """
        self.config, self.model_path, self.loss = config, model.path, loss
        self.steps_taken, self.total_steps = 0, total_steps
        self.attention = resolve_attention(model.attention, device)
        self.device = titan.select_device(device)
        self._owns_process_group = not dist.is_initialized()
        world_size = titan.join_process_group(config.timeout_s, str(output_dir))
        torch.manual_seed(seed)

        tp = config.parallelism.tp
        self.parallel_dims = titan.parallel_dims(config.parallelism, world_size)
        titan_config = model_config(model.path, attention=self.attention, tp=tp)
        self.model = build_model(titan_config, config, self.parallel_dims, self.device)
        load_hf(self.model, model.path)

        def frozen() -> FrozenPolicy:
            return FrozenPolicy(model.path, titan_config, config, self.parallel_dims, self.device)

        self.with_kl = loss.grpo.weight > 0 and loss.grpo.kl_coef > 0
        from_initial = loss.replay_dpo.weight > 0 and dpo_reference == "initial"
        self.reference = frozen() if self.with_kl or from_initial else None
        self.teacher: SelfTeacher | None = None
        if loss.sdpo.weight > 0:
            kind = loss.sdpo.teacher
            copy = None if kind == "live" else frozen()
            self.teacher = SelfTeacher(kind, loss.sdpo.teacher_rate, self.model, copy)
        self.step = UnifiedStep(
            self.model,
            loss,
            reference=self.reference if self.with_kl else None,
            dpo_reference=self.reference if from_initial else None,
            teacher=self.teacher,
            temperature=temperature,
            max_completion_tokens=max_completion_tokens,
            logits_memory=config.logits_memory_mib * 2**20,
            device=self.device,
        )
        self.channel_weight = ChannelWeight(loss.sdpo, total_steps)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizers = build_optimizer(config.optimizer, self.model, device)
        self.schedulers = build_scheduler(config.scheduler, self.optimizers, total_steps)

        self.checkpointer = build_checkpointer(config, self, output_dir)
        batch_mesh = self.parallel_dims.get_optional_mesh("batch")
        self.dp_rank = 0 if batch_mesh is None else batch_mesh.get_local_rank()
        self.dp_degree = 1 if batch_mesh is None else batch_mesh.size()
        self.dp_group = None if batch_mesh is None else batch_mesh.get_group()

    @property
    def version(self) -> int:
        """Policy version: optimizer steps taken."""
        return self.steps_taken

    @property
    def _length_multiple(self) -> int:
        """Row lengths are multiples of this: of `tp` for sequence parallelism; where attention is compiled
        for the shapes it sees, of whole rows."""
        tp = self.config.parallelism.tp
        return tp if self.attention == "dense" else math.lcm(tp, self.config.seq_len)

    # -- training -----------------------------------------------------------------------------------

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """One optimizer step on one global batch.

        The proximal policy is the policy at the start of the step.

        Returns:
            Metrics over the whole batch, the same on every rank.

        Raises:
            ValueError: the batch is laid out for another number of data-parallel ranks.
            FloatingPointError: the gradient is not finite; the weights are left as they were.
        """
        metrics = self.accumulate_gradients(batch)
        learning_rate = float(self.schedulers.schedulers[0].get_last_lr()[0])
        grad_norm = self._clip_gradients()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        if self.teacher is not None:
            self.teacher.follow()
        self.steps_taken += 1
        every = self.loss.sdpo.measure_after_every
        if every and self.steps_taken % every == 0 and "sdpo/jsd" in metrics:
            metrics |= self._divergence_after(batch, metrics["sdpo/jsd"])
        return metrics | {
            "train/grad_norm": grad_norm,
            "train/lr": learning_rate,
            "train/tokens": float(batch.trained_tokens),
            "train/tokens_forwarded": float(batch.total_tokens),
        }

    def accumulate_gradients(self, batch: GlobalBatch) -> dict[str, float]:
        """Forward and backward over all micro-batches; leaves the gradient of the global loss in place."""
        if batch.dp_degree != self.dp_degree:
            raise ValueError(
                f"the batch is laid out for {batch.dp_degree} data-parallel ranks, the trainer has "
                f"{self.dp_degree} (dp_replicate x dp_shard)"
            )
        beta = self._beta(batch)
        self.model.train()
        with_grpo = self.loss.grpo.weight > 0
        metrics = StepMetrics(self.device, with_kl=self.with_kl, with_grpo=with_grpo)
        alpha = 0.0 if self.teacher is None else self.channel_weight.at(self.version, batch.sdpo_scale)
        gauge = None
        if alpha > 0 and with_grpo and self.channel_weight.measures:
            gauge = GradientGauge(self.model.config.dim, self.device)
        for part in self._parts(batch):
            self.step.run(part, batch, version=self.version, alpha=alpha, metrics=metrics, gauge=gauge)
        pairs = batch.preferences.num_pairs if beta > 0 else 0
        if pairs:
            self._run_pairs(batch, beta, metrics)
        distilled = batch.teacher.num_tokens if alpha > 0 else 0
        result = metrics.reduce(self.dp_group, self._tokens_read(batch, alpha), distilled, pairs)
        if self.teacher is not None:
            result["sdpo/alpha"] = alpha
        if gauge is not None:
            result |= self._balance(gauge, alpha)
        if pairs:
            result["dpo/beta"] = beta
        return result

    def _beta(self, batch: GlobalBatch) -> float:
        """Weight of the replay channel in this step.

        Raises:
            ValueError: a pair has no reference, and there is no policy to take one from.
        """
        config = self.loss.replay_dpo
        beta = config.weight * scheduled_share(config.schedule, self.version, self.total_steps)
        if beta > 0 and self.step.dpo_reference is None:
            bare = sum(not pair.has_reference for pair in batch.preferences.pairs)
            if bare:
                raise ValueError(
                    f"{bare} preference pairs have no reference log-probabilities; score them before, or set "
                    'replay.buffer.reference = "initial"'
                )
        return beta

    def _run_pairs(self, batch: GlobalBatch, beta: float, metrics: StepMetrics) -> None:
        trim, multiple = self.attention == "dense", self._length_multiple
        for rows in batch.preferences.forwards(self.dp_rank, trim=trim, multiple=multiple):
            self.step.run_pairs(rows, num_pairs=batch.preferences.num_pairs, beta=beta, metrics=metrics)

    def _tokens_read(self, batch: GlobalBatch, alpha: float) -> int:
        """Tokens that the metrics of a step are means over: the trained ones; with GRPO off the distilled."""
        if self.loss.grpo.weight > 0:
            return batch.trained_tokens
        if alpha == 0:
            return 0
        places = np.ndindex(batch.num_microbatches, batch.dp_degree)
        return sum(np.unique(batch.teacher.student_positions(*place)).size for place in places)

    def _parts(self, batch: GlobalBatch) -> Iterator[Microbatch]:
        """This rank's micro-batches."""
        trim, multiple = self.attention == "dense", self._length_multiple
        for index in range(batch.num_microbatches):
            yield batch.microbatch(index, self.dp_rank, trim=trim, multiple=multiple)

    def _balance(self, gauge: GradientGauge, alpha: float) -> dict[str, float]:
        """Let the channels' gradient norms set the next steps' alpha."""
        grpo, sdpo = gauge.norms(self.dp_group, alpha, self.loss.grpo.weight)
        self.channel_weight.observe(grpo, sdpo)
        metrics = {"sdpo/grad_norm": sdpo, "sdpo/grad_norm_grpo": grpo}
        if self.channel_weight.ratio is not None:
            metrics["sdpo/grad_ratio"] = self.channel_weight.ratio
        return metrics

    def _divergence_after(self, batch: GlobalBatch, before: float) -> dict[str, float]:
        """The divergence of the distilled tokens under the weights after the step. A collective."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self._parts(batch):
            total += self.step.divergence(part)
        self._reshard()
        if self.dp_group is not None:
            dist.all_reduce(total, group=self.dp_group)
        after = total.item() / max(1, batch.teacher.num_tokens)
        return {"sdpo/jsd_after": after, "sdpo/jsd_change": after - before}

    def _reshard(self) -> None:
        """A forward pass without a backward leaves FSDP's root gathered; the next update would not reach
        it."""
        for module in titan.fsdp_modules(self.model):
            module.reshard()

    def _clip_gradients(self) -> float:
        norm = titan.dist_utils.clip_grad_norm_(
            list(self.model.parameters()), self.config.optimizer.max_grad_norm, foreach=True
        )
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            self.optimizers.zero_grad()
            raise FloatingPointError(
                f"the gradient norm of step {self.version + 1} is {grad_norm}; the step was not taken"
            )
        return grad_norm

    def _logprobs(
        self,
        token_ids_RL: Tensor,
        positions_RL: Tensor,
        select_N: Tensor,
        targets_N: Tensor,
        temperature: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at the selected positions."""
        logprobs_N, entropy_N = self.model(
            token_ids_RL,
            positions_BL=positions_RL,
            attention_masks=self.model.get_attention_masks(positions_RL),
            select_N=select_N,
            reader=self._logprobs_reader(targets_N, temperature),
        )
        return logprobs_N, entropy_N

    def _logprobs_reader(self, targets_N: Tensor, temperature: float | Tensor) -> HeadReader:
        budget = self.config.logits_memory_mib * 2**20
        return token_logprobs_reader(targets_N, temperature=temperature, memory_budget=budget)

    # -- scoring ------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, sequences: list[ScoreRequest]) -> list[list[float]]:
        """Log-probability (nats) of tokens 1..n-1 of each sequence under the current weights.

        Each at its request's temperature; the sequences are dealt out to the data-parallel ranks, and the
        result is the same on every rank.

        Raises:
            ValueError: a sequence is longer than the model's positions.
        """
        plan = plan_scores(
            sequences,
            row_length=self.config.seq_len,
            most_positions=self.model.config.max_seq_len,
            dp_degree=self.dp_degree,
            rows_per_forward=self.config.rows_per_microbatch,
            multiple=self._length_multiple,
        )
        self.model.eval()
        scores = torch.zeros(plan.total, dtype=torch.float32, device=self.device)
        for part in plan.forwards(self.dp_rank):
            self._score_part(part, scores)
        self._reshard()
        if self.dp_group is not None:
            dist.all_reduce(scores, group=self.dp_group)
        return plan.split(scores.tolist())

    def _score_part(self, part: ScoreBatch, scores: Tensor) -> None:
        logprobs_N, _ = self._logprobs(
            self.step.tensor(part.token_ids_RL),
            self.step.tensor(part.positions_RL),
            self.step.tensor(part.select_N),
            self.step.tensor(part.targets_N),
            self.step.tensor(part.temperatures_N),
        )
        scores[self.step.tensor(part.slots_N)] = logprobs_N[: part.slots_N.size]

    # -- weights and checkpoints ----------------------------------------------------------------------

    def hf_state_dict(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """The policy's full tensors under Hugging Face names, in CPU memory of their own, on rank 0.

        None on the other ranks. A tied LM head is left out, as in Hugging Face checkpoints.
        """
        here = dist.get_rank() == 0
        state: dict[str, Tensor] = {}
        for name, tensor in hf_tensors(self.model):
            if here:
                state[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        return state if here else None

    def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, in the dtype that the original's config declares."""
        state = self.hf_state_dict(folder_dtype(self.model_path))
        if state is not None:
            write_hf_folder(self.model_path, folder, state)
        dist.barrier()

    def save_checkpoint(self, step: int) -> None:
        """Start writing a distributed checkpoint: model, optimizer, scheduler, version.

        It is complete once its `.metadata` is there; `close`, or the next save, waits for it.
        """
        self.checkpointer.save(step)

    def load_checkpoint(self, step: int = -1) -> bool:
        """Continue from checkpoint `step` (-1: the latest complete one); False if there is none."""
        loaded: bool = self.checkpointer.load(step)
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint holds beside model, optimizer and scheduler."""
        return {"version": self.steps_taken, "sdpo_grad_ratio": self.channel_weight.ratio or 0.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.steps_taken = int(state["version"])
        self.channel_weight.ratio = float(state["sdpo_grad_ratio"]) or None

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and leave the process group."""
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
