"""One optimizer step: its metrics by hand, its schedule, its failure modes, its checkpoint."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from forge_composer.batching.packing import pack_samples
from forge_composer.types import ScoreRequest, TrainingSample
from tests.training.training_fixtures import full_gradients, make_batch, make_samples, one_rank


def reference_terms(folder: Path, samples: list[TrainingSample]) -> dict[str, torch.Tensor]:
    """Per trained token, from transformers: log-probability, entropy, generator's, advantage."""
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    rows: dict[str, list[torch.Tensor]] = {"logp": [], "entropy": [], "generator": [], "advantage": []}
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1].double(), dim=-1)
        on = torch.tensor(sample.action_mask[1:])
        rows["logp"].append(logprobs.gather(1, ids[0, 1:, None])[:, 0][on])
        rows["entropy"].append(-(logprobs.exp() * logprobs).sum(-1)[on])
        rows["generator"].append(torch.tensor(sample.logprobs[1:]).double()[on])
        rows["advantage"].append(torch.tensor(sample.advantages[1:]).double()[on])
    return {name: torch.cat(values) for name, values in rows.items()}


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sequence_mean"])
def test_metrics_by_hand(aggregation: str, tiny_qwen3_dir: Path) -> None:
    samples = make_samples()
    terms = reference_terms(tiny_qwen3_dir, samples)
    importance = (terms["logp"] - terms["generator"]).exp()
    difference = (terms["logp"] - terms["generator"]).abs()
    tokens = len(importance)
    rollouts = [sample.rollout_id for sample in samples for on in sample.action_mask[1:] if on]
    weights = {
        "constant": torch.full((tokens,), 1 / (8 * 32)),  # 9 samples of 8 rollouts
        "token_mean": torch.full((tokens,), 1 / tokens),
        "sequence_mean": torch.tensor([1 / (8 * rollouts.count(rollout)) for rollout in rollouts]),
    }[aggregation]
    loss = -(importance.clamp(max=2.0) * terms["advantage"] * weights).sum()
    with one_rank(tiny_qwen3_dir, grpo={"aggregation": aggregation}) as trainer:
        metrics = trainer.train_step(make_batch(samples))
        assert trainer.version == 1
    assert metrics.pop("train/grad_norm") > 0
    assert 0 < (importance > 2.0).sum() < tokens
    expected = {
        "train/loss": loss,
        "train/lr": 1e-3,
        "train/entropy": terms["entropy"].mean(),
        "train/ratio_mean": 1.0,
        "train/ratio_max": 1.0,
        "train/clip_low_frac": 0.0,
        "train/clip_high_frac": 0.0,
        "train/tis_mean": importance.clamp(max=2.0).mean(),
        "train/tis_max": importance.max(),
        "train/tis_capped_frac": (importance > 2.0).double().mean(),
        "train/behaviour_diff_mean": difference.mean(),
        "train/behaviour_diff_max": difference.max(),
        "train/logprob_diff_mean": difference.mean(),
        "train/logprob_diff_max": difference.max(),
        "train/tokens_on_policy": tokens,
        "train/tokens": tokens,
        "train/tokens_forwarded": sum(len(sample) for sample in samples),
    }
    assert metrics == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)


def test_gradient_by_autograd_of_transformers(tiny_qwen3_dir: Path) -> None:
    """The packed, selected, chunked gradient is that of the loss written down over transformers' model."""
    samples = make_samples()
    model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir)
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        importance = (logprobs.detach() - torch.tensor(sample.logprobs[1:])).exp().clamp(max=2.0)
        per_token = importance * torch.tensor(sample.advantages[1:]) * logprobs
        (-(per_token * torch.tensor(sample.action_mask[1:])).sum() / (8 * 32)).backward()
    with one_rank(tiny_qwen3_dir) as trainer:
        trainer.accumulate_gradients(make_batch(samples))
        gradients = full_gradients(trainer)
    head = gradients.pop("lm_head.weight" if "lm_head.weight" in gradients else "tok_embeddings.weight")
    torch.testing.assert_close(head, model.model.embed_tokens.weight.grad, atol=1e-7, rtol=1e-4)
    query = gradients["layers.1.attention.qkv_linear.wq.weight"]
    expected = model.model.layers[1].self_attn.q_proj.weight.grad
    torch.testing.assert_close(query, expected, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_activation_checkpointing_keeps_the_gradient(policy: str, tiny_qwen3_dir: Path) -> None:
    gradients = []
    for choice in ("none", policy):
        with one_rank(tiny_qwen3_dir, activation_checkpointing=choice) as trainer:
            trainer.accumulate_gradients(make_batch(make_samples()))
            gradients.append(full_gradients(trainer))
            wrapped = [name for name, _ in trainer.model.named_modules() if "_checkpoint_wrapped" in name]
            assert bool(wrapped) == (choice != "none")
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-8, rtol=1e-6)


def test_bfloat16_computes_roughly_the_same(tiny_qwen3_dir: Path) -> None:
    """Compute in bfloat16 over float32 weights and gradients: a few per cent from float32, and not equal."""
    gradients = []
    for dtype in ("float32", "bfloat16"):
        with one_rank(tiny_qwen3_dir, dtype=dtype) as trainer:
            trainer.accumulate_gradients(make_batch(make_samples()))
            gradients.append(full_gradients(trainer))
    exact, rough = gradients
    for name, gradient in exact.items():
        assert rough[name].dtype == torch.float32
        error = (rough[name] - gradient).norm() / gradient.norm()
        assert 1e-4 < error < 0.05, name


def test_stale_tokens_are_not_on_policy(tiny_qwen3_dir: Path) -> None:
    """Tokens of other versions count in `behaviour_diff` and not in `logprob_diff`."""
    samples = [dataclasses.replace(sample, versions=[5] * len(sample)) for sample in make_samples()]
    with one_rank(tiny_qwen3_dir) as trainer:
        metrics = trainer.train_step(make_batch(samples))
    assert metrics["train/behaviour_diff_max"] > 0.1
    for name in ("tokens_on_policy", "logprob_diff_max", "logprob_diff_mean"):
        assert metrics[f"train/{name}"] == 0.0


def test_generator_equal_to_trainer_has_no_difference(tiny_qwen3_dir: Path) -> None:
    """Scores fed back as the generator's log-probabilities: difference about 0, importance weight 1."""
    samples = make_samples()
    with one_rank(tiny_qwen3_dir) as trainer:
        for sample in samples:
            sample.logprobs = [0.0, *trainer.score([ScoreRequest(tuple(sample.token_ids))])[0]]
        metrics = trainer.train_step(make_batch(samples))
        assert metrics["train/logprob_diff_max"] < 1e-5
        assert metrics["train/tis_mean"] == pytest.approx(1.0, abs=1e-5)
        # ... and scoring before a step does not leave stale weights behind: the next scores have moved.
        moved = trainer.score([ScoreRequest(tuple(samples[0].token_ids))])[0]
        assert max(abs(a - b) for a, b in zip(moved, samples[0].logprobs[1:], strict=True)) > 1e-3
        state = trainer.hf_state_dict(torch.float32)
        assert state is not None
        model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir)
        model.load_state_dict(state, strict=False)
        ids = torch.tensor([samples[0].token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model.eval()(ids).logits[0, :-1], dim=-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(moved), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 2}, [1 / 2, 1.0, 1.0, 1.0]),
        ({"decay": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"decay": "linear", "min_lr_factor": 0.5}, [1.0, 0.875, 0.75, 0.625]),
        ({"decay": "cosine"}, [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]),
        ({"decay": "sqrt"}, [1 - math.sqrt(step / 4) for step in range(4)]),
    ],
)
def test_learning_rate_schedule(
    scheduler: dict[str, Any], expected: list[float], tiny_qwen3_dir: Path
) -> None:
    batch = make_batch(make_samples(2))
    with one_rank(tiny_qwen3_dir, scheduler=scheduler, total_steps=4) as trainer:
        rates = [trainer.train_step(batch)["train/lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-3 * factor for factor in expected])


def test_gradient_clipping_and_weight_decay(tiny_qwen3_dir: Path) -> None:
    """The reported norm is that before clipping; decay moves a weight without gradient."""
    batch = make_batch(make_samples())
    norms = []
    for limit in (1e-3, 1e3):
        with one_rank(tiny_qwen3_dir, optimizer={"max_grad_norm": limit}) as trainer:
            norms.append(trainer.train_step(batch)["train/grad_norm"])
    assert norms[0] == norms[1] > 1e-3
    options = {"weight_decay": 0.1, "lr": 0.01, "name": "AdamW"}
    with one_rank(tiny_qwen3_dir, optimizer=options) as trainer:
        before = trainer.hf_state_dict(torch.float32)
        trainer.train_step(make_batch([]))
        after = trainer.hf_state_dict(torch.float32)
    assert before is not None
    assert after is not None
    for name, value in before.items():
        torch.testing.assert_close(after[name], value * (1 - 0.001))


def test_non_finite_gradient_stops_before_the_step(tiny_qwen3_dir: Path) -> None:
    samples = make_samples()
    samples[0].advantages = [math.inf] * len(samples[0])
    with one_rank(tiny_qwen3_dir) as trainer:
        before = trainer.hf_state_dict(torch.float32)
        with pytest.raises(FloatingPointError, match="gradient norm of step 1"):
            trainer.train_step(make_batch(samples))
        after = trainer.hf_state_dict(torch.float32)
        assert before is not None
        assert after is not None
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert trainer.version == 0
        assert trainer.train_step(make_batch(make_samples()))["train/grad_norm"] > 0


def test_batch_for_another_layout_is_refused(tiny_qwen3_dir: Path) -> None:
    batch = pack_samples(make_samples(), seq_len=48, dp_degree=2, rows_per_microbatch=1, version=0)
    with one_rank(tiny_qwen3_dir) as trainer, pytest.raises(ValueError, match="2 data-parallel ranks"):
        trainer.train_step(batch)


@pytest.mark.resume
def test_checkpoint_continues_bitwise(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more; a fresh trainer from the checkpoint repeats the last two."""
    batches = [make_batch(make_samples(seed=seed)) for seed in range(4)]
    options: dict[str, Any] = {"checkpoint_every": 2, "scheduler": {"decay": "linear"}}
    with one_rank(tiny_qwen3_dir, output_dir=tmp_path, **options) as trainer:
        assert not trainer.load_checkpoint()
        for batch in batches[:2]:
            trainer.train_step(batch)
        trainer.save_checkpoint(2)
        expected = [trainer.train_step(batch) for batch in batches[2:]]
        expected_state = trainer.hf_state_dict(torch.float32)
    assert (tmp_path / "checkpoints" / "step-2" / ".metadata").exists()
    with one_rank(tiny_qwen3_dir, output_dir=tmp_path, **options) as trainer:
        trainer.train_step(batches[3])
        assert trainer.load_checkpoint()
        assert trainer.version == 2
        assert [trainer.train_step(batch) for batch in batches[2:]] == expected
        state = trainer.hf_state_dict(torch.float32)
    assert state is not None
    assert expected_state is not None
    assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)


def test_kl_from_the_policy_that_the_run_began_with(tiny_qwen3_dir: Path) -> None:
    """0 in the first step; in the second the mean of log pi - log pi_0 over the trained tokens."""
    samples = make_samples()
    requests = [ScoreRequest(tuple(sample.token_ids)) for sample in samples]
    with one_rank(tiny_qwen3_dir, grpo={"kl_coef": 0.1}) as trainer:
        before = trainer.score(requests)
        assert trainer.train_step(make_batch(samples))["train/kl_mean"] == pytest.approx(0.0, abs=1e-6)
        after = trainer.score(requests)
        metrics = trainer.train_step(make_batch(samples))
    differences = [
        new - old
        for sample, now, then in zip(samples, after, before, strict=True)
        for on, new, old in zip(sample.action_mask[1:], now, then, strict=True)
        if on
    ]
    assert abs(sum(differences)) > 1e-3
    assert metrics["train/kl_mean"] == pytest.approx(sum(differences) / len(differences), rel=1e-3)


def test_kl_holds_the_policy_back(tiny_qwen3_dir: Path) -> None:
    """The same four steps end nearer to the beginning with a large coefficient."""
    samples = make_samples()
    distances = []
    for coefficient in (1e-9, 50.0):
        options: dict[str, Any] = {"kl_coef": coefficient, "kl_estimator": "k2", "kl_placement": "loss"}
        with one_rank(tiny_qwen3_dir, grpo=options) as trainer:
            for _ in range(4):
                distance = trainer.train_step(make_batch(samples))["train/kl_mean"]
        distances.append(distance)
    assert distances[1] < 0.5 * distances[0]


def test_ratio_to_the_generator_is_clipped(tiny_qwen3_dir: Path) -> None:
    """Against the trainer's own policy the ratio of one step is 1; against the generator's it is not."""
    samples = make_samples()
    terms = reference_terms(tiny_qwen3_dir, samples)
    importance = (terms["logp"] - terms["generator"]).exp()
    with one_rank(tiny_qwen3_dir, grpo={"old_policy": "generator"}) as trainer:
        metrics = trainer.train_step(make_batch(samples))
    assert metrics["train/ratio_mean"] == pytest.approx(float(importance.mean()), rel=1e-4)
    assert metrics["train/clip_high_frac"] > 0
    assert metrics["train/tis_mean"] == 1.0


def test_sequence_ratio_is_taken_over_samples(tiny_qwen3_dir: Path) -> None:
    """GSPO in packed rows: the ratio's mean over tokens is that of the samples' geometric means."""
    samples = make_samples()
    model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir).eval()
    total, count = 0.0, 0
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        on = torch.tensor(sample.action_mask[1:])
        log_ratio = (logprobs - torch.tensor(sample.logprobs[1:]))[on]
        total += float(log_ratio.mean().exp()) * len(log_ratio)
        count += len(log_ratio)
    with one_rank(tiny_qwen3_dir, grpo={"old_policy": "generator", "ratio": "sequence"}) as trainer:
        metrics = trainer.train_step(make_batch(samples))
    assert metrics["train/ratio_mean"] == pytest.approx(total / count, rel=1e-4)
