"""Both channels in one step: against autograd over transformers, over layouts, for each kind of teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from forge_composer.kernels import generalized_jsd
from forge_composer.types import TrainingSample
from tests.training.distillation_fixtures import (
    ALPHA,
    add_targets,
    distilled_gradients,
    teacher_after,
)
from tests.training.ranks import run_ranks
from tests.training.training_fixtures import full_gradients, make_batch, make_samples, one_rank


def plain_losses(
    student: Any, samples: list[TrainingSample], teacher_logits: Any, *, beta: float = 0.5
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """GRPO and SDPO written down over whole logits, and the metrics of the latter."""
    grpo = torch.zeros(())
    sdpo = torch.zeros(())
    jsd = weights = advantage = 0.0
    rollouts = {sample.rollout_id for sample in samples if sample.policy_gradient}
    count = sum(len(target.positions) for sample in samples for target in sample.targets)
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logits = student(ids).logits[0]
        logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        generator = torch.tensor(sample.logprobs[1:])
        importance = (logprobs.detach() - generator).exp().clamp(max=2.0)
        if sample.policy_gradient:
            mask = torch.tensor(sample.action_mask[1:])
            ratio = (logprobs - logprobs.detach()).exp()
            grpo = grpo - (importance * torch.tensor(sample.advantages[1:]) * ratio * mask).sum()
        for target in sample.targets:
            at = torch.tensor(target.positions) - 1
            theirs = teacher_logits(target.teacher_ids)[torch.tensor(target.teacher_positions) - 1]
            per_token = generalized_jsd(logits[at], theirs, beta=beta, backend="reference")
            sdpo = sdpo + (per_token * importance[at] * target.weight).sum() / count
            jsd += float(per_token.detach().sum()) / count
            weights += float((importance[at] * target.weight).sum()) / count
            sampled = ids[0, at + 1][:, None]
            gap = torch.log_softmax(theirs, -1).gather(1, sampled)[:, 0] - logprobs[at]
            advantage += float(gap.detach().sum()) / count
    metrics = {"sdpo/jsd": jsd, "sdpo/weight_mean": weights, "sdpo/teacher_advantage": advantage}
    return grpo / (len(rollouts) * 32), sdpo, metrics


def logits_by(model: Any) -> Any:
    @torch.no_grad()
    def of(ids: list[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([ids])).logits[0]
        return logits

    return of


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gradient_by_autograd_of_transformers(beta: float, tiny_qwen3_dir: Path) -> None:
    """Packed, selected, chunked: the gradient of grpo + alpha sdpo, and the channel's metrics."""
    samples = add_targets(make_samples())
    model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir)
    grpo, sdpo, expected = plain_losses(model, samples, logits_by(model), beta=beta)
    assert ALPHA * sdpo.item() > 0.05
    (grpo + ALPHA * sdpo).backward()
    with one_rank(
        tiny_qwen3_dir, sdpo={"weight": ALPHA, "teacher": "live", "divergence_beta": beta}
    ) as trainer:
        metrics = trainer.accumulate_gradients(make_batch(samples))
        gradients = full_gradients(trainer)
    assert metrics["train/loss"] == pytest.approx(grpo.item(), rel=1e-4)
    assert metrics["sdpo/loss"] == pytest.approx(sdpo.item(), rel=1e-4)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    head = gradients.pop("lm_head.weight" if "lm_head.weight" in gradients else "tok_embeddings.weight")
    torch.testing.assert_close(head, model.model.embed_tokens.weight.grad, atol=1e-7, rtol=1e-3)
    query = gradients["layers.1.attention.qkv_linear.wq.weight"]
    torch.testing.assert_close(
        query, model.model.layers[1].self_attn.q_proj.weight.grad, atol=1e-7, rtol=1e-3
    )


def test_weight_zero_is_grpo_alone(tiny_qwen3_dir: Path) -> None:
    """Targets in the batch, channel off: bit for bit the gradient of the batch without them; no teacher."""
    gradients = []
    for targets in (True, False):
        samples = make_samples()
        if targets:
            samples = add_targets(samples)
            for sample in samples:
                sample.policy_gradient = True
        with one_rank(tiny_qwen3_dir) as trainer:
            assert trainer.teacher is None
            metrics = trainer.accumulate_gradients(make_batch(samples))
            gradients.append(full_gradients(trainer))
        assert not any(name.startswith("sdpo/") for name in metrics)
    with_targets, without = gradients
    assert all(torch.equal(with_targets[name], without[name]) for name in without)


@pytest.mark.parametrize("kind", ["live", "ema", "trust_region"])
def test_hint_that_says_nothing_teaches_nothing(kind: str, tiny_qwen3_dir: Path) -> None:
    """Teacher and student read the same tokens with the same weights: a divergence of 0, and no gradient."""
    samples = add_targets(make_samples(), hint=0)
    for sample in samples:
        sample.policy_gradient = False
    with one_rank(tiny_qwen3_dir, sdpo={"weight": 1.0, "teacher": kind}) as trainer:
        metrics = trainer.accumulate_gradients(make_batch(samples))
        gradients = full_gradients(trainer)
    # Rows of other lengths, and the blend's other sums, leave rounding.
    assert metrics["sdpo/jsd"] < 1e-8
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients.values())


def test_equal_rows_teach_exactly_nothing(tiny_qwen3_dir: Path) -> None:
    """Where both sides go through equal arithmetic (one sample a row), not even rounding is left."""
    samples = add_targets(make_samples(3), hint=0)
    for sample in samples:
        sample.policy_gradient = False
        for target in sample.targets:  # the teacher reads the whole sample, so that shapes are equal as well
            target.teacher_ids = list(sample.token_ids)
    with one_rank(tiny_qwen3_dir, rows_per_microbatch=1, sdpo={"weight": 1.0, "teacher": "live"}) as trainer:
        for sample in samples[:2]:
            metrics = trainer.accumulate_gradients(make_batch([sample], rows=1))
            assert metrics["sdpo/jsd"] == 0.0
        assert all((gradient == 0).all() for gradient in full_gradients(trainer).values())


@pytest.mark.parametrize("kind", ["ema", "trust_region"])
def test_teachers_that_remember(kind: str, tiny_qwen3_dir: Path) -> None:
    """After two steps the teacher is theta_0 + what it took of each step, or the blend of logits."""
    rate = 0.3
    samples = add_targets(make_samples())
    models = [Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir)]
    options: dict[str, Any] = {"optimizer": {"lr": 1e-2}}
    sdpo = {"weight": ALPHA, "teacher": kind, "teacher_rate": rate}
    with one_rank(tiny_qwen3_dir, sdpo=sdpo, **options) as trainer:
        for seed in (5, 6):
            trainer.train_step(make_batch(add_targets(make_samples(seed=seed))))
            state = trainer.hf_state_dict(torch.float32)
            assert state is not None
            models.append(Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir))
            models[-1].load_state_dict(state, strict=False)
        metrics = trainer.accumulate_gradients(make_batch(samples))
    first, _, student = models
    if kind == "ema":
        average = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir)
        with torch.no_grad():
            for mine, one, two in zip(*(m.parameters() for m in (average, *models[1:])), strict=True):
                mine.lerp_(one, rate).lerp_(two, rate)
        teacher = logits_by(average)
    else:
        old, new = logits_by(first), logits_by(student)

        def teacher(ids: list[int]) -> Tensor:
            return torch.lerp(old(ids), new(ids), rate)

    _, sdpo_loss, expected = plain_losses(student, samples, teacher)
    assert metrics["sdpo/loss"] == pytest.approx(sdpo_loss.item(), rel=1e-3)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)


LAYOUTS: dict[str, tuple[int, dict[str, int], int]] = {
    "one rank, many micro-batches": (1, {}, 1),
    "FSDP over two ranks": (2, {"dp_shard": 2}, 1),
    "tensor parallel over two ranks": (2, {"tp": 2}, 2),
    "HSDP over four ranks": (4, {"dp_replicate": 2, "dp_shard": 2}, 1),
}


@pytest.mark.parametrize("kind", ["live", "ema", "trust_region"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("four" in name)) for name in LAYOUTS]
)
def test_gradient_is_the_same_over_layouts(name: str, kind: str, tiny_qwen3_dir: Path) -> None:
    """Gradients and metrics after one step, so that the teachers with a copy differ from the policy."""
    processes, layout, rows = LAYOUTS[name]
    sdpo = {"teacher": kind, "teacher_rate": 0.3}
    (expected,) = run_ranks(distilled_gradients, 1, tiny_qwen3_dir, {}, 8, sdpo, 1)
    ranks = run_ranks(distilled_gradients, processes, tiny_qwen3_dir, layout, rows, sdpo, 1)
    assert expected["targets"] > 3
    for parameter, wanted in expected["gradients"].items():
        error = np.linalg.norm(ranks[0]["gradients"][parameter] - wanted) / np.linalg.norm(wanted)
        assert error < 2e-3, parameter  # Adam's first step turns rounding of tiny gradients into lr
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_k": 7, "top_k_support": "teacher"}])
def test_first_gradient_is_the_same_to_rounding(options: dict[str, Any], tiny_qwen3_dir: Path) -> None:
    """Without a step before it, data- and tensor-parallel gradients agree to 1e-5."""
    sdpo = {"teacher": "live"} | options
    (expected,) = run_ranks(distilled_gradients, 1, tiny_qwen3_dir, {}, 8, sdpo, 0)
    for layout, rows in (({"dp_shard": 2}, 1), ({"tp": 2}, 2)):
        first, _ = run_ranks(distilled_gradients, 2, tiny_qwen3_dir, layout, rows, sdpo, 0)
        for parameter, wanted in expected["gradients"].items():
            error = np.linalg.norm(first["gradients"][parameter] - wanted) / np.linalg.norm(wanted)
            assert error < 1e-5, parameter


@pytest.mark.resume
def test_sharded_teacher_equals_the_whole_one_and_survives_a_checkpoint(
    tiny_qwen3_dir: Path, tmp_path: Path
) -> None:
    """Two FSDP ranks against one; a run resumed from its checkpoint against one that was not stopped."""
    (whole,) = run_ranks(teacher_after, 1, tiny_qwen3_dir, tmp_path / "whole", {}, False)
    sharded = run_ranks(teacher_after, 2, tiny_qwen3_dir, tmp_path / "two", {"dp_shard": 2}, False)
    for one, other in zip(whole, sharded[0], strict=True):
        assert np.abs(one - other).mean() < 1e-5
    resumed = run_ranks(teacher_after, 2, tiny_qwen3_dir, tmp_path / "two", {"dp_shard": 2}, True)
    assert all(np.array_equal(one, other) for one, other in zip(sharded[0], resumed[0], strict=True))
