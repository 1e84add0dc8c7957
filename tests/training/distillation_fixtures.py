"""Samples with targets, and workers that distil on ranks."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from forge_composer.hints.records import DistillTarget
from forge_composer.training.policy_trainer import PolicyTrainer
from forge_composer.types import TrainingSample
from tests.training.training_fixtures import VOCAB, full_gradients, make_batch, make_samples, make_trainer

ALPHA = 300.0
"""So that a random model, which hardly minds its context, gets a gradient like that of GRPO."""


def add_targets(samples: list[TrainingSample], *, hint: int = 5, seed: int = 3) -> list[TrainingSample]:
    """Two of three samples get a target: all action tokens from a random one on, behind `hint` random tokens.

    The hint stands at a random place before the target. Every other sample is there for its target only.
    """
    draw = random.Random(seed)
    for number, sample in enumerate(samples):
        actions = [t for t in range(1, len(sample)) if sample.action_mask[t]]
        if number % 3 == 2 or not actions:
            continue
        positions = actions[draw.randrange(len(actions)) :]
        place = draw.randrange(1, positions[0] + 1)
        said = [draw.randrange(VOCAB) for _ in range(hint)]
        sample.targets = [
            DistillTarget(
                rollout_id=sample.rollout_id,
                turn=0,
                kind="test",
                source="test",
                sample_index=0,
                positions=positions,
                teacher_ids=[*sample.token_ids[:place], *said, *sample.token_ids[place : positions[-1] + 1]],
                teacher_positions=[position + hint for position in positions],
                weight=draw.choice([0.5, 1.0]),
            )
        ]
        sample.policy_gradient = number % 2 == 0
    return samples


def distilling_trainer(folder: Path, output: Path, **options: Any) -> PolicyTrainer:
    """A trainer with both channels; `sdpo` overrides the channel's options."""
    sdpo = {"weight": ALPHA, "teacher": "live"} | options.pop("sdpo", {})
    return make_trainer(folder, output, sdpo=sdpo, **options)


def distilled_gradients(
    folder: Path, layout: dict[str, int], rows: int, sdpo: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Worker: `steps` optimizer steps, then gradients and metrics of another batch."""
    with tempfile.TemporaryDirectory() as output:
        trainer = distilling_trainer(
            folder, Path(output), layout=layout, rows_per_microbatch=rows, sdpo=sdpo, optimizer={"lr": 1e-2}
        )
        for seed in range(steps):
            samples = add_targets(make_samples(seed=10 + seed))
            trainer.train_step(make_batch(samples, dp_degree=trainer.dp_degree, rows=rows))
        batch = make_batch(add_targets(make_samples()), dp_degree=trainer.dp_degree, rows=rows)
        metrics = trainer.accumulate_gradients(batch)
        gradients = {name: gradient.numpy() for name, gradient in full_gradients(trainer).items()}
        trainer.optimizers.zero_grad()
        trainer.close()
        return {"metrics": metrics, "gradients": gradients, "targets": batch.teacher.num_targets}


def teacher_after(folder: Path, output: Path, layout: dict[str, int], resume: bool) -> list[Any]:
    """Worker: the EMA teacher's whole weights after four steps; with `resume`, from a checkpoint after
    two."""
    options: dict[str, Any] = {
        "layout": layout,
        "rows_per_microbatch": 2,
        "sdpo": {"teacher": "ema", "teacher_rate": 0.3},
        "optimizer": {"lr": 1e-2},
        "checkpoint_every": 2,
    }
    trainer = distilling_trainer(folder, output, **options)
    if resume:
        assert trainer.load_checkpoint()
    for seed in range(2 if resume else 0, 4):
        samples = add_targets(make_samples(seed=seed))
        trainer.train_step(make_batch(samples, dp_degree=trainer.dp_degree, rows=2))
        if seed == 1:
            trainer.save_checkpoint(2)
    assert trainer.teacher is not None
    assert trainer.teacher.copy is not None
    weights = [parameter.full_tensor() for parameter in trainer.teacher.copy.model.parameters()]
    student = [parameter.full_tensor() for parameter in trainer.model.parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(weights, student, strict=True))
    trainer.close()
    return [weight.detach().numpy() for weight in weights]
