"""The trace-replay channel in the trainer: against autograd over transformers, by itself, and with others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from forge_composer.batching.preference_rows import TokenPair
from forge_composer.training.policy_trainer import PolicyTrainer
from tests.training.distillation_fixtures import ALPHA, add_targets
from tests.training.preference_fixtures import BETA, TAU, make_pairs, plain_dpo, scored
from tests.training.training_fixtures import full_gradients, make_batch, make_samples, one_rank

CHANNEL: dict[str, Any] = {"weight": BETA, "tau": TAU}
OFF: dict[str, Any] = {"weight": 0.0}


def with_references(pairs: list[TokenPair], references: list[tuple[float, float]]) -> list[TokenPair]:
    return [
        dataclasses.replace(pair, reference_chosen=chosen, reference_rejected=rejected)
        for pair, (chosen, rejected) in zip(pairs, references, strict=True)
    ]


def gradients_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    gradients = full_gradients(trainer)
    trainer.optimizers.zero_grad()
    return gradients


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"length_normalise": True}])
def test_gradient_by_autograd_of_transformers(options: dict[str, Any], tiny_qwen3_dir: Path) -> None:
    """Packed, selected, chunked, one row a pass: gradient and metrics are those of the loss in float64."""
    pairs = make_pairs()
    model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir).double()
    loss, expected = plain_dpo(
        model,
        pairs,
        smoothing=options.get("label_smoothing", 0.0),
        normalise="length_normalise" in options,
    )
    (BETA * loss).backward()
    with one_rank(tiny_qwen3_dir, replay_dpo=CHANNEL | options, grpo=OFF, rows_per_microbatch=1) as trainer:
        batch = make_batch([], pairs, rows=1)
        assert batch.preferences.num_forwards > 2
        metrics = trainer.accumulate_gradients(batch)
        gradients = gradients_of(trainer)
    assert metrics == pytest.approx(expected | {"dpo/beta": BETA}, rel=1e-5)
    assert 0 < metrics["dpo/accuracy"] < 1
    for mine, theirs in (
        ("tok_embeddings.weight", model.model.embed_tokens),
        ("layers.1.attention.qkv_linear.wq.weight", model.model.layers[1].self_attn.q_proj),
        ("layers.0.feed_forward.w2.weight", model.model.layers[0].mlp.down_proj),
    ):
        exact = theirs.weight.grad
        assert (gradients[mine] - exact).norm() < 1e-5 * exact.norm(), mine


def test_channels_add_up(tiny_qwen3_dir: Path) -> None:
    """0.5 grpo + alpha sdpo + beta dpo is the sum of three runs with one channel each."""
    samples, pairs = add_targets(make_samples()), make_pairs()
    gradients = []
    sdpo = {"weight": ALPHA, "teacher": "live"}
    for options in (
        {"grpo": {"weight": 0.5}, "sdpo": sdpo, "replay_dpo": CHANNEL},
        {"grpo": {"weight": 1.0}},
        {"grpo": OFF, "sdpo": sdpo},
        {"grpo": OFF, "replay_dpo": CHANNEL},
    ):
        with one_rank(tiny_qwen3_dir, **options) as trainer:
            metrics = trainer.accumulate_gradients(make_batch(samples, pairs))
            assert ("train/loss" in metrics) == (options["grpo"] != OFF)
            assert ("sdpo/loss" in metrics) == ("sdpo" in options)
            assert ("dpo/loss" in metrics) == ("replay_dpo" in options)
            gradients.append(gradients_of(trainer))
    total, grpo, sdpo_part, dpo = gradients
    for name, gradient in total.items():
        torch.testing.assert_close(
            gradient, 0.5 * grpo[name] + sdpo_part[name] + dpo[name], atol=1e-7, rtol=1e-4
        )
        assert all(part[name].norm() > 0.01 * gradient.norm() for part in (grpo, sdpo_part, dpo))


RESTING = {"schedule": {"decay": "linear", "decay_steps": 1}}


@pytest.mark.parametrize("channel", [OFF, CHANNEL | RESTING, CHANNEL])
def test_without_weight_or_pairs_it_is_grpo_alone(channel: dict[str, Any], tiny_qwen3_dir: Path) -> None:
    """Channel off, at rest by its schedule, or without pairs: bit for bit the step of a run without it."""
    pairs = [] if channel is CHANNEL else make_pairs()
    results = []
    for options, given in (({"replay_dpo": channel}, pairs), ({}, [])):
        with one_rank(tiny_qwen3_dir, total_steps=1, **options) as trainer:
            assert trainer.reference is None
            metrics = trainer.train_step(make_batch(make_samples(), given))
            results.append((metrics, trainer.hf_state_dict(torch.float32)))
    (metrics, state), (expected_metrics, expected) = results
    assert metrics == expected_metrics
    assert state is not None
    assert expected is not None
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_grpo_off_does_not_read_samples(tiny_qwen3_dir: Path) -> None:
    """Samples, with NaN in their numbers, beside the pairs change nothing; no copy is held for a KL term."""
    broken = make_samples()
    for sample in broken:
        sample.advantages = [float("nan")] * len(sample)
    with one_rank(tiny_qwen3_dir, replay_dpo=CHANNEL, grpo=OFF | {"kl_coef": 0.1}) as trainer:
        assert trainer.reference is None
        alone = trainer.accumulate_gradients(make_batch([], make_pairs()))
        gradients = gradients_of(trainer)
        assert trainer.accumulate_gradients(make_batch(broken, make_pairs())) == alone
        again = gradients_of(trainer)
    assert all(torch.equal(again[name], gradients[name]) for name in gradients)


def test_nothing_to_train_on_moves_nothing(tiny_qwen3_dir: Path) -> None:
    """GRPO off, and the only pair is too long: counted, a gradient of 0, and the weights stay."""
    long = TokenPair((1,) * 40, (2,) * 9, (3,), reference_chosen=0.0, reference_rejected=0.0)
    with one_rank(tiny_qwen3_dir, replay_dpo=CHANNEL, grpo=OFF) as trainer:
        trainer.train_step(make_batch([], make_pairs()))
        before = trainer.hf_state_dict(torch.float32)
        batch = make_batch([], [long])
        metrics = trainer.train_step(batch)
        after = trainer.hf_state_dict(torch.float32)
        assert (trainer.version, metrics["train/grad_norm"]) == (2, 0.0)
        assert not any(name.startswith("dpo/") for name in metrics)
    assert (batch.stats()["pairs"], batch.stats()["pairs_too_long"]) == (0.0, 1.0)
    assert before is not None
    assert after is not None
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_distilled_tokens_are_measured_without_grpo(tiny_qwen3_dir: Path) -> None:
    """SDPO alone: entropy and differences are means over the distilled tokens."""
    samples = add_targets(make_samples())
    model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir).double()
    entropies, differences = [], []
    for sample in samples:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([sample.token_ids])).logits[0], -1)
        for t in {position for target in sample.targets for position in target.positions}:
            entropies.append(float(-(logprobs[t - 1].exp() * logprobs[t - 1]).sum()))
            differences.append(abs(float(logprobs[t - 1, sample.token_ids[t]]) - sample.logprobs[t]))
    with one_rank(tiny_qwen3_dir, grpo=OFF, sdpo={"weight": 1.0, "teacher": "live"}) as trainer:
        metrics = trainer.accumulate_gradients(make_batch(samples, rows=1))
    assert {name: value for name, value in metrics.items() if name.startswith("train/")} == pytest.approx(
        {
            "train/entropy": sum(entropies) / len(entropies),
            "train/behaviour_diff_mean": sum(differences) / len(differences),
            "train/behaviour_diff_max": max(differences),
            "train/logprob_diff_mean": sum(differences) / len(differences),
            "train/logprob_diff_max": max(differences),
            "train/tokens_on_policy": len(differences),
        },
        rel=1e-4,
    )


def test_balance_goes_by_unweighted_gradients(tiny_qwen3_dir: Path) -> None:
    """Half of GRPO's weight: the same norms and the same alpha; pairs in the batch are in neither norm."""
    measured = []
    for weight, pairs in ((1.0, []), (0.5, make_pairs())):
        options: dict[str, Any] = {
            "grpo": {"weight": weight},
            "sdpo": {"weight": 1.0, "teacher": "live", "balance": "grad_norm"},
            "replay_dpo": CHANNEL,
        }
        with one_rank(tiny_qwen3_dir, **options) as trainer:
            metrics = trainer.accumulate_gradients(make_batch(add_targets(make_samples()), pairs))
            measured.append({name: metrics[name] for name in metrics if name.startswith("sdpo/grad_")})
    assert measured[0]["sdpo/grad_norm_grpo"] > 0
    assert measured[1] == pytest.approx(measured[0], rel=1e-5)


def test_balance_without_grpo_uses_the_plain_weight(tiny_qwen3_dir: Path) -> None:
    """There is nothing to balance against."""
    sdpo = {"weight": 2.0, "teacher": "live", "balance": "grad_norm"}
    with one_rank(tiny_qwen3_dir, grpo=OFF, sdpo=sdpo) as trainer:
        for _ in range(2):
            metrics = trainer.train_step(make_batch(add_targets(make_samples())))
            assert metrics["sdpo/alpha"] == 2.0
            assert "sdpo/grad_norm" not in metrics


def test_schedule_scales_beta(tiny_qwen3_dir: Path) -> None:
    channel = CHANNEL | {"schedule": {"warmup_steps": 4}}
    with one_rank(tiny_qwen3_dir, replay_dpo=channel, grpo=OFF) as trainer:
        betas = [trainer.train_step(make_batch([], make_pairs(1)))["dpo/beta"] for _ in range(5)]
    assert betas == pytest.approx([BETA * share for share in (0.25, 0.5, 0.75, 1.0, 1.0)])


def test_one_step_to_first_order(tiny_qwen3_dir: Path) -> None:
    """With margin 0 the gradient is -beta w tau / 2 times that of D = log pi(chosen) - log pi(rejected), so a
    step of size e along it raises D by 2 e |gradient| / (beta w tau)."""
    size = 1e-3
    for seed in range(3):
        (pair,) = make_pairs(1, seed=seed)
        with one_rank(tiny_qwen3_dir, replay_dpo=CHANNEL, grpo=OFF) as trainer:
            before = scored(trainer, [pair])
            metrics = trainer.accumulate_gradients(make_batch([], with_references([pair], before)))
            assert metrics["dpo/margin"] == pytest.approx(0.0, abs=1e-4)
            parameters = list(trainer.model.parameters())
            norm = sum(float(p.grad.pow(2).sum()) for p in parameters) ** 0.5
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= size / norm * parameter.grad
            after = scored(trainer, [pair])
        change = (after[0][0] - after[0][1]) - (before[0][0] - before[0][1])
        assert change == pytest.approx(2 * size * norm / (BETA * pair.weight * TAU), rel=0.05)


def test_initial_reference_is_the_one_at_insert_before_the_first_step(tiny_qwen3_dir: Path) -> None:
    """... and stays where the run began: after two steps the log-ratios are measured from there."""
    pairs = make_pairs()
    bare = [dataclasses.replace(pair, reference_chosen=None, reference_rejected=None) for pair in pairs]
    with one_rank(tiny_qwen3_dir, replay_dpo=CHANNEL, grpo=OFF) as trainer:
        began = scored(trainer, pairs)
        at_insert = trainer.accumulate_gradients(make_batch([], with_references(pairs, began)))
        expected = gradients_of(trainer)
        with pytest.raises(ValueError, match="7 preference pairs have no reference"):
            trainer.train_step(make_batch([], bare))
    options: dict[str, Any] = {"grpo": {"weight": 0.0, "kl_coef": 0.1}, "dpo_reference": "initial"}
    with one_rank(tiny_qwen3_dir, replay_dpo=CHANNEL, **options) as trainer:
        initial = trainer.accumulate_gradients(make_batch([], bare))
        gradients = gradients_of(trainer)
        for _ in range(2):
            trainer.train_step(make_batch([], bare))
        now = scored(trainer, pairs)
        later = trainer.accumulate_gradients(make_batch([], bare))
    assert initial.keys() == at_insert.keys()
    for name in ("dpo/loss", "dpo/weight_mean", "dpo/beta"):
        assert initial[name] == pytest.approx(at_insert[name], rel=1e-5)
    assert initial["dpo/margin"] == initial["dpo/chosen"] == 0.0  # the very same arithmetic on both sides
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    ratios = [(new[0] - old[0], new[1] - old[1]) for new, old in zip(now, began, strict=True)]
    assert later["dpo/chosen"] == pytest.approx(sum(c for c, _ in ratios) / 7, rel=1e-3)
    assert later["dpo/rejected"] == pytest.approx(sum(r for _, r in ratios) / 7, rel=1e-3)
    assert later["dpo/margin"] > 0.1
    assert later["dpo/accuracy"] == 1.0


def test_kl_and_pairs_share_one_reference(tiny_qwen3_dir: Path) -> None:
    options: dict[str, Any] = {"grpo": {"kl_coef": 0.1}, "dpo_reference": "initial", "replay_dpo": CHANNEL}
    with one_rank(tiny_qwen3_dir, **options) as trainer:
        assert trainer.reference is not None
        assert trainer.step.reference is trainer.step.dpo_reference is trainer.reference
        metrics = trainer.train_step(make_batch(make_samples(), make_pairs()))
        metrics = trainer.train_step(make_batch(make_samples(), make_pairs()))
    assert metrics["train/kl_mean"] != 0.0
    assert metrics["dpo/chosen"] != 0.0
