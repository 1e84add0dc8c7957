"""Packing loses nothing, mixes nothing, and counts after every mask."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_composer.batching.packing import GlobalBatch, pack_lengths, pack_samples
from forge_composer.types import TrainingSample


def sample(
    name: str, length: int, trained: int, *, first: int = 100, advantage: float = 1.0
) -> TrainingSample:
    """`trained` tokens at the end; token ids count up from `first`, log-probabilities are -id."""
    ids = list(range(first, first + length))
    mask = [t >= length - trained for t in range(length)]
    return TrainingSample(
        name,
        ids,
        mask,
        [-float(i) if on else 0.0 for i, on in zip(ids, mask, strict=True)],
        [7 if on else -1 for on in mask],
        [advantage if on else 0.0 for on in mask],
    )


def pack(samples: list[TrainingSample], **options: int) -> GlobalBatch:
    settings = {"seq_len": 16, "dp_degree": 1, "rows_per_microbatch": 1, "version": 7} | options
    return pack_samples(samples, **settings)  # type: ignore[arg-type]


def test_one_row_by_hand() -> None:
    batch = pack(
        [sample("a", 4, 2, first=10, advantage=0.5), sample("b", 3, 1, first=20, advantage=-2.0)], seq_len=9
    )
    assert batch.token_ids_MDRL.tolist() == [[[[10, 11, 12, 13, 20, 21, 22, 0, 0]]]]
    assert batch.positions_MDRL.tolist() == [[[[0, 1, 2, 3, 0, 1, 2, 0, 0]]]]
    # position t is about token t + 1; the last token of a sample predicts nothing
    assert batch.target_mask_MDRL.tolist() == [
        [[[False, True, True, False, False, True, False, False, False]]]
    ]
    assert batch.advantages_MDRL.tolist() == [[[[0, 0.5, 0.5, 0, 0, -2.0, 0, 0, 0]]]]
    assert batch.logprobs_MDRL.tolist() == [[[[0, -12, -13, 0, 0, -22, 0, 0, 0]]]]
    assert batch.versions_MDRL[0, 0, 0].tolist() == [-1, 7, 7, -1, -1, 7, -1, -1, -1]
    assert batch.sequence_weights_MDRL.tolist() == [[[[0, 0.5, 0.5, 0, 0, 1.0, 0, 0, 0]]]]
    assert (batch.num_rollouts, batch.trained_tokens, batch.total_tokens) == (2, 3, 7)
    part = batch.microbatch(0, 0)
    assert part.token_ids_RL.shape == (1, 7)
    assert part.select_N.tolist() == [1, 2, 5]
    assert part.targets_N.tolist() == [12, 13, 22]
    assert part.mask_N.tolist() == [True, True, True]


def test_counts_are_taken_after_every_mask() -> None:
    """Untrained, truncated-away and too long samples are in no divisor; a rollout counts once."""
    samples = [
        sample("a", 6, 2),
        sample("a", 5, 1),  # second sample of the same rollout
        sample("masked", 6, 0),
        sample("too long", 17, 8),
        sample("b", 6, 3),
    ]
    batch = pack(samples)
    assert (batch.num_rollouts, batch.trained_tokens) == (2, 6)
    assert (batch.num_samples, batch.dropped_samples) == (3, 1)
    weights = batch.sequence_weights_MDRL[batch.target_mask_MDRL]
    assert weights.tolist() == pytest.approx([1 / 3] * 6)
    assert pack(samples, num_rollouts=9).num_rollouts == 9
    assert batch.stats()["samples_too_long"] == 1.0


def test_first_token_of_a_sample_is_never_trained() -> None:
    """Nothing predicts it, so it is in no count either."""
    batch = pack([sample("a", 4, 4)])
    assert batch.trained_tokens == 3
    assert batch.sequence_weights_MDRL.max() == pytest.approx(1 / 3)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=25),
    dp_degree=st.integers(1, 3),
    rows=st.integers(1, 3),
    multiple=st.sampled_from([1, 4]),
)
def test_every_trained_token_appears_once(
    shapes: list[tuple[int, int]], dp_degree: int, rows: int, multiple: int
) -> None:
    samples = [
        sample(f"r{i % 7}", length, min(trained, length), first=1000 * (i + 1), advantage=float(i))
        for i, (length, trained) in enumerate(shapes)
    ]
    batch = pack(samples, dp_degree=dp_degree, rows_per_microbatch=rows)
    expected = Counter(
        (s.token_ids[t - 1], s.token_ids[t], s.logprobs[t], s.advantages[t])
        for s in samples
        if len(s) <= 16
        for t in range(1, len(s))
        if s.action_mask[t]
    )
    seen: Counter[tuple[float, ...]] = Counter()
    for index in range(batch.num_microbatches):
        for rank in range(dp_degree):
            part = batch.microbatch(index, rank, multiple=multiple)
            assert part.token_ids_RL.shape[1] % multiple == 0
            assert part.select_N.size >= 1
            flat = part.token_ids_RL.reshape(-1)
            seen.update(
                zip(
                    flat[part.select_N[part.mask_N]].tolist(),
                    part.targets_N[part.mask_N].tolist(),
                    part.logprobs_N[part.mask_N].tolist(),
                    part.advantages_N[part.mask_N].tolist(),
                    strict=True,
                )
            )
    assert seen == expected
    assert batch.trained_tokens == expected.total()
    starts = (batch.positions_MDRL == 0) & (np.arange(16) < batch.lengths_MDR[..., None])
    assert int(starts.sum()) == batch.num_samples


def test_trimming_keeps_the_numbers() -> None:
    """Untrimmed and trimmed hold the same trained tokens."""
    batch = pack([sample("a", 4, 2), sample("b", 9, 3)], rows_per_microbatch=3)
    trimmed, whole = batch.microbatch(0, 0), batch.microbatch(0, 0, trim=False)
    assert (trimmed.token_ids_RL.shape, whole.token_ids_RL.shape) == ((1, 13), (3, 16))
    for field in ("targets_N", "logprobs_N", "advantages_N", "versions_N", "sequence_weights_N", "mask_N"):
        np.testing.assert_array_equal(getattr(trimmed, field), getattr(whole, field))


def test_rows_are_dealt_evenly() -> None:
    """Four rows of falling length on two ranks: each micro-batch has neighbours."""
    samples = [sample(str(length), length, 1) for length in (16, 15, 14, 13)]
    batch = pack(samples, dp_degree=2)
    assert batch.lengths_MDR[..., 0].tolist() == [[16, 15], [14, 13]]


def test_empty_batch_has_one_microbatch() -> None:
    batch = pack([], dp_degree=2, rows_per_microbatch=2)
    assert batch.token_ids_MDRL.shape == (1, 2, 2, 16)
    assert (batch.num_rollouts, batch.trained_tokens, batch.total_tokens) == (0, 0, 0)
    part = batch.microbatch(0, 1, multiple=2)
    assert part.token_ids_RL.shape == (1, 2)
    assert part.mask_N.tolist() == [False]
    assert all(np.isfinite(list(batch.stats().values())))


def test_packing_is_deterministic_and_travels() -> None:
    samples = [sample(str(i), 3 + i % 5, 2, first=10 * i) for i in range(20)]
    one, two = pack(samples), pickle.loads(pickle.dumps(pack(samples)))
    np.testing.assert_array_equal(one.token_ids_MDRL, two.token_ids_MDRL)


def test_pack_lengths() -> None:
    assert pack_lengths([3, 8, 5, 8, 2], 10) == [[1, 4], [3], [2, 0]]
    assert pack_lengths([], 10) == []
    with pytest.raises(ValueError, match="11 tokens does not fit into a row of 10"):
        pack_lengths([11], 10)
