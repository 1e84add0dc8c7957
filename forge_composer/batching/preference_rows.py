"""Preference pairs laid out for the forward passes of all data-parallel ranks.

The two sides of a pair are sequences of their own, context + side. The loss couples them, so they share a
forward pass of one rank; every rank runs as many passes, so that collectives match.

Shape suffixes: R = rows, L = positions in a row, N = tokens of sides, P = pairs of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, frozen=True)
class TokenPair:
    """A pair as the trainer sees it.

    Attributes:
        context_ids: what both sides follow; at least one token.
        chosen_ids: the better continuation, at least one token.
        rejected_ids: the worse one, at least one token.
        weight: of the pair in the loss.
        reference_chosen: log-probability of the chosen side under the reference, summed over its tokens,
            nats; None where the trainer computes it.
        reference_rejected: of the rejected one.
        temperature: that the sides were sampled at and are scored at.

    Raises:
        ValueError: the context or a side is empty.
    """

    context_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    weight: float = 1.0
    reference_chosen: float | None = None
    reference_rejected: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not (self.context_ids and self.chosen_ids and self.rejected_ids):
            raise ValueError(
                f"a pair needs a context and two sides, got {len(self.context_ids)}, {len(self.chosen_ids)} "
                f"and {len(self.rejected_ids)} tokens"
            )

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Chosen and rejected."""
        return self.chosen_ids, self.rejected_ids

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of both sequences, the context included."""
        context = len(self.context_ids)
        return context + len(self.chosen_ids), context + len(self.rejected_ids)

    @property
    def has_reference(self) -> bool:
        """Whether the pair brings both reference values."""
        return self.reference_chosen is not None and self.reference_rejected is not None


@dataclass(slots=True, frozen=True)
class PreferenceRows:
    """One forward pass of one rank.

    `select_N` are the flat positions (row x length + t) whose next token, `targets_N`, belongs to a side;
    `sequence_N` is the side: 2 x pair for the chosen one, 2 x pair + 1 for the rejected one. A pass without a
    pair has one position that is outside `mask_N`, of one pair that is outside `mask_P`.
    """

    token_ids_RL: NDArray[np.int64]
    positions_RL: NDArray[np.int64]
    select_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    sequence_N: NDArray[np.int64]
    temperatures_N: NDArray[np.float32]
    mask_N: NDArray[np.bool_]
    mask_P: NDArray[np.bool_]
    weights_P: NDArray[np.float64]
    references_2P: NDArray[np.float64]
    """Summed log-probabilities of the chosen and the rejected sides under the reference, nats; NaN where a
    pair brings none."""
    lengths_2P: NDArray[np.int64]
    """Tokens of the sides, at least 1."""


@dataclass(slots=True)
class _Pass:
    """One forward pass while it fills up: the sequences of each row, as (pair, side)."""

    rows: list[list[tuple[int, int]]] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    tokens: int = 0


@dataclass(slots=True)
class PreferenceBatch:
    """The pairs of one global batch."""

    pairs: tuple[TokenPair, ...] = ()
    """Those that fit into a row; `num_pairs` is the divisor of the channel."""
    dropped_pairs: int = 0
    """Pairs with a side that, with its context, is longer than a row."""
    seq_len: int = 1
    rows_per_forward: int = 1
    _passes_FD: list[list[_Pass]] = field(default_factory=list)

    @classmethod
    def pack(
        cls, pairs: Sequence[TokenPair], *, seq_len: int, dp_degree: int, rows_per_forward: int
    ) -> PreferenceBatch:
        """Deal pairs out to the fewest forward passes that this fills, evenly over passes and ranks.

        The longest pair comes first, each to the pass with the fewest tokens that has room for it. With one
        row to a pass, a pair whose sides do not share a row gets a pass of two rows. The result depends on
        nothing but the arguments.
        """
        kept = tuple(pair for pair in pairs if max(pair.lengths) <= seq_len)
        batch = cls(kept, len(pairs) - len(kept), seq_len, rows_per_forward)
        if kept:
            order = sorted(range(len(kept)), key=lambda index: (-sum(kept[index].lengths), index))
            tokens = sum(sum(pair.lengths) for pair in kept)
            count = -(-tokens // (seq_len * max(2, rows_per_forward) * dp_degree))
            while not batch._deal(order, count, dp_degree):
                count += 1
        return batch

    def _deal(self, order: Sequence[int], count: int, dp_degree: int) -> bool:
        """Fill `count` passes on every rank; False if a pair is left over. One pass a pair always does."""
        passes = [_Pass() for _ in range(count * dp_degree)]
        for pair in order:
            by_load = sorted(passes, key=lambda one: one.tokens)
            if not any(self._place(one, pair) for one in by_load):
                return False
        self._passes_FD = [passes[first : first + dp_degree] for first in range(0, len(passes), dp_degree)]
        return True

    def _place(self, into: _Pass, pair: int) -> bool:
        """Put both sides into a pass, the longer one first; False, and nothing changed, without room."""
        most_rows = max(self.rows_per_forward, 1 if into.rows else 2)
        lengths = self.pairs[pair].lengths
        room, places = list(into.room), {}
        for side in sorted((0, 1), key=lambda side: -lengths[side]):
            row = next((row for row, free in enumerate(room) if free >= lengths[side]), len(room))
            if row == len(room):
                if row >= most_rows:
                    return False
                room.append(self.seq_len)
            room[row] -= lengths[side]
            places[side] = row
        into.rows += [[] for _ in range(len(room) - len(into.rows))]
        for side, row in places.items():
            into.rows[row].append((pair, side))
        into.room, into.tokens = room, into.tokens + sum(lengths)
        return True

    @property
    def num_pairs(self) -> int:
        """Pairs of the global batch: the divisor of the channel."""
        return len(self.pairs)

    @property
    def num_forwards(self) -> int:
        """Forward passes that every rank runs; 0 without a pair."""
        return len(self._passes_FD)

    @property
    def num_tokens(self) -> int:
        """Tokens in the rows, without padding."""
        return sum(sum(pair.lengths) for pair in self.pairs)

    @property
    def num_side_tokens(self) -> int:
        """Tokens of the sides, which the loss is about."""
        return sum(len(side) for pair in self.pairs for side in pair.sides)

    def forwards(self, dp_rank: int, *, trim: bool = True, multiple: int = 1) -> Iterator[PreferenceRows]:
        """The forward passes of one rank, as many on every rank.

        Args:
            dp_rank: in [0, D).
            trim: cut off empty rows and what is padding in all rows.
            multiple: the length is rounded up to a multiple of this.
        """
        for passes_D in self._passes_FD:
            rows = passes_D[dp_rank].rows
            used = max((sum(self._length(*member) for member in row) for row in rows), default=1)
            length = -(-(used if trim else self.seq_len) // multiple) * multiple
            count = max(1, len(rows)) if trim else max(self.rows_per_forward, len(rows))
            yield self._forward(rows, count, length)

    def _length(self, pair: int, side: int) -> int:
        return self.pairs[pair].lengths[side]

    def _forward(self, rows: list[list[tuple[int, int]]], count: int, length: int) -> PreferenceRows:
        numbers = sorted({pair for row in rows for pair, _ in row})
        token_ids_RL = np.zeros((count, length), np.int64)
        positions_RL = np.zeros((count, length), np.int64)
        select, sequence, temperatures = [], [], []
        for number, row in enumerate(rows):
            start = 0
            for index, side in row:
                pair = self.pairs[index]
                ids = pair.context_ids + pair.sides[side]
                stop = start + len(ids)
                token_ids_RL[number, start:stop] = ids
                positions_RL[number, start:stop] = np.arange(len(ids))
                tokens = len(pair.sides[side])
                select.append(number * length + np.arange(stop - tokens - 1, stop - 1))
                sequence.append(np.full(tokens, 2 * numbers.index(index) + side))
                temperatures.append(np.full(tokens, pair.temperature, np.float32))
                start = stop
        select_N = np.concatenate(select) if select else np.zeros(1, np.int64)
        flat_ids = token_ids_RL.reshape(-1)
        chosen = [self.pairs[index] for index in numbers]
        return PreferenceRows(
            token_ids_RL=token_ids_RL,
            positions_RL=positions_RL,
            select_N=select_N.astype(np.int64),
            targets_N=flat_ids[np.minimum(select_N + 1, flat_ids.size - 1)],
            sequence_N=(np.concatenate(sequence) if sequence else np.zeros(1)).astype(np.int64),
            temperatures_N=np.concatenate(temperatures) if temperatures else np.ones(1, np.float32),
            mask_N=np.full(select_N.size, bool(rows)),
            mask_P=np.full(max(1, len(chosen)), bool(rows)),
            weights_P=np.array([pair.weight for pair in chosen] or [0.0]),
            references_2P=np.array([_references(pair) for pair in chosen] or [(0.0, 0.0)]).T.copy(),
            lengths_2P=np.array([[len(side) for side in pair.sides] for pair in chosen] or [[1, 1]]).T.copy(),
        )


def _references(pair: TokenPair) -> tuple[float, float]:
    chosen, rejected = pair.reference_chosen, pair.reference_rejected
    return (np.nan if chosen is None else chosen, np.nan if rejected is None else rejected)
