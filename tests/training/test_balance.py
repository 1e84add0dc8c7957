"""alpha by measured gradients: the measurement against autograd and over layouts, and what is made of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from forge_composer.losses.config import SDPOConfig, WeightSchedule
from forge_composer.training.balance import ChannelWeight
from tests.training.distillation_fixtures import ALPHA, add_targets, distilling_trainer
from tests.training.ranks import run_ranks
from tests.training.test_distillation import logits_by, plain_losses
from tests.training.training_fixtures import make_batch, make_samples, one_rank

BALANCED = {"weight": 0.5, "balance": "grad_norm", "teacher": "live"}


def gain_norm(model: Any, loss: Tensor) -> float:
    """Norm of the gradient of the last norm's weight, times that weight."""
    weight = model.model.norm.weight
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    return float((gradient * weight.detach()).norm())


def test_measured_norms_are_those_of_autograd(tiny_qwen3_dir: Path) -> None:
    """Each channel's own, without alpha, in several micro-batches; the next alpha is 0.5 times their
    ratio."""
    samples = add_targets(make_samples())
    model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir)
    grpo, sdpo, _ = plain_losses(model, samples, logits_by(model))
    wanted = gain_norm(model, grpo), gain_norm(model, sdpo)
    with one_rank(tiny_qwen3_dir, sdpo=BALANCED, rows_per_microbatch=1) as trainer:
        metrics = trainer.accumulate_gradients(make_batch(samples, rows=1))
        assert metrics["sdpo/alpha"] == 0.5
        assert metrics["sdpo/grad_norm_grpo"] == pytest.approx(wanted[0], rel=1e-4)
        assert metrics["sdpo/grad_norm"] == pytest.approx(wanted[1], rel=1e-4)
        ratio = min(wanted[0] / wanted[1], 100.0)
        assert trainer.channel_weight.at(1) == pytest.approx(0.5 * ratio, rel=1e-4)


def norms(folder: Path, layout: dict[str, int]) -> dict[str, float]:
    """Worker: the metrics of one batch."""
    with tempfile.TemporaryDirectory() as output:
        trainer = distilling_trainer(
            folder, Path(output), layout=layout, rows_per_microbatch=1, sdpo=BALANCED | {"weight": ALPHA}
        )
        batch = make_batch(add_targets(make_samples()), dp_degree=trainer.dp_degree, rows=1)
        metrics = trainer.accumulate_gradients(batch)
        trainer.close()
        return {name: value for name, value in metrics.items() if name.startswith("sdpo/grad")}


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}])
def test_norms_are_the_same_over_layouts(layout: dict[str, int], tiny_qwen3_dir: Path) -> None:
    (expected,) = run_ranks(norms, 1, tiny_qwen3_dir, {})
    assert expected.keys() == {"sdpo/grad_norm", "sdpo/grad_norm_grpo", "sdpo/grad_ratio"}
    for rank in run_ranks(norms, 2, tiny_qwen3_dir, layout):
        assert rank == pytest.approx(expected, rel=1e-4)


def test_the_ratio_moves_geometrically() -> None:
    """From 4 by a half towards 16: 8. A step without a gradient, and more than the most, do not spoil it."""
    weight = ChannelWeight(
        SDPOConfig(weight=2.0, balance="grad_norm", balance_rate=0.5, balance_max=16.0), total_steps=10
    )
    assert weight.at(0) == 2.0
    weight.observe(4.0, 1.0)
    assert weight.at(1) == 8.0
    weight.observe(0.0, 1.0)
    weight.observe(1.0, 0.0)
    assert weight.at(2) == 8.0
    weight.observe(1000.0, 1.0)
    assert weight.at(3) == pytest.approx(16.0)


def test_schedule_and_guard_scale_the_weight() -> None:
    schedule = WeightSchedule(warmup_steps=4)
    weight = ChannelWeight(SDPOConfig(weight=2.0, schedule=schedule), total_steps=10)
    weight.observe(100.0, 1.0)  # without `balance` nothing is made of it
    assert [weight.at(step, scale=0.5) for step in (0, 1, 5)] == [0.25, 0.5, 1.0]


def test_alpha_of_nothing_runs_no_teacher(tiny_qwen3_dir: Path) -> None:
    """The decay's last step and a guard that switched the channel off: GRPO alone, bit for bit."""
    samples = add_targets(make_samples())
    for sample in samples:
        sample.policy_gradient = True
    batch = make_batch(samples)
    batch_off = make_batch(samples)
    object.__setattr__(batch_off, "sdpo_scale", 0.0)
    losses = []
    with one_rank(tiny_qwen3_dir) as trainer:
        losses.append(trainer.accumulate_gradients(batch)["train/loss"])
    decay = {"decay": "linear", "decay_steps": 1}
    for options, case in (({"schedule": decay}, batch), ({}, batch_off)):
        sdpo = {"weight": ALPHA, "teacher": "live"} | options
        with one_rank(tiny_qwen3_dir, sdpo=sdpo, total_steps=1) as trainer:
            metrics = trainer.accumulate_gradients(case)
        assert metrics["sdpo/alpha"] == 0.0
        assert "sdpo/jsd" not in metrics
        losses.append(metrics["train/loss"])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.resume
def test_a_checkpoint_keeps_the_ratio(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sdpo": BALANCED, "checkpoint_every": 1, "output_dir": tmp_path}
    with one_rank(tiny_qwen3_dir, **options) as trainer:
        trainer.train_step(make_batch(add_targets(make_samples())))
        ratio = trainer.channel_weight.ratio
        trainer.save_checkpoint(1)
    assert ratio is not None
    with one_rank(tiny_qwen3_dir, **options) as trainer:
        assert trainer.load_checkpoint()
        assert trainer.channel_weight.ratio == ratio


@pytest.mark.parametrize("kind", ["live", "ema"])
def test_divergence_after_the_step(kind: str, tiny_qwen3_dir: Path) -> None:
    """What the next step would measure on the same targets; less than before it."""
    batch = make_batch(add_targets(make_samples()))
    sdpo = {"weight": ALPHA, "teacher": kind, "measure_after_every": 2}
    with one_rank(tiny_qwen3_dir, sdpo=sdpo, optimizer={"lr": 1e-3}) as trainer:
        first = trainer.train_step(batch)
        second = trainer.train_step(batch)
        third = trainer.accumulate_gradients(batch)
    assert "sdpo/jsd_after" not in first
    assert second["sdpo/jsd_after"] == pytest.approx(third["sdpo/jsd"], rel=1e-5)
    assert second["sdpo/jsd_change"] == pytest.approx(second["sdpo/jsd_after"] - second["sdpo/jsd"])
    if kind == "ema":  # the live teacher runs away as it pulls
        assert second["sdpo/jsd_change"] < 0
