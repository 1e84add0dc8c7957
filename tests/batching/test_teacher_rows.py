"""Targets travel with their samples, and the two sides of each token meet."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from forge_composer.batching.packing import GlobalBatch, pack_samples
from forge_composer.types import TrainingSample


def sample(
    name: str, length: int, *, first: int, targets: list[tuple[list[int], int]], **options: bool
) -> TrainingSample:
    """Ids count up from `first`; every token but the first is trained on.

    `targets`: the positions of each, and how many hint tokens (ids from 900) its teacher reads first.
    """
    ids = list(range(first, first + length))
    made = TrainingSample(
        name, ids, [False] + [True] * (length - 1), [0.0] * length, [7] * length, [1.0] * length
    )
    made.policy_gradient = options.get("policy_gradient", True)
    made.targets = [
        SimpleNamespace(
            positions=positions,
            teacher_ids=[900 + i for i in range(hint)] + ids[: positions[-1] + 1],
            teacher_positions=[hint + p for p in positions],
            weight=0.5 * hint,
        )
        for positions, hint in targets
    ]  # type: ignore[misc]
    return made


def pack(samples: list[TrainingSample], **options: int) -> GlobalBatch:
    settings = {"seq_len": 16, "dp_degree": 1, "rows_per_microbatch": 1, "version": 7} | options
    return pack_samples(samples, **settings)  # type: ignore[arg-type]


def pairs(batch: GlobalBatch, microbatch: int, dp_rank: int, **cut: object) -> list[tuple[int, int, float]]:
    """Of every distilled token: what the student predicts, what the teacher predicts, its weight."""
    part = batch.microbatch(microbatch, dp_rank, **cut)  # type: ignore[arg-type]
    found = []
    for rows in part.teacher:
        teacher_ids = rows.token_ids_RL.reshape(-1)
        for number, index in enumerate(rows.student_N):
            predicted = int(teacher_ids[rows.select_N[number] + 1])
            found.append((int(part.targets_N[index]), predicted, float(rows.weights_N[number])))
    return found


def test_one_target_by_hand() -> None:
    batch = pack([sample("a", 5, first=10, targets=[([3, 4], 2)])])
    part = batch.microbatch(0, 0)
    (rows,) = part.teacher
    assert rows.token_ids_RL.tolist() == [[900, 901, 10, 11, 12, 13, 14]]
    assert rows.positions_RL.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert rows.select_N.tolist() == [4, 5]  # predict 13 and 14
    assert part.select_N.tolist() == [0, 1, 2, 3]
    assert rows.student_N.tolist() == [2, 3]
    assert rows.weights_N.tolist() == [1.0, 1.0]
    assert (batch.teacher.num_targets, batch.teacher.num_tokens, batch.teacher.dropped_targets) == (1, 2, 0)
    assert batch.stats()["tokens_distilled"] == 2.0


def test_sample_that_is_only_distilled() -> None:
    """It is selected and forwarded, and is in no count of the policy gradient."""
    batch = pack(
        [
            sample("a", 5, first=10, targets=[([4], 1)], policy_gradient=False),
            sample("b", 4, first=50, targets=[]),
        ]
    )
    part = batch.microbatch(0, 0)
    assert (batch.num_rollouts, batch.trained_tokens) == (1, 3)
    assert part.targets_N.tolist() == [14, 51, 52, 53]
    assert part.mask_N.tolist() == [False, True, True, True]
    assert part.sequence_weights_N.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert part.sequence_N.tolist() == [0, 1, 1, 1]
    assert pairs(batch, 0, 0) == [(14, 14, 0.5)]


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    """A context longer than a row, and a target whose sample is longer than a row."""
    batch = pack(
        [
            sample("a", 14, first=10, targets=[([13], 3), ([5], 1)]),
            sample("b", 17, first=50, targets=[([2], 1)]),
        ]
    )
    assert (batch.teacher.num_targets, batch.teacher.dropped_targets) == (1, 2)
    assert pairs(batch, 0, 0) == [(15, 15, 0.5)]


def test_batch_without_targets_has_no_teacher_pass() -> None:
    batch = pack([sample("a", 5, first=10, targets=[])])
    assert batch.microbatch(0, 0).teacher == ()
    assert pack([]).microbatch(0, 0).teacher == ()


@pytest.mark.parametrize("seed", range(20))
def test_every_target_meets_its_token_once(seed: int) -> None:
    """Any number of samples, ranks and micro-batches; trimmed or not; equal pass counts on all ranks."""
    draw = random.Random(seed)
    samples = []
    for number in range(draw.randrange(1, 12)):
        length = draw.randrange(3, 12)
        targets = [
            (sorted(draw.sample(range(1, length), draw.randrange(1, length - 1))), draw.randrange(1, 5))
            for _ in range(draw.randrange(0, 3))
        ]
        samples.append(
            sample(
                f"r{number}", length, first=20 * number, targets=targets, policy_gradient=draw.random() < 0.5
            )
        )
    degree = draw.choice([1, 2, 3])
    batch = pack(samples, dp_degree=degree, rows_per_microbatch=draw.choice([1, 2]))
    cut = draw.choice([{}, {"trim": False}, {"multiple": 4}, {"trim": False, "multiple": 32}])
    found = []
    for index in range(batch.num_microbatches):
        counts = set()
        for rank in range(degree):
            found += pairs(batch, index, rank, **cut)
            part = batch.microbatch(index, rank, **cut)  # type: ignore[arg-type]
            counts.add(len(part.teacher))
            for rows in part.teacher:
                assert rows.token_ids_RL.shape[1] % int(cut.get("multiple", 1)) == 0
                assert len(rows.select_N) == max(1, len(rows.student_N))
        assert counts == {batch.teacher.num_forwards(index)}
    expected = sorted(
        (s.token_ids[p], s.token_ids[p], target.weight)
        for s in samples
        for target in s.targets
        for p in target.positions
    )
    assert sorted(found) == expected
    assert batch.teacher.num_tokens == len(expected)
    trained = np.concatenate(
        [batch.microbatch(i, d).mask_N for i in range(batch.num_microbatches) for d in range(degree)]
    )
    assert trained.sum() == sum(len(s) - 1 for s in samples if s.policy_gradient)
