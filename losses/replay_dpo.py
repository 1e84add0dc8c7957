"""Preference pairs on single steps: what the teachers agreed on against what the student did.

    -log sigma(tau [(log pi(y_c|s) - log pi_ref(y_c|s)) - (log pi(y_r|s) - log pi_ref(y_r|s))])

(DPO, arXiv 2305.18290, equation 7, on steps that share their prefix: Step-DPO, arXiv 2406.18629). A pair
weighs as much as the teachers agree, and the divisor counts the pairs of the global batch. With label
smoothing e the term is (1 - e) (-log sigma(x)) + e (-log sigma(-x)).

Against others: TRL's `beta` is `tau`; TRL averages over the pairs of a micro-batch. With `length_normalise`
each log-ratio is divided by its number of tokens, as in SimPO and DMPO (there without a reference).

Shape suffixes: N = tokens, S = sequences, P = pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_composer.losses.config import ReplayDPOConfig


@dataclass(slots=True, frozen=True)
class ReplayDPOLoss:
    """The loss and its parts; everything but `loss` is detached, [P].

    Attributes:
        loss: scalar; this part of the batch's share of the global loss.
        margin_P: tau x difference of the log-ratios: the implicit reward margin; 0 outside the mask.
        chosen_P: log pi - log pi_ref of the chosen side, rejected_P of the rejected one. A margin that grows
            while both fall is the usual sign of a collapse; a preference accuracy does not show it.
        rejected_P: see `chosen_P`.
        weight_P: weight of each pair, 0 outside the mask.
    """

    loss: Tensor
    margin_P: Tensor
    chosen_P: Tensor
    rejected_P: Tensor
    weight_P: Tensor


def sum_logprobs(logprobs_N: Tensor, mask_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Log-probability of each sequence, [S]: the sum over its tokens inside the mask, differentiable."""
    sums_S = logprobs_N.new_zeros(num_sequences)
    return sums_S.index_add(0, sequence_N, torch.where(mask_N, logprobs_N, 0.0))


def replay_dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    weight_P: Tensor,
    mask_P: Tensor,
    *,
    config: ReplayDPOConfig,
    divisor: float,
    chosen_lengths_P: Tensor | None = None,
    rejected_lengths_P: Tensor | None = None,
) -> ReplayDPOLoss:
    """The loss of a set of pairs.

    Args:
        chosen_P: log-probability of the chosen action under the policy, summed over its tokens; nats.
        rejected_P: of the rejected one.
        reference_chosen_P: under the frozen reference; detached here.
        reference_rejected_P: under the frozen reference; detached here.
        weight_P: share of the teachers that agree.
        mask_P: bool; pairs outside take no part, whatever values they have.
        config: the options.
        divisor: pairs of the global batch; 0 counts as 1.
        chosen_lengths_P: tokens of each side, at least 1; for `length_normalise`.
        rejected_lengths_P: see `chosen_lengths_P`.

    Returns:
        The loss and its parts. Without a pair the loss is 0 with a zero gradient.

    Raises:
        ValueError: `length_normalise` without lengths.
    """
    chosen_P = torch.where(mask_P, chosen_P, 0.0) - torch.where(mask_P, reference_chosen_P.detach(), 0.0)
    rejected_P = torch.where(mask_P, rejected_P, 0.0) - torch.where(
        mask_P, reference_rejected_P.detach(), 0.0
    )
    weight_P = torch.where(mask_P, weight_P, 0.0)
    if config.length_normalise:
        if chosen_lengths_P is None or rejected_lengths_P is None:
            raise ValueError("replay_dpo_loss: length_normalise needs the lengths of both sides")
        chosen_P, rejected_P = chosen_P / chosen_lengths_P, rejected_P / rejected_lengths_P
    margin_P = config.tau * (chosen_P - rejected_P)
    smoothing = config.label_smoothing
    per_pair_P = -(1.0 - smoothing) * F.logsigmoid(margin_P)
    if smoothing:
        per_pair_P = per_pair_P - smoothing * F.logsigmoid(-margin_P)
    return ReplayDPOLoss(
        loss=(per_pair_P * weight_P / (divisor or 1.0)).sum(),
        margin_P=margin_P.detach(),
        chosen_P=chosen_P.detach(),
        rejected_P=rejected_P.detach(),
        weight_P=weight_P,
    )
