"""What the ranks of the trainer tests do."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from forge_composer.batching.packing import pack_samples
from forge_composer.config.schema import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainerConfig,
)
from forge_composer.training.policy_trainer import PolicyTrainer
from forge_composer.types import ScoreRequest, TrainingSample


def make_samples(count: int = 9, seed: int = 0, vocab: int = 256) -> list[TrainingSample]:
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        prompt, completion = rng.randint(4, 20), rng.randint(3, 25)
        ids = [rng.randrange(3, vocab) for _ in range(prompt + completion)]
        advantage = rng.uniform(-1, 1)
        samples.append(
            TrainingSample(
                f"r{index}",
                ids,
                [False] * prompt + [True] * completion,
                [0.0] * prompt + [rng.uniform(-6, -5) for _ in range(completion)],
                [-1] * prompt + [0] * completion,
                [0.0] * prompt + [advantage] * completion,
            )
        )
    return samples


def make_trainer(model: Path, **layout: Any) -> PolicyTrainer:
    options = {"dtype": "float32", "seq_len": 64, "rows_per_microbatch": layout.pop("rows", 1)}
    options |= {
        key: layout.pop(key) for key in ("activation_checkpointing", "checkpoint_every") if key in layout
    }
    parallelism = ParallelismConfig(**layout)
    nproc = parallelism.dp_replicate * parallelism.dp_shard * parallelism.tp
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=1e9)
    config = TrainerConfig(nproc=nproc, parallelism=parallelism, optimizer=optimizer, **options)
    return PolicyTrainer(
        config,
        ModelConfig(path=model),
        LossConfig(),
        temperature=0.8,
        total_steps=10,
        seed=0,
        output_dir=Path(tempfile.mkdtemp()),
        device="cpu",
    )


def pack(trainer: PolicyTrainer, samples: list[TrainingSample], rows: int = 1) -> Any:
    layout = trainer.config.parallelism
    return pack_samples(
        samples,
        seq_len=64,
        dp_degree=layout.dp_replicate * layout.dp_shard,
        rows_per_microbatch=rows,
        num_rollouts=len(samples),
        version=0,
        max_completion_tokens=32,
    )


def one_step(model: Path, layout: dict[str, Any], empty: bool = False) -> dict[str, Any]:
    """Gradients, metrics, weights after one step, and scores before it."""
    rows = layout.get("rows", 1)
    trainer = make_trainer(model, **layout)
    samples = make_samples()
    if empty:
        for sample in samples:
            sample.action_mask = [False] * len(sample)
    scores = trainer.score(
        [ScoreRequest(tuple(samples[0].token_ids)), ScoreRequest(tuple(samples[1].token_ids), 0.5)]
    )
    batch = pack(trainer, samples, rows)
    gradients: dict[str, torch.Tensor] = {}
    step = trainer.optimizers.step

    def keep_gradients(*args: Any, **kwargs: Any) -> None:
        state = {name: p.grad for name, p in trainer.policy.model.named_parameters() if p.grad is not None}
        for name, gradient in trainer.policy.adapter.to_hf(state).items():
            gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        step(*args, **kwargs)

    trainer.optimizers.step = keep_gradients
    metrics = trainer.train_step(batch)
    weights = trainer.hf_state_dict(torch.float32)
    result = {
        "microbatches": batch.num_microbatches,
        "gradients": gradients,
        "metrics": metrics,
        "weights": weights,
        "scores": scores,
        "version": trainer.version,
    }
    trainer.close()
    return result


def export(model: Path, folder: Path, layout: dict[str, Any]) -> list[list[float]]:
    trainer = make_trainer(model, **layout)
    samples = make_samples(3)
    trainer.train_step(pack(trainer, samples))
    trainer.export_hf(folder)
    scores = trainer.score([ScoreRequest(tuple(sample.token_ids)) for sample in samples])
    trainer.close()
    return scores
