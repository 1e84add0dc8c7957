"""Both sides of a pair meet in one forward pass, and every rank runs as many passes."""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections import Counter

import numpy as np
import pytest

from forge_composer.batching.packing import GlobalBatch, pack_samples
from forge_composer.batching.preference_rows import PreferenceRows, TokenPair
from forge_composer.types import TrainingSample


def pair(number: int, context: int, chosen: int, rejected: int) -> TokenPair:
    """Ids that name pair, part and place: 1000 x number + 0, 100 or 200 + place."""
    first = 1000 * number
    parts = ((first, context), (first + 100, chosen), (first + 200, rejected))
    return TokenPair(
        *(tuple(range(start, start + length)) for start, length in parts),
        weight=0.1 * number,
        reference_chosen=-1.0 * number,
        reference_rejected=-2.0 * number,
        temperature=1.0 + number,
    )


def pack(pairs: list[TokenPair], **options: int) -> GlobalBatch:
    settings = {"seq_len": 16, "dp_degree": 1, "rows_per_microbatch": 2, "version": 0} | options
    return pack_samples([], pairs=pairs, **settings)  # type: ignore[arg-type]


def read(rows: PreferenceRows) -> list[TokenPair]:
    """The pairs of a pass as the loss sees them: values, and the contexts and sides that its indices name."""
    flat_ids, flat_positions = rows.token_ids_RL.reshape(-1), rows.positions_RL.reshape(-1)
    found = []
    for number in np.flatnonzero(rows.mask_P):
        sides: list[tuple[int, ...]] = []
        contexts: list[tuple[int, ...]] = []
        temperatures = set()
        for side in (0, 1):
            at = np.flatnonzero((rows.sequence_N == 2 * number + side) & rows.mask_N)
            select = rows.select_N[at]
            assert (np.diff(select) == 1).all()
            assert rows.targets_N[at].tolist() == flat_ids[select + 1].tolist()
            assert len(at) == rows.lengths_2P[side, number]
            start = select[0] - flat_positions[select[0]]
            stop = select[-1] + 2
            assert start // rows.token_ids_RL.shape[1] == (stop - 1) // rows.token_ids_RL.shape[1]
            assert flat_positions[start:stop].tolist() == list(range(stop - start))
            contexts.append(tuple(flat_ids[start : select[0] + 1].tolist()))
            sides.append(tuple(rows.targets_N[at].tolist()))
            temperatures |= set(rows.temperatures_N[at].tolist())
        assert contexts[0] == contexts[1]
        (temperature,) = temperatures
        found.append(
            TokenPair(
                contexts[0],
                *sides,
                float(rows.weights_P[number]),
                float(rows.references_2P[0, number]),
                float(rows.references_2P[1, number]),
                temperature,
            )
        )
    return found


def test_one_pair_by_hand() -> None:
    batch = pack([pair(1, 3, 2, 4)])
    (rows,) = batch.preferences.forwards(0)
    assert rows.token_ids_RL.tolist() == [
        [1000, 1001, 1002, 1200, 1201, 1202, 1203, 1000, 1001, 1002, 1100, 1101]
    ]
    assert rows.positions_RL.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]]
    assert rows.select_N.tolist() == [2, 3, 4, 5, 9, 10]
    assert rows.targets_N.tolist() == [1200, 1201, 1202, 1203, 1100, 1101]
    assert rows.sequence_N.tolist() == [1, 1, 1, 1, 0, 0]
    assert rows.temperatures_N.tolist() == [2.0] * 6
    assert (rows.mask_N.all(), rows.mask_P.tolist(), rows.weights_P.tolist()) == (True, [True], [0.1])
    assert rows.references_2P.tolist() == [[-1.0], [-2.0]]
    assert rows.lengths_2P.tolist() == [[2], [4]]
    stats = batch.stats()
    assert (stats["pairs"], stats["pairs_too_long"], stats["tokens_paired"]) == (1.0, 0.0, 6.0)
    assert batch.preferences.num_tokens == 12


def test_pair_without_reference_holds_nan() -> None:
    bare = dataclasses.replace(pair(1, 3, 2, 4), reference_chosen=None, reference_rejected=None)
    assert (bare.has_reference, pair(1, 3, 2, 4).has_reference) == (False, True)
    (rows,) = pack([bare]).preferences.forwards(0)
    assert np.isnan(rows.references_2P).all()


def test_pair_too_long_is_dropped_and_counted() -> None:
    """Either side, with the context, has to fit into a row."""
    batch = pack([pair(1, 10, 7, 1), pair(2, 10, 1, 7), pair(3, 10, 6, 6)])
    assert batch.preferences.num_pairs == 1
    assert batch.stats()["pairs_too_long"] == 2.0
    (rows,) = batch.preferences.forwards(0)
    assert read(rows) == [pair(3, 10, 6, 6)]


def test_pair_that_shares_no_row_gets_two() -> None:
    """One row to a pass: pairs of 16 + 12 tokens take two rows each, the others one between them."""
    batch = pack([pair(1, 10, 6, 2), pair(2, 2, 1, 2), pair(3, 10, 2, 6)], rows_per_microbatch=1)
    shapes = [rows.token_ids_RL.shape for rows in batch.preferences.forwards(0)]
    assert sorted(shapes) == [(1, 7), (2, 16), (2, 16)]
    full = [rows.token_ids_RL.shape for rows in batch.preferences.forwards(0, trim=False)]
    assert sorted(full) == [(1, 16), (2, 16), (2, 16)]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_empty_part_is_refused(part: int) -> None:
    lengths = [2, 2, 2]
    lengths[part] = 0
    with pytest.raises(ValueError, match="a context and two sides, got"):
        pair(1, *lengths)


def test_batch_without_pairs_has_no_pass() -> None:
    sample = TrainingSample("a", [1, 2, 3], [False, True, True], [0.0] * 3, [0] * 3, [1.0] * 3)
    batch = pack_samples([sample], seq_len=16, dp_degree=2, rows_per_microbatch=1, version=0)
    assert (batch.preferences.num_forwards, list(batch.preferences.forwards(1))) == (0, [])
    assert batch.stats()["pairs"] == 0.0


def test_pairs_leave_samples_as_they_are() -> None:
    sample = TrainingSample("a", [1, 2, 3], [False, True, True], [0.0] * 3, [0] * 3, [1.0] * 3)
    options = {"seq_len": 16, "dp_degree": 2, "rows_per_microbatch": 1, "version": 0}
    alone = pack_samples([sample], **options)  # type: ignore[arg-type]
    beside = pack_samples([sample], pairs=[pair(1, 3, 2, 4)], **options)  # type: ignore[arg-type]
    for field in dataclasses.fields(alone):
        if field.name != "preferences":
            np.testing.assert_equal(getattr(beside, field.name), getattr(alone, field.name))


def test_pairs_are_dealt_out_evenly() -> None:
    """32 equal pairs that fit into one pass of one rank: on four ranks each has 8 of them."""
    pairs = [pair(number, 2, 1, 1) for number in range(32)]
    batch = pack(pairs, dp_degree=4, rows_per_microbatch=16)
    assert batch.preferences.num_forwards == 1
    for rank in range(4):
        (rows,) = batch.preferences.forwards(rank)
        assert rows.mask_P.sum() == 8


@pytest.mark.parametrize("seed", range(30))
def test_every_pair_is_read_once(seed: int) -> None:
    """Any pairs, ranks, rows; trimmed or not; the batch goes to the ranks pickled."""
    draw = random.Random(seed)
    pairs = [
        pair(number, draw.randrange(1, 10), draw.randrange(1, 9), draw.randrange(1, 9))
        for number in range(draw.randrange(0, 15))
    ]
    kept = [one for one in pairs if max(one.lengths) <= 16]
    degree, most_rows = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    batch: GlobalBatch = pickle.loads(
        pickle.dumps(pack(pairs, dp_degree=degree, rows_per_microbatch=most_rows))
    )
    trim, multiple = draw.choice([True, False]), draw.choice([1, 4, 16])
    found: list[TokenPair] = []
    for rank in range(degree):
        passes = list(batch.preferences.forwards(rank, trim=trim, multiple=multiple))
        assert len(passes) == batch.preferences.num_forwards
        for rows in passes:
            here = read(rows)
            found += here
            assert rows.token_ids_RL.shape[1] % multiple == 0
            assert rows.token_ids_RL.shape[1] <= 16
            assert rows.token_ids_RL.shape[0] <= max(most_rows, 2)
            assert rows.token_ids_RL.shape[0] <= most_rows or any(sum(one.lengths) > 16 for one in here)
            assert trim or rows.token_ids_RL.shape[0] >= most_rows
            assert len(rows.select_N) == max(1, sum(len(side) for one in here for side in one.sides))
    assert Counter(map(_key, found)) == Counter(map(_key, kept))
    assert batch.preferences.num_pairs == len(kept)
    assert batch.preferences.dropped_pairs == len(pairs) - len(kept)
    assert batch.preferences.num_forwards <= -(-len(kept) // degree)


def _key(one: TokenPair) -> tuple[object, ...]:
    return (*dataclasses.astuple(one)[:3], round(one.weight, 9), *dataclasses.astuple(one)[4:])
