"""What the training tests share: trainers on a folder, samples with known values, workers for ranks."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forge_composer.batching.packing import GlobalBatch, pack_samples
from forge_composer.batching.preference_rows import TokenPair
from forge_composer.config.schema import (
    GRPOConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    SchedulerConfig,
    TrainerConfig,
)
from forge_composer.losses.config import ReplayDPOConfig, SDPOConfig
from forge_composer.training.policy_trainer import PolicyTrainer
from forge_composer.types import ScoreRequest, TrainingSample
from tests.training.ranks import free_port, rank_environment

VOCAB = 259
SEQ_LEN = 48


def make_trainer(folder: Path, output_dir: Path, **options: Any) -> PolicyTrainer:
    """A float32 trainer on CPU; `options` are those of the config sections, by name."""
    layout = ParallelismConfig(**options.pop("layout", {}))
    loss = LossConfig(
        grpo=GRPOConfig(**options.pop("grpo", {})),
        sdpo=SDPOConfig(**options.pop("sdpo", {})),
        replay_dpo=ReplayDPOConfig(**options.pop("replay_dpo", {})),
    )
    dpo_reference = options.pop("dpo_reference", "at_insert")
    optimizer = OptimizerConfig(**({"lr": 1e-3} | options.pop("optimizer", {})))
    scheduler = SchedulerConfig(**options.pop("scheduler", {}))
    total_steps = options.pop("total_steps", 10)
    config = TrainerConfig(
        **(
            {
                "nproc": layout.dp_replicate * layout.dp_shard * layout.tp,
                "parallelism": layout,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "dtype": "float32",
                "seq_len": SEQ_LEN,
            }
            | options
        )
    )
    return PolicyTrainer(
        config,
        ModelConfig(path=folder),
        loss,
        temperature=1.0,
        max_completion_tokens=32,
        total_steps=total_steps,
        seed=0,
        output_dir=output_dir,
        device="cpu",
        dpo_reference=dpo_reference,
    )


@contextmanager
def one_rank(folder: Path, **options: Any) -> Iterator[PolicyTrainer]:
    """A trainer in this process, alone in its group."""
    environment = rank_environment(0, 1, free_port())
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with tempfile.TemporaryDirectory() as output:
            trainer = make_trainer(folder, Path(options.pop("output_dir", output)), **options)
            try:
                yield trainer
            finally:
                trainer.close()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def make_samples(count: int = 9, *, seed: int = 0) -> list[TrainingSample]:
    """Samples of 12 to 40 random tokens; the generator's log-probabilities are far from the policy's."""
    draw = random.Random(seed)
    samples = []
    for number in range(count):
        length = draw.randrange(12, 41)
        prompt = draw.randrange(4, 9)
        mask = [t >= prompt and not (prompt + 3 <= t < prompt + 6) for t in range(length)]
        samples.append(
            TrainingSample(
                rollout_id=f"rollout-{number % (count - 1)}",  # the last one continues the first rollout
                token_ids=[draw.randrange(VOCAB) for _ in range(length)],
                action_mask=mask,
                logprobs=[draw.uniform(-7.0, -4.5) if on else 0.0 for on in mask],
                versions=[0 if on else -1 for on in mask],
                advantages=[draw.uniform(-1.0, 1.0)] * length,
            )
        )
    return samples


def make_batch(
    samples: list[TrainingSample],
    pairs: Sequence[TokenPair] = (),
    *,
    dp_degree: int = 1,
    rows: int = 4,
) -> GlobalBatch:
    return pack_samples(
        samples, seq_len=SEQ_LEN, dp_degree=dp_degree, rows_per_microbatch=rows, version=0, pairs=pairs
    )


def full_gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Whole gradients by parameter name, before clipping. A collective."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor().clone()
        for name, parameter in trainer.model.named_parameters()
    }


def gradients_and_step(
    folder: Path, layout: dict[str, int], rows: int, seed: int = 0, logits_memory_mib: int = 256
) -> dict[str, Any]:
    """Worker: gradients of the fixture's batch, then one step; metrics, weights and scores after it."""
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(
            folder,
            Path(output),
            layout=layout,
            rows_per_microbatch=rows,
            logits_memory_mib=logits_memory_mib,
        )
        batch = make_batch(make_samples(seed=seed), dp_degree=trainer.dp_degree, rows=rows)
        trainer.accumulate_gradients(batch)
        gradients = {name: g.numpy() for name, g in full_gradients(trainer).items()}
        trainer.optimizers.zero_grad()
        metrics = trainer.train_step(batch)
        state = trainer.hf_state_dict(torch.float32)
        requests = [ScoreRequest(tuple(sample.token_ids)) for sample in make_samples(5, seed=7)]
        result = {
            "microbatches": batch.num_microbatches,
            "gradients": gradients,
            "metrics": metrics,
            "weights": None if state is None else {name: value.numpy() for name, value in state.items()},
            "scores": trainer.score(requests),
            "version": trainer.version,
        }
        trainer.close()
        return result


def all_masked_steps(folder: Path, layout: dict[str, int]) -> list[dict[str, float]]:
    """Worker: a batch that only rank 0 has tokens of, an empty batch, and a normal one after them."""
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(folder, Path(output), layout=layout, rows_per_microbatch=1)
        batches = [make_samples()[:1], [], make_samples()]
        steps = [
            trainer.train_step(make_batch(samples, dp_degree=trainer.dp_degree, rows=1))
            for samples in batches
        ]
        trainer.close()
        return steps
