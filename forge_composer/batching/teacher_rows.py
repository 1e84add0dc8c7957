"""The contexts that a teacher reads for the targeted turns of a batch, laid out beside the student's rows.

A target's context travels with the micro-batch and the data-parallel rank of the sample that it is about,
so that the two sides of the divergence meet on one rank without communication. A micro-batch in which one
rank has a target runs as many teacher forward passes on all ranks, so that collectives match.

Shape suffixes: M = micro-batches, D = data-parallel ranks, R = rows, L = positions in a row, N = tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forge_composer.batching.row_packing import pack_lengths


@dataclass(slots=True, frozen=True)
class TeacherContext:
    """One target: what the teacher reads, and where its tokens are on both sides.

    `predicts_N[j]` is the position in `token_ids` that predicts the token which the student predicts at
    `student_N[j]`, a flat position of the student's micro-batch (row x seq_len + position).
    """

    token_ids: NDArray[np.int32]
    predicts_N: NDArray[np.int64]
    student_N: NDArray[np.int64]
    weight: float


@dataclass(slots=True, frozen=True)
class TeacherRows:
    """One forward pass of the teacher on one rank.

    `select_N` are flat positions of these rows, at least one; the first `len(student_N)` of them belong to
    targets. `student_N` are indices into the selected positions of the student's micro-batch.
    """

    token_ids_RL: NDArray[np.int64]
    positions_RL: NDArray[np.int64]
    select_N: NDArray[np.int64]
    student_N: NDArray[np.int64]
    weights_N: NDArray[np.float32]


@dataclass(slots=True)
class TeacherBatch:
    """The targets of one global batch."""

    contexts_MD: list[list[list[TeacherContext]]]
    seq_len: int
    rows_per_forward: int
    num_targets: int = 0
    num_tokens: int = 0
    """Distilled tokens of the global batch: the divisor of the channel."""
    dropped_targets: int = 0
    """Targets whose context is longer than a row, or whose sample was left out."""
    _rows_MD: list[list[list[list[int]]]] = field(default_factory=list)

    @classmethod
    def empty(cls, shape_MD: tuple[int, int], *, seq_len: int, rows_per_forward: int) -> TeacherBatch:
        """No target yet, for M micro-batches on D ranks."""
        contexts: list[list[list[TeacherContext]]] = [
            [[] for _ in range(shape_MD[1])] for _ in range(shape_MD[0])
        ]
        return cls(contexts, seq_len, rows_per_forward)

    def add(self, microbatch: int, dp_rank: int, context: TeacherContext) -> None:
        """Place one target with the micro-batch and rank of its sample; too long a context is dropped."""
        if len(context.token_ids) > self.seq_len or not context.predicts_N.size:
            self.dropped_targets += 1
            return
        self.contexts_MD[microbatch][dp_rank].append(context)
        self.num_targets += 1
        self.num_tokens += int(context.predicts_N.size)

    def finish(self) -> None:
        """Pack the contexts into rows; after the last `add`."""
        self._rows_MD = [
            [pack_lengths([len(c.token_ids) for c in contexts], self.seq_len) for contexts in contexts_D]
            for contexts_D in self.contexts_MD
        ]

    def student_positions(self, microbatch: int, dp_rank: int) -> NDArray[np.int64]:
        """Flat positions of the student's micro-batch (row x seq_len + position) that are distilled."""
        contexts = self.contexts_MD[microbatch][dp_rank]
        return np.concatenate([np.zeros(0, np.int64), *(context.student_N for context in contexts)])

    def num_forwards(self, microbatch: int) -> int:
        """Forward passes that every rank runs for a micro-batch; 0 where no rank has a target."""
        return max(-(-len(rows) // self.rows_per_forward) for rows in self._rows_MD[microbatch])

    def forwards(
        self,
        microbatch: int,
        dp_rank: int,
        selected_N: NDArray[np.int64],
        *,
        trim: bool = True,
        multiple: int = 1,
    ) -> Iterator[TeacherRows]:
        """The forward passes of one rank.

        Args:
            microbatch: in [0, M).
            dp_rank: in [0, D).
            selected_N: flat positions (row x seq_len + position) that the student selects, ascending.
            trim: cut off empty rows and what is padding in all rows.
            multiple: the length is rounded up to a multiple of this.
        """
        rows = self._rows_MD[microbatch][dp_rank]
        for number in range(self.num_forwards(microbatch)):
            first = number * self.rows_per_forward
            chosen = rows[first : first + self.rows_per_forward]
            yield self._forward(chosen, self.contexts_MD[microbatch][dp_rank], selected_N, trim, multiple)

    def _forward(
        self,
        rows: list[list[int]],
        contexts: list[TeacherContext],
        selected_N: NDArray[np.int64],
        trim: bool,
        multiple: int,
    ) -> TeacherRows:
        used = max((sum(len(contexts[i].token_ids) for i in row) for row in rows), default=1)
        length = -(-(used if trim else self.seq_len) // multiple) * multiple
        count = max(1, len(rows)) if trim else self.rows_per_forward
        token_ids_RL = np.zeros((count, length), np.int64)
        positions_RL = np.zeros((count, length), np.int64)
        select, student, weights = [], [], []
        for number, row in enumerate(rows):
            start = 0
            for context in (contexts[index] for index in row):
                stop = start + len(context.token_ids)
                token_ids_RL[number, start:stop] = context.token_ids
                positions_RL[number, start:stop] = np.arange(stop - start)
                select.append(number * length + start + context.predicts_N)
                student.append(np.searchsorted(selected_N, context.student_N))
                weights.append(np.full(context.predicts_N.size, context.weight, np.float32))
                start = stop
        return TeacherRows(
            token_ids_RL=token_ids_RL,
            positions_RL=positions_RL,
            select_N=np.concatenate(select) if select else np.zeros(1, np.int64),
            student_N=np.concatenate(student) if student else np.zeros(0, np.int64),
            weights_N=np.concatenate(weights) if weights else np.zeros(0, np.float32),
        )
