"""The GRPO loss against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.losses.config import GRPOConfig
from forge_composer.losses.grpo import GRPOLoss, aggregation_weights, grpo_loss, kl_estimate


def loss_of(logprobs: Tensor, **changes: Any) -> GRPOLoss:
    """Ones and zeros where nothing else is said; options of the config by name."""
    n = logprobs.shape[0]
    options = {name: changes.pop(name) for name in list(changes) if name in GRPOConfig.model_fields}
    arguments: dict[str, Any] = {
        "prox_logprobs_N": torch.zeros(n),
        "generator_logprobs_N": torch.zeros(n),
        "advantages_N": torch.ones(n),
        "mask_N": torch.ones(n, dtype=torch.bool),
        "divisor": 1.0,
        "config": GRPOConfig(**options),
    }
    return grpo_loss(logprobs, **(arguments | changes))


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


def test_ratio_to_the_generator() -> None:
    """Stale tokens are clipped, the proximal policy and the cap play no part: r = 1.5, 0.5, 3 against A =
    1."""
    logprobs = torch.tensor([1.5, 0.5, 3.0]).log().requires_grad_()
    result = loss_of(logprobs, prox_logprobs_N=torch.full((3,), 7.0), old_policy="generator", tis_cap=1.1)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.28 + 0.5 + 1.28))
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5, 0.0]))
    assert result.weight_N.tolist() == [1.0, 1.0, 1.0]
    assert not result.capped_N.any()


def test_sequence_ratio_is_the_geometric_mean() -> None:
    """GSPO: samples of ratios (1, 1.21) and (1, 1, 8): 1.1 and, clipped, 2; the masked token takes no
    part."""
    ratios = torch.tensor([1.0, 1.21, 5.0, 1.0, 1.0, 8.0])
    logprobs = ratios.log().requires_grad_()
    result = loss_of(
        logprobs,
        ratio="sequence",
        sequence_N=torch.tensor([0, 0, 0, 1, 1, 1]),
        mask_N=torch.tensor([True, True, False, True, True, True]),
    )
    result.loss.backward()
    torch.testing.assert_close(result.ratio_N, torch.tensor([1.1, 1.1, 1.0, 2.0, 2.0, 2.0]))
    assert result.loss.item() == pytest.approx(-(2 * 1.1 + 3 * 1.28))
    # d / d logp_t of 2 x exp(mean logp): each of the two tokens has half of 2 x 1.1
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.1, -1.1, 0.0, 0.0, 0.0, 0.0]))


def test_sequence_ratio_of_equal_policies_is_one_at_any_length() -> None:
    logprobs = torch.linspace(-9.0, -0.1, 4000)
    sequence = torch.zeros(4000, dtype=torch.int64)
    result = loss_of(logprobs, prox_logprobs_N=logprobs, ratio="sequence", sequence_N=sequence)
    assert (result.ratio_N == 1.0).all()
    with pytest.raises(ValueError, match="sequence_N"):
        loss_of(logprobs, ratio="sequence")


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "low", "high"),
    [
        (1.1, 1.0, 1.1, False, False),
        (4.0, 1.0, 1.28, False, True),
        (4.0, -1.0, 1.28, False, True),
        (0.1, 2.0, 0.8, True, False),
    ],
)
def test_cispo_weighs_and_never_drops(
    ratio: float, advantage: float, weight: float, low: bool, high: bool
) -> None:
    """d loss / d logp = -clip(r) A for every token."""
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    result = loss_of(logprobs, objective="cispo", advantages_N=torch.tensor([advantage]))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-weight * advantage * math.log(ratio))
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-weight * advantage)
    assert (bool(result.clipped_low_N), bool(result.clipped_high_N)) == (low, high)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_estimators(estimator: Any, value: float, slope: float) -> None:
    """log pi - log pi_ref = 0.5."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-1.5]), estimator)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope)


def test_kl_estimators_against_the_divergence() -> None:
    """Means over pi = (0.7, 0.3), reference (0.4, 0.6): k1 and k3 give KL; the gradient of k2 is that of
    KL."""
    logits = torch.tensor([0.7, 0.3], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    divergence = (logp.exp() * (logp - reference)).sum()
    (wanted,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    means = {name: (p * kl_estimate(logp, reference, name)).sum() for name in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    assert means["k1"].item() == pytest.approx(divergence.item())
    assert means["k3"].item() == pytest.approx(divergence.item())
    slopes = {name: torch.autograd.grad(mean, logits, retain_graph=True)[0] for name, mean in means.items()}
    torch.testing.assert_close(slopes["k2"], wanted)
    torch.testing.assert_close(slopes["k1"], torch.zeros(2, dtype=torch.float64))


def test_kl_in_the_reward() -> None:
    """A = 1 - 0.1 x 0.5; on policy the gradient is -A. Detached: nothing else reaches the log-probability."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    changes: dict[str, Any] = {
        "prox_logprobs_N": torch.tensor([-1.0]),
        "generator_logprobs_N": torch.tensor([-1.0]),
        "reference_logprobs_N": torch.tensor([-1.5]),
        "kl_coef": 0.1,
    }
    result = loss_of(logprobs, **changes)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-0.95)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-0.95)
    assert result.kl_N.tolist() == [0.5]
    with pytest.raises(ValueError, match="reference_logprobs_N"):
        loss_of(logprobs, kl_coef=0.1)


def test_kl_in_the_loss() -> None:
    """-A r + 0.1 x k3, weighed like the rest: weight 2, divisor 4."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = loss_of(
        logprobs,
        prox_logprobs_N=torch.tensor([-1.0]),
        generator_logprobs_N=torch.tensor([-1.0]),
        reference_logprobs_N=torch.tensor([-1.5]),
        kl_coef=0.1,
        kl_estimator="k3",
        kl_placement="loss",
        weights_N=torch.tensor([2.0]),
        divisor=4.0,
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx((-1 + 0.1 * (math.exp(-0.5) - 0.5)) / 2)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx((-1 + 0.1 * (1 - math.exp(-0.5))) / 2)


def test_k1_in_the_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="no gradient on average"):
        GRPOConfig(kl_coef=0.1, kl_estimator="k1", kl_placement="loss")
    GRPOConfig(kl_coef=0.0, kl_estimator="k1", kl_placement="loss")


def test_masked_tokens_may_hold_anything_with_every_option() -> None:
    """Sequence ratios, CISPO and a reference: a masked NaN reaches nothing."""
    poison = torch.tensor([-1.0, math.nan])
    for objective in ("clip", "cispo"):
        logprobs = poison.clone().requires_grad_()
        result = loss_of(
            logprobs,
            objective=objective,
            ratio="sequence",
            prox_logprobs_N=poison,
            generator_logprobs_N=poison,
            reference_logprobs_N=poison,
            sequence_N=torch.tensor([0, 0]),
            kl_coef=0.5,
            kl_estimator="k3",
            kl_placement="loss",
            mask_N=torch.tensor([True, False]),
        )
        result.loss.backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.0])
        assert result.kl_N.tolist() == [0.0, 0.0]
