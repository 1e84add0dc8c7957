"""Packing samples into rows of fixed length, and rows into the micro-batches of all data-parallel ranks.

Shape suffixes: M = micro-batches, D = data-parallel ranks, R = rows, L = positions in a row, N = tokens.

Arrays that describe an action are aligned to *targets*: entry t is about predicting token t + 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forge_composer.batching.preference_rows import PreferenceBatch, TokenPair
from forge_composer.batching.row_packing import pack_lengths
from forge_composer.batching.teacher_rows import TeacherBatch, TeacherContext, TeacherRows
from forge_composer.types import TrainingSample


@dataclass(slots=True, frozen=True)
class Microbatch:
    """What one rank forwards at a time; trailing padding and empty rows may be cut off.

    `select_N` are the flat positions (row x length + t) whose next token is trained on, at least one: with
    nothing to train on it is position 0. `mask_N` is True where the token is in the policy gradient, and
    False where it is only distilled.
    """

    token_ids_RL: NDArray[np.int64]
    positions_RL: NDArray[np.int64]
    select_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    mask_N: NDArray[np.bool_]
    advantages_N: NDArray[np.float32]
    logprobs_N: NDArray[np.float32]
    versions_N: NDArray[np.int64]
    sequence_weights_N: NDArray[np.float32]
    sequence_N: NDArray[np.int64]
    """Which of the micro-batch's samples a token belongs to, in [0, num_sequences)."""
    num_sequences: int
    teacher: tuple[TeacherRows, ...] = ()
    """The teacher's forward passes, as many on every rank; none without a target in the micro-batch."""


@dataclass(slots=True, frozen=True)
class GlobalBatch:
    """The data of one optimizer step, for all ranks.

    Every rank takes part in all M micro-batches, so that collectives match; empty rows fill up. Padding has
    token 0, position 0 and is not trained on. `sequence_weights` is 1 / (trained tokens of the rollout).
    The divisors are global and are counted after every mask.
    """

    token_ids_MDRL: NDArray[np.int32]
    positions_MDRL: NDArray[np.int32]
    """0 at the start of each sample, and at each padding token."""
    lengths_MDR: NDArray[np.int32]
    """Used positions of each row."""
    target_mask_MDRL: NDArray[np.bool_]
    advantages_MDRL: NDArray[np.float32]
    logprobs_MDRL: NDArray[np.float32]
    versions_MDRL: NDArray[np.int32]
    sequence_weights_MDRL: NDArray[np.float32]
    version: int
    """Policy version that is to be trained."""
    num_rollouts: int
    """Rollouts that the loss is averaged over."""
    trained_tokens: int
    """Tokens inside the mask."""
    num_samples: int
    """Samples in the rows."""
    dropped_samples: int
    """Samples longer than a row, left out."""
    teacher: TeacherBatch
    """Targeted turns and their teacher's contexts."""
    sdpo_scale: float = 1.0
    """What a guard leaves of the SDPO channel's weight."""
    preferences: PreferenceBatch = field(default_factory=PreferenceBatch)
    """Preference pairs, in forward passes of their own beside the micro-batches."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that every rank runs."""
        return int(self.token_ids_MDRL.shape[0])

    @property
    def dp_degree(self) -> int:
        """Data-parallel ranks that the batch is laid out for."""
        return int(self.token_ids_MDRL.shape[1])

    @property
    def total_tokens(self) -> int:
        """Tokens in the rows, without padding."""
        return int(self.lengths_MDR.sum())

    def stats(self) -> dict[str, float]:
        """Sizes, for the metrics of the step."""
        return {
            "microbatches": float(self.num_microbatches),
            "rows": float(np.count_nonzero(self.lengths_MDR)),
            "samples": float(self.num_samples),
            "samples_too_long": float(self.dropped_samples),
            "rollouts": float(self.num_rollouts),
            "tokens": float(self.total_tokens),
            "tokens_trained": float(self.trained_tokens),
            "targets": float(self.teacher.num_targets),
            "targets_too_long": float(self.teacher.dropped_targets),
            "tokens_distilled": float(self.teacher.num_tokens),
            "pairs": float(self.preferences.num_pairs),
            "pairs_too_long": float(self.preferences.dropped_pairs),
            "tokens_paired": float(self.preferences.num_side_tokens),
            "padding_frac": 1.0 - self.total_tokens / max(1, self.token_ids_MDRL.size),
        }

    def microbatch(self, index: int, dp_rank: int, *, trim: bool = True, multiple: int = 1) -> Microbatch:
        """Micro-batch `index` of data-parallel rank `dp_rank`.

        Args:
            index: in [0, num_microbatches).
            dp_rank: in [0, dp_degree).
            trim: cut off empty rows and what is padding in all rows (at least one row is left).
            multiple: the length is rounded up to a multiple of this.
        """
        here = (index, dp_rank)
        lengths_R = self.lengths_MDR[here]
        rows, seq_len = self.token_ids_MDRL[here].shape
        length = seq_len
        if trim:
            rows = max(1, int(np.count_nonzero(lengths_R)))
            length = max(1, int(lengths_R.max()))
        padded = -(-length // multiple) * multiple

        def cut(values_MDRL: NDArray[np.generic]) -> NDArray[np.generic]:
            used_RL = values_MDRL[here][:rows, :length]
            return np.pad(used_RL, ((0, 0), (0, padded - length))) if padded > length else used_RL

        token_ids_RL = cut(self.token_ids_MDRL).astype(np.int64)
        mask = cut(self.target_mask_MDRL).reshape(-1)
        distilled_row, distilled_t = np.divmod(self.teacher.student_positions(*here), seq_len)
        wanted = mask.astype(np.bool_)
        wanted[distilled_row * padded + distilled_t] = True
        select_N = np.flatnonzero(wanted)
        if not select_N.size:
            select_N = np.zeros(1, dtype=np.int64)
        flat_ids = token_ids_RL.reshape(-1)
        positions_RL = cut(self.positions_MDRL).astype(np.int64)
        # A sample begins wherever the position is 0 again.
        select_row, select_t = np.divmod(select_N, padded)
        samples, sequence_N = np.unique(
            np.cumsum(positions_RL.reshape(-1) == 0)[select_N], return_inverse=True
        )
        return Microbatch(
            token_ids_RL=token_ids_RL,
            positions_RL=positions_RL,
            select_N=select_N,
            targets_N=flat_ids[np.minimum(select_N + 1, flat_ids.size - 1)],
            mask_N=mask[select_N].astype(np.bool_),
            advantages_N=cut(self.advantages_MDRL).reshape(-1)[select_N].astype(np.float32),
            logprobs_N=cut(self.logprobs_MDRL).reshape(-1)[select_N].astype(np.float32),
            versions_N=cut(self.versions_MDRL).reshape(-1)[select_N].astype(np.int64),
            sequence_weights_N=cut(self.sequence_weights_MDRL).reshape(-1)[select_N].astype(np.float32),
            sequence_N=sequence_N.astype(np.int64),
            num_sequences=int(samples.size),
            teacher=tuple(
                self.teacher.forwards(*here, select_row * seq_len + select_t, trim=trim, multiple=multiple)
            ),
        )


def pack_samples(
    samples: Sequence[TrainingSample],
    *,
    seq_len: int,
    dp_degree: int,
    rows_per_microbatch: int,
    version: int,
    num_rollouts: int | None = None,
    sdpo_scale: float = 1.0,
    pairs: Sequence[TokenPair] = (),
) -> GlobalBatch:
    """Pack samples into rows of `seq_len` and deal the rows to micro-batches and data-parallel ranks.

    Samples longer than `seq_len` are dropped and counted, with their targets; samples with neither a trained
    token nor a target are left out. The result depends on nothing but the arguments. An empty batch has one
    micro-batch of padding.

    Args:
        samples: any number.
        seq_len: length of a row; a sample never spans rows.
        dp_degree: data-parallel ranks.
        rows_per_microbatch: rows that a rank forwards at a time.
        version: policy version that is to be trained.
        num_rollouts: the divisor of the loss in rollouts; None counts those with a trained token in the
            batch, that is after every mask.
        sdpo_scale: see `GlobalBatch`.
        pairs: preference pairs of the step; one with a side that does not fit into a row is dropped and
            counted.
    """
    trainable = [sample for sample in samples if any(sample.action_mask[1:]) or sample.targets]
    kept = [sample for sample in trainable if len(sample) <= seq_len]
    tokens_of = Counter[str]()
    for sample in kept:
        if sample.policy_gradient and any(sample.action_mask[1:]):
            tokens_of[sample.rollout_id] += sum(sample.action_mask[1:])
    rows = pack_lengths([len(sample) for sample in kept], seq_len)
    per_microbatch = dp_degree * rows_per_microbatch
    shape = (max(1, -(-len(rows) // per_microbatch)), dp_degree, rows_per_microbatch, seq_len)
    batch = GlobalBatch(
        token_ids_MDRL=np.zeros(shape, np.int32),
        positions_MDRL=np.zeros(shape, np.int32),
        lengths_MDR=np.zeros(shape[:3], np.int32),
        target_mask_MDRL=np.zeros(shape, np.bool_),
        advantages_MDRL=np.zeros(shape, np.float32),
        logprobs_MDRL=np.zeros(shape, np.float32),
        versions_MDRL=np.full(shape, -1, np.int32),
        sequence_weights_MDRL=np.zeros(shape, np.float32),
        version=version,
        num_rollouts=len(tokens_of) if num_rollouts is None else num_rollouts,
        trained_tokens=tokens_of.total(),
        num_samples=len(kept),
        dropped_samples=len(trainable) - len(kept),
        teacher=TeacherBatch.empty(shape[:2], seq_len=seq_len, rows_per_forward=rows_per_microbatch),
        sdpo_scale=sdpo_scale,
        preferences=PreferenceBatch.pack(
            pairs, seq_len=seq_len, dp_degree=dp_degree, rows_per_forward=rows_per_microbatch
        ),
    )
    for number, row in enumerate(rows):
        # Neighbours have similar lengths: dealt out across ranks first, each micro-batch is even.
        index, place = divmod(number, per_microbatch)
        here = (index, place % dp_degree, place // dp_degree)
        for member in row:
            sample = kept[member]
            _write(batch, here, sample, 1.0 / max(1, tokens_of[sample.rollout_id]))
    left_out = {id(sample) for sample in trainable} - {id(sample) for sample in kept}
    batch.teacher.dropped_targets += sum(len(sample.targets) for sample in samples if id(sample) in left_out)
    batch.teacher.finish()
    return batch


def _write(batch: GlobalBatch, here: tuple[int, int, int], sample: TrainingSample, weight: float) -> None:
    """Append one sample to a row; what is about token t + 1 goes to position t."""
    start = int(batch.lengths_MDR[here])
    stop = start + len(sample)
    batch.token_ids_MDRL[here][start:stop] = sample.token_ids
    batch.positions_MDRL[here][start:stop] = np.arange(len(sample))
    batch.lengths_MDR[here] = stop
    targets = slice(start, stop - 1)
    trained = np.asarray(sample.action_mask[1:], np.bool_) & sample.policy_gradient
    batch.target_mask_MDRL[here][targets] = trained
    batch.advantages_MDRL[here][targets] = sample.advantages[1:]
    batch.logprobs_MDRL[here][targets] = sample.logprobs[1:]
    batch.versions_MDRL[here][targets] = sample.versions[1:]
    batch.sequence_weights_MDRL[here][targets] = np.where(trained, weight, 0.0)
    microbatch, dp_rank, row = here
    offset = row * batch.token_ids_MDRL.shape[-1] + start - 1
    for target in sample.targets:
        context = TeacherContext(
            np.asarray(target.teacher_ids, np.int32),
            np.asarray(target.teacher_positions, np.int64) - 1,
            offset + np.asarray(target.positions, np.int64),
            target.weight,
        )
        batch.teacher.add(microbatch, dp_rank, context)


__all__ = ["GlobalBatch", "Microbatch", "pack_lengths", "pack_samples"]
