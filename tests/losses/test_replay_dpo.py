"""The step-level DPO loss against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forge_composer.losses.config import ReplayDPOConfig
from forge_composer.losses.replay_dpo import ReplayDPOLoss, replay_dpo_loss, sum_logprobs


def loss_of(chosen: torch.Tensor, rejected: torch.Tensor, **changes: Any) -> ReplayDPOLoss:
    pairs = len(chosen)
    options = {name: changes.pop(name) for name in list(changes) if name in ReplayDPOConfig.model_fields}
    arguments: dict[str, Any] = {
        "reference_chosen_P": torch.zeros(pairs),
        "reference_rejected_P": torch.zeros(pairs),
        "weight_P": torch.ones(pairs),
        "mask_P": torch.ones(pairs, dtype=torch.bool),
        "divisor": 1.0,
        "config": ReplayDPOConfig(**({"tau": 0.5} | options)),
    }
    return replay_dpo_loss(chosen, rejected, **(arguments | changes))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_one_pair_by_hand() -> None:
    """Log-ratios 1 and -2: margin 0.5 x 3; d loss / d chosen = -0.5 sigma(-1.5)."""
    chosen, rejected = torch.tensor([-4.0], requires_grad=True), torch.tensor([-7.0], requires_grad=True)
    result = loss_of(
        chosen,
        rejected,
        reference_chosen_P=torch.tensor([-5.0]),
        reference_rejected_P=torch.tensor([-5.0]),
        weight_P=torch.tensor([0.8]),
        divisor=4.0,
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-0.2 * math.log(sigmoid(1.5)))
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.2 * 0.5 * sigmoid(-1.5))
    assert rejected.grad.item() == pytest.approx(0.2 * 0.5 * sigmoid(-1.5))
    assert (result.margin_P.item(), result.chosen_P.item(), result.rejected_P.item()) == (1.5, 1.0, -2.0)


def test_policy_at_its_reference() -> None:
    """Margin 0: log 2 a pair, whatever the log-probabilities are."""
    values = torch.tensor([-3.0, -80.0])
    result = loss_of(values, values * 2, reference_chosen_P=values, reference_rejected_P=values * 2)
    assert result.loss.item() == pytest.approx(2 * math.log(2))


def test_label_smoothing() -> None:
    result = loss_of(torch.tensor([2.0]), torch.tensor([0.0]), label_smoothing=0.1)
    assert result.loss.item() == pytest.approx(-0.9 * math.log(sigmoid(1.0)) - 0.1 * math.log(sigmoid(-1.0)))


def test_length_normalisation() -> None:
    """Log-ratios 2 and -3 over 4 and 6 tokens: margin 0.5 x (0.5 + 0.5)."""
    lengths: dict[str, Any] = {"chosen_lengths_P": torch.tensor([4]), "rejected_lengths_P": torch.tensor([6])}
    result = loss_of(torch.tensor([2.0]), torch.tensor([-3.0]), length_normalise=True, **lengths)
    assert result.margin_P.item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="lengths"):
        loss_of(torch.tensor([2.0]), torch.tensor([-3.0]), length_normalise=True)


@pytest.mark.parametrize("pairs", [0, 2])
def test_no_pair_is_zero(pairs: int) -> None:
    """An empty buffer, or only masked pairs that hold NaN: loss 0 with a graph, gradient 0."""
    chosen = torch.full((pairs,), math.nan, requires_grad=True)
    nothing = torch.full((pairs,), math.nan)
    result = loss_of(
        chosen,
        nothing,
        reference_chosen_P=nothing,
        reference_rejected_P=nothing,
        weight_P=nothing,
        mask_P=torch.zeros(pairs, dtype=torch.bool),
        divisor=0.0,
    )
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert chosen.grad is not None
    assert (chosen.grad == 0).all()
    assert (result.margin_P == 0).all()


def test_extreme_margins_stay_finite() -> None:
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    result = loss_of(chosen, -chosen.detach())
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1e4)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([0.0, -0.5])


def test_references_get_no_gradient() -> None:
    reference = torch.zeros(1, requires_grad=True)
    loss_of(torch.zeros(1, requires_grad=True), torch.zeros(1), reference_chosen_P=reference).loss.backward()
    assert reference.grad is None


def test_sum_logprobs() -> None:
    """Sequences 0 and 2 of three; a masked NaN takes no part."""
    logprobs = torch.tensor([-1.0, -2.0, math.nan, -4.0], requires_grad=True)
    sums = sum_logprobs(
        logprobs, torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 2]), num_sequences=3
    )
    assert sums.tolist() == [-3.0, 0.0, -4.0]
    sums[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1.0, 1.0, 0.0, 0.0]
