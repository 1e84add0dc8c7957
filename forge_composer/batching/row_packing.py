"""Putting sequences of different lengths into rows of one length."""

from __future__ import annotations

from collections.abc import Sequence


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of the sequences in each row, fullest rows first.

    Ties are broken by index, so the result is deterministic. No length may exceed `capacity`.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sequence of {length} tokens does not fit into a row of {capacity}")
        row = next((row for row, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([index])
            room.append(capacity - length)
        else:
            rows[row].append(index)
            room[row] -= length
    order = sorted(range(len(rows)), key=lambda row: (room[row], row))
    return [rows[row] for row in order]
