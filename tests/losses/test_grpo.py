"""The GRPO loss against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forge_composer.losses.grpo import GRPOLoss, aggregation_weights, grpo_loss


def loss_of(logprobs: Tensor, **changes: object) -> GRPOLoss:
    n = logprobs.shape[0]
    arguments: dict[str, object] = {
        "prox_logprobs_N": torch.zeros(n),
        "generator_logprobs_N": torch.zeros(n),
        "advantages_N": torch.ones(n),
        "mask_N": torch.ones(n, dtype=torch.bool),
        "divisor": 1.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "tis_cap": 2.0,
    }
    return grpo_loss(logprobs, **(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.2, 1.0, -1.2, -1.2, False, False),  # within 1 + 0.28
        (1.5, 1.0, -1.28, 0.0, False, True),  # clipped above: no gradient
        (1.5, -1.0, 1.5, 1.5, False, False),  # a bad action made likelier is not clipped
        (0.9, -1.0, 0.9, 0.9, False, False),
        (0.5, -1.0, 0.8, 0.0, True, False),  # clipped below
        (0.5, 1.0, -0.5, -0.5, False, False),  # a good action made unlikelier is not clipped
        (1.5, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_clipping_on_both_sides(
    ratio: float, advantage: float, loss: float, slope: float, low: bool, high: bool
) -> None:
    """d loss / d logp = -ratio A where not clipped."""
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    result = loss_of(logprobs, advantages_N=torch.tensor([advantage]))
    result.loss.backward()
    assert logprobs.grad is not None
    assert result.loss.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)
    assert (bool(result.clipped_low_N), bool(result.clipped_high_N)) == (low, high)
    assert result.ratio_N.item() == pytest.approx(ratio)


def test_truncated_importance_weight() -> None:
    """prox - generator = log 1.5, log 8 (capped at 2), log 0.25; no gradient through the weight."""
    logprobs = torch.zeros(3, requires_grad=True)
    generator = -torch.tensor([1.5, 8.0, 0.25]).log()
    result = loss_of(logprobs, generator_logprobs_N=generator, divisor=10.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.5 + 2.0 + 0.25) / 10)
    torch.testing.assert_close(logprobs.grad, -torch.tensor([1.5, 2.0, 0.25]) / 10)
    torch.testing.assert_close(result.importance_N, torch.tensor([1.5, 8.0, 0.25]))
    assert result.capped_N.tolist() == [False, True, False]
    off = loss_of(logprobs.detach(), generator_logprobs_N=generator, tis_cap=0.0)
    assert off.loss.item() == pytest.approx(-3.0)
    assert not off.capped_N.any()


def test_proximal_policy_is_apart_from_generator() -> None:
    """ratio = pi / prox, importance = prox / generator: logp -1, prox -1.1, generator -1.4."""
    result = loss_of(
        torch.tensor([-1.0]),
        prox_logprobs_N=torch.tensor([-1.1]),
        generator_logprobs_N=torch.tensor([-1.4]),
        advantages_N=torch.tensor([0.5]),
    )
    assert result.loss.item() == pytest.approx(-math.exp(0.3) * math.exp(0.1) * 0.5)


def test_prox_and_generator_get_no_gradient() -> None:
    prox = torch.zeros(2, requires_grad=True)
    generator = torch.zeros(2, requires_grad=True)
    logprobs = torch.zeros(2, requires_grad=True)
    loss_of(logprobs, prox_logprobs_N=prox, generator_logprobs_N=generator).loss.backward()
    assert prox.grad is None
    assert generator.grad is None


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(poison: float) -> None:
    """A non-finite value outside the mask reaches neither the loss nor the gradient."""
    logprobs = torch.tensor([-1.0, poison], requires_grad=True)
    poisoned = torch.tensor([-1.0, poison])
    result = loss_of(
        logprobs,
        prox_logprobs_N=poisoned,
        generator_logprobs_N=poisoned,
        advantages_N=poisoned,
        weights_N=poisoned.abs(),
        mask_N=torch.tensor([True, False]),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([1.0, 0.0])


def test_nothing_unmasked_is_zero() -> None:
    logprobs = torch.full((3,), -2.0, requires_grad=True)
    result = loss_of(logprobs, mask_N=torch.zeros(3, dtype=torch.bool), divisor=0.0)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_broken_token_stays_finite() -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    result = loss_of(logprobs, prox_logprobs_N=torch.tensor([-1e4]), advantages_N=torch.tensor([-1.0]))
    result.loss.backward()
    assert math.isfinite(result.loss.item())
    assert logprobs.grad is not None
    assert math.isfinite(logprobs.grad.item())


def test_aggregations() -> None:
    """Rollouts of 1 and 3 tokens, advantages 1 and 2, weights 1; longest completion 8."""
    sequence_weights = torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3])
    advantages = torch.tensor([1.0, 2.0, 2.0, 2.0])
    expected = {"constant": -7 / (2 * 8), "token_mean": -7 / 4, "sequence_mean": -(1 + 2) / 2}
    for aggregation, value in expected.items():
        weights, divisor = aggregation_weights(
            aggregation,  # type: ignore[arg-type]
            sequence_weights,
            num_rollouts=2,
            trained_tokens=4,
            max_completion_tokens=8,
        )
        result = loss_of(torch.zeros(4), advantages_N=advantages, weights_N=weights, divisor=divisor)
        assert result.loss.item() == pytest.approx(value), aggregation


def test_sum_over_any_split_is_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, prox, behind, advantages = torch.randn(4, 64, generator=generator) * 0.3
    mask = torch.rand(64, generator=generator) < 0.7
    whole = loss_of(
        logprobs,
        prox_logprobs_N=prox,
        generator_logprobs_N=behind,
        advantages_N=advantages,
        mask_N=mask,
        divisor=37.0,
    )
    parts = [
        loss_of(
            logprobs[part],
            prox_logprobs_N=prox[part],
            generator_logprobs_N=behind[part],
            advantages_N=advantages[part],
            mask_N=mask[part],
            divisor=37.0,
        ).loss
        for part in (slice(0, 5), slice(5, 40), slice(40, 64))
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole.loss)
