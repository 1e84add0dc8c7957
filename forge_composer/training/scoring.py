"""Laying out sequences that are to be scored: rows, forward passes and data-parallel ranks.

Shape suffixes: R = rows, L = positions in a row, N = scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_composer.batching.packing import pack_lengths
from forge_composer.types import ScoreRequest


@dataclass(slots=True, frozen=True)
class ScoreBatch:
    """One forward pass of one rank. `slots_N` says where each score goes among all scores.

    A pass without any sequence has one selected position (to run the same collectives) and no slot.
    """

    token_ids_RL: NDArray[np.int64]
    positions_RL: NDArray[np.int64]
    select_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    temperatures_N: NDArray[np.float32]
    slots_N: NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class ScorePlan:
    """Rows of sequences, in the order in which they are dealt to forward passes and ranks."""

    sequences: Sequence[ScoreRequest]
    offsets: NDArray[np.int64]
    """First slot of each sequence's scores; the last entry is their total."""
    rows: list[list[int]]
    dp_degree: int
    rows_per_forward: int
    multiple: int

    @property
    def total(self) -> int:
        """Number of scores of all sequences."""
        return int(self.offsets[-1])

    def forwards(self, dp_rank: int) -> Iterator[ScoreBatch]:
        """The forward passes of one rank: as many on every rank."""
        per_pass = self.dp_degree * self.rows_per_forward
        for start in range(0, len(self.rows), per_pass):
            yield self._batch(self.rows[start + dp_rank : start + per_pass : self.dp_degree])

    def _batch(self, rows: list[list[int]]) -> ScoreBatch:
        used = [sum(len(self.sequences[member].token_ids) for member in row) for row in rows]
        length = -(-max(used, default=1) // self.multiple) * self.multiple
        token_ids_RL = np.zeros((max(1, len(rows)), length), np.int64)
        positions_RL = np.zeros_like(token_ids_RL)
        select, slots, temperatures = [], [], []
        for number, row in enumerate(rows):
            start = 0
            for member in row:
                ids = self.sequences[member].token_ids
                token_ids_RL[number, start : start + len(ids)] = ids
                positions_RL[number, start : start + len(ids)] = np.arange(len(ids))
                select.append(number * length + start + np.arange(len(ids) - 1))
                slots.append(self.offsets[member] + np.arange(len(ids) - 1))
                temperatures.append(np.full(len(ids) - 1, self.sequences[member].temperature, np.float32))
                start += len(ids)
        nothing = np.zeros(0, np.int64)
        select_N = np.concatenate([nothing, *select])
        temperatures_N = np.concatenate([nothing.astype(np.float32), *temperatures])
        if not select_N.size:
            select_N, temperatures_N = np.zeros(1, np.int64), np.ones(1, np.float32)
        flat_ids = token_ids_RL.reshape(-1)
        return ScoreBatch(
            token_ids_RL=token_ids_RL,
            positions_RL=positions_RL,
            select_N=select_N,
            targets_N=flat_ids[np.minimum(select_N + 1, flat_ids.size - 1)],
            temperatures_N=temperatures_N,
            slots_N=np.concatenate([nothing, *slots]),
        )

    def split(self, scores: Sequence[float]) -> list[list[float]]:
        """All scores, by sequence."""
        return [
            list(scores[start:stop]) for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True)
        ]


def plan_scores(
    sequences: Sequence[ScoreRequest],
    *,
    row_length: int,
    most_positions: int,
    dp_degree: int,
    rows_per_forward: int,
    multiple: int,
) -> ScorePlan:
    """Pack sequences into rows of `row_length` (longer if one sequence needs it).

    Sequences of fewer than two tokens have no scores.

    Raises:
        ValueError: a sequence is longer than `most_positions`.
    """
    lengths = [len(sequence.token_ids) for sequence in sequences]
    longest = max(lengths, default=0)
    if longest > most_positions:
        raise ValueError(
            f"a sequence to score has {longest} tokens, the model has {most_positions} positions "
            "(max_position_embeddings in its config.json)"
        )
    scored = [index for index, length in enumerate(lengths) if length > 1]
    rows = pack_lengths([lengths[index] for index in scored], max(row_length, longest))
    return ScorePlan(
        sequences=sequences,
        offsets=np.cumsum([0, *(max(0, length - 1) for length in lengths)]),
        rows=[[scored[member] for member in row] for row in rows],
        dp_degree=dp_degree,
        rows_per_forward=rows_per_forward,
        multiple=multiple,
    )
