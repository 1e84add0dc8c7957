"""Training samples hold exactly what was sampled."""

from __future__ import annotations

import math

import pytest

from forge_composer.batching.samples import samples_from_rollout
from forge_composer.types import ParsedAction, Rollout, Turn


def turn(prompt: list[int], completion: list[int], *, opens: bool = False, version: int = 3) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-0.5 * (i + 1) for i in range(len(completion))],
        versions=[version] * len(completion),
        finish_reason="stop",
        action=ParsedAction(""),
        opens_sample=opens,
    )


def rollout(*turns: Turn) -> Rollout:
    return Rollout("r", 0, 0, "task", 0, [], [], turns=list(turns))


def test_turns_that_extend_are_one_sample() -> None:
    first = turn([1, 2], [3, 4], opens=True, version=5)
    second = turn([1, 2, 3, 4, 9, 9], [7], version=6)  # 9, 9: the observation
    (sample,) = samples_from_rollout(rollout(first, second), 0.25)
    assert sample.token_ids == [1, 2, 3, 4, 9, 9, 7]
    assert sample.action_mask == [False, False, True, True, False, False, True]
    assert sample.logprobs == [0, 0, -0.5, -1.0, 0, 0, -0.5]
    assert sample.versions == [-1, -1, 5, 5, -1, -1, 6]
    assert sample.advantages == [0, 0, 0.25, 0.25, 0, 0, 0.25]
    assert sample.rollout_id == "r"


def test_rewritten_history_opens_a_sample() -> None:
    first = turn([1, 2], [3], opens=True)
    second = turn([1, 8], [4], opens=True)
    third = turn([1, 8, 4, 5], [6])
    samples = samples_from_rollout(rollout(first, second, third), -1.0)
    assert [sample.token_ids for sample in samples] == [[1, 2, 3], [1, 8, 4, 5, 6]]
    assert samples[1].action_mask == [False, False, True, False, True]


@pytest.mark.parametrize("broken", [math.nan, -math.inf, math.inf])
def test_non_finite_logprob_is_masked(broken: float) -> None:
    """Out of the numerator and, being outside the mask, of every count."""
    only = turn([1], [2, 3], opens=True)
    only.logprobs[0] = broken
    (sample,) = samples_from_rollout(rollout(only), 1.0)
    assert sample.token_ids == [1, 2, 3]
    assert sample.action_mask == [False, False, True]
    assert sample.logprobs == [0, 0, -1.0]
    assert sample.versions == [-1, -1, 3]
    assert sample.advantages == [0, 0, 1.0]


def test_false_claim_of_extension_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout r, turn 1: the prompt does not begin with the 3 tokens"):
        samples_from_rollout(rollout(turn([1, 2], [3], opens=True), turn([1, 2, 4], [5])), 1.0)


def test_lists_of_unequal_length_are_refused() -> None:
    bad = turn([1], [2, 3], opens=True)
    bad.logprobs.pop()
    with pytest.raises(ValueError, match="turn 0: 2 tokens, 1 log-probabilities and 2 versions"):
        samples_from_rollout(rollout(bad), 1.0)


def test_no_turns_no_samples() -> None:
    assert samples_from_rollout(rollout(), 1.0) == []


def test_a_turn_that_an_update_crossed_has_its_oldest_version() -> None:
    """Later tokens attend to keys and values of the earlier weights: they are not on-policy for the new."""
    crossed = turn([1, 2], [3, 4, 5], opens=True)
    crossed.versions[:] = [6, 6, 7]
    (sample,) = samples_from_rollout(rollout(crossed), 1.0)
    assert sample.versions == [-1, -1, 6, 6, 6]
