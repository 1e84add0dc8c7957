"""Preference pairs with known values, the loss over transformers' model, and workers for ranks."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_composer.batching.preference_rows import TokenPair
from forge_composer.training.policy_trainer import PolicyTrainer
from forge_composer.types import ScoreRequest
from tests.training.distillation_fixtures import ALPHA, add_targets
from tests.training.training_fixtures import VOCAB, full_gradients, make_batch, make_samples, make_trainer

BETA = 3.0
TAU = 0.5


def make_pairs(count: int = 7, *, seed: int = 0) -> list[TokenPair]:
    """Random tokens, weights and temperatures; references up to 3 nats from a random policy's values."""
    draw = random.Random(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(draw.randrange(least, most)))

    pairs = []
    for _ in range(count):
        context, chosen, rejected = ids(1, 12), ids(1, 16), ids(1, 16)
        pairs.append(
            TokenPair(
                context,
                chosen,
                rejected,
                weight=draw.uniform(0.3, 1.0),
                reference_chosen=-5.56 * len(chosen) + draw.uniform(-3.0, 3.0),
                reference_rejected=-5.56 * len(rejected) + draw.uniform(-3.0, 3.0),
                temperature=draw.choice([0.8, 1.0]),
            )
        )
    return pairs


def side_logprob(model: Any, context: Sequence[int], side: Sequence[int], temperature: float) -> Tensor:
    """Log-probability of a side behind its context, by transformers' model, the sequence on its own."""
    ids = torch.tensor([[*context, *side]])
    logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[len(context) - 1 :, 0].sum()


def plain_dpo(
    model: Any, pairs: Sequence[TokenPair], *, smoothing: float = 0.0, normalise: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """The loss written down pair by pair, and the channel's metrics."""
    loss = torch.zeros((), dtype=torch.float64)
    means = dict.fromkeys(
        ("dpo/margin", "dpo/accuracy", "dpo/chosen", "dpo/rejected", "dpo/weight_mean"), 0.0
    )
    for pair in pairs:
        ratios = []
        for side, reference in zip(pair.sides, (pair.reference_chosen, pair.reference_rejected), strict=True):
            assert reference is not None
            ratio = side_logprob(model, pair.context_ids, side, pair.temperature) - reference
            ratios.append(ratio / len(side) if normalise else ratio)
        margin = TAU * (ratios[0] - ratios[1])
        right, wrong = torch.log1p(torch.exp(-margin)), torch.log1p(torch.exp(margin))
        loss = loss + pair.weight * ((1 - smoothing) * right + smoothing * wrong) / len(pairs)
        values = (margin.item(), margin.item() > 0, *(ratio.item() for ratio in ratios), pair.weight)
        for name, value in zip(means, values, strict=True):
            means[name] += float(value) / len(pairs)
    return loss, means | {"dpo/loss": loss.item(), "dpo/pairs": len(pairs)}


def scored(trainer: PolicyTrainer, pairs: Sequence[TokenPair]) -> list[tuple[float, float]]:
    """Summed log-probabilities of both sides of each pair under the trainer's weights."""
    requests = [
        ScoreRequest(pair.context_ids + side, pair.temperature) for pair in pairs for side in pair.sides
    ]
    sides = [side for pair in pairs for side in pair.sides]
    sums = [sum(row[-len(side) :]) for row, side in zip(trainer.score(requests), sides, strict=True)]
    return list(zip(sums[::2], sums[1::2], strict=True))


def preferring_trainer(folder: Path, output: Path, **options: Any) -> PolicyTrainer:
    """A trainer with the replay channel; `replay_dpo` overrides the channel's options."""
    replay_dpo = {"weight": BETA, "tau": TAU} | options.pop("replay_dpo", {})
    return make_trainer(folder, output, replay_dpo=replay_dpo, **options)


def three_channels(
    folder: Path, layout: dict[str, int], rows: int, reference: str, kl_coef: float = 0.0
) -> list[dict[str, Any]]:
    """Worker: gradients and metrics of batches with samples, targets and pairs; with pairs only; with one
    pair, which leaves the other ranks without; and then one step on each."""
    with tempfile.TemporaryDirectory() as output:
        trainer = preferring_trainer(
            folder,
            Path(output),
            layout=layout,
            rows_per_microbatch=rows,
            dpo_reference=reference,
            sdpo={"weight": ALPHA, "teacher": "live"},
            grpo={"kl_coef": kl_coef},
        )
        results = []
        batches = [
            make_batch(samples, pairs, dp_degree=trainer.dp_degree, rows=rows)
            for samples, pairs in (
                (add_targets(make_samples()), make_pairs(11)),
                ([], make_pairs(11, seed=1)),
                ([], make_pairs(1, seed=2)),
            )
        ]
        for batch in batches:
            metrics = trainer.accumulate_gradients(batch)
            gradients = {name: gradient.numpy() for name, gradient in full_gradients(trainer).items()}
            trainer.optimizers.zero_grad()
            results.append({"metrics": metrics, "gradients": gradients})
        for batch in batches:
            results.append({"metrics": trainer.train_step(batch)})
        trainer.close()
        return results


def pairs_alone(folder: Path, layout: dict[str, int], rows: int) -> list[dict[str, float]]:
    """Worker: with GRPO off, steps on pairs, on one pair, on nothing, and on pairs again."""
    with tempfile.TemporaryDirectory() as output:
        trainer = preferring_trainer(
            folder, Path(output), layout=layout, rows_per_microbatch=rows, grpo={"weight": 0.0}
        )
        steps = [
            trainer.train_step(make_batch([], pairs, dp_degree=trainer.dp_degree, rows=rows))
            for pairs in (make_pairs(), make_pairs(1), [], make_pairs())
        ]
        trainer.close()
        return steps
