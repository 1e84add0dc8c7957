"""The trainer against transformers, and one global batch against every layout."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rank_jobs import make_samples  # noqa: E402
from ranks import run_ranks  # noqa: E402


def reference_scores(model: Path, token_ids: list[int], temperature: float) -> list[float]:
    import torch
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logp = torch.log_softmax(network(ids).logits / temperature, dim=-1)
    return logp[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()


@pytest.fixture(scope="module")
def alone(tiny_qwen3_dir: Path) -> dict[str, Any]:
    return run_ranks("rank_jobs:one_step", 1, tiny_qwen3_dir, {})[0]


def relative_difference(left: Any, right: Any) -> float:
    assert left.keys() == right.keys()
    return max(float((left[n] - right[n]).norm() / (right[n].norm() + 1e-12)) for n in left)


def test_scores_equal_those_of_transformers(alone: dict[str, Any], tiny_qwen3_dir: Path) -> None:
    samples = make_samples()
    for scores, sample, temperature in zip(alone["scores"], samples, (1.0, 0.5), strict=False):
        expected = reference_scores(tiny_qwen3_dir, sample.token_ids, temperature)
        assert scores == pytest.approx(expected, abs=2e-5)


def test_the_loss_equals_a_plain_computation(alone: dict[str, Any], tiny_qwen3_dir: Path) -> None:
    """-mean over rollouts x 32 of min(exp(logp - generator), 2) A, one token at a time."""
    samples = make_samples()
    total, count, worst = 0.0, 0, 0.0
    for sample in samples:
        scores = [0.0, *reference_scores(tiny_qwen3_dir, sample.token_ids, 0.8)]
        for t, trained in enumerate(sample.action_mask):
            if trained:
                weight = min(math.exp(scores[t] - sample.logprobs[t]), 2.0)
                total -= weight * sample.advantages[t]
                worst = max(worst, abs(scores[t] - sample.logprobs[t]))
                count += 1
    metrics = alone["metrics"]
    assert metrics["train/loss"] == pytest.approx(total / (len(samples) * 32), rel=1e-4)
    assert metrics["train/tokens"] == count
    assert metrics["train/behaviour_diff_max"] == pytest.approx(worst, abs=1e-4)
    assert metrics["train/logprob_diff_max"] == pytest.approx(worst, abs=1e-4)
    assert metrics["train/ratio_mean"] == metrics["train/ratio_max"] == 1.0
    assert alone["version"] == 1


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ({"rows": 4}, 1),
        ({"dp_shard": 2}, 2),
        ({"tp": 2}, 2),
        ({"dp_replicate": 2}, 2),
        ({"activation_checkpointing": "full"}, 1),
        ({"activation_checkpointing": "selective"}, 1),
        pytest.param({"dp_shard": 2, "tp": 2}, 4, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "rows": 4}, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_global_batch_has_one_gradient(
    alone: dict[str, Any], tiny_qwen3_dir: Path, layout: dict[str, Any], world: int
) -> None:
    results = run_ranks("rank_jobs:one_step", world, tiny_qwen3_dir, layout)
    assert alone["microbatches"] == 4
    if layout.get("rows") == 4:
        assert results[0]["microbatches"] == 1
    for result in results:
        assert relative_difference(result["gradients"], alone["gradients"]) < 1e-5
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-7)
        assert result["scores"] == pytest.approx(alone["scores"], abs=1e-5)
    assert relative_difference(results[0]["weights"], alone["weights"]) < 1e-3  # Adam: sign of tiny gradients


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_without_trained_tokens_is_zero_and_hangs_nothing(tiny_qwen3_dir: Path, world: int) -> None:
    for result in run_ranks("rank_jobs:one_step", world, tiny_qwen3_dir, {"dp_shard": world}, True):
        assert all(float(gradient.abs().max()) == 0 for gradient in result["gradients"].values())
        assert all(math.isfinite(value) for value in result["metrics"].values())
        assert result["metrics"]["train/loss"] == 0 == result["metrics"]["train/tokens"]


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 2}], ids=str)
def test_an_export_loads_in_transformers_with_equal_scores(
    tiny_qwen3_dir: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    scores = run_ranks("rank_jobs:export", layout.get("dp_shard", 1), tiny_qwen3_dir, tmp_path / "hf", layout)
    assert scores[0] == scores[-1]
    for sample, ours in zip(make_samples(3), scores[0], strict=True):
        assert ours == pytest.approx(reference_scores(tmp_path / "hf", sample.token_ids, 1.0), abs=2e-5)
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(tmp_path / "hf").apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )
    assert "x" in text
