"""Task order: which task the n-th group of a run gets."""

from __future__ import annotations

import random


class TaskOrder:
    """Shuffled epochs over `size` tasks; the n-th draw depends on `seed` and n alone."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, draw: int) -> int:
        """Task index of the given draw (0, 1, ...)."""
        epoch, place = divmod(draw, self.size)
        if epoch != self._epoch:
            self._order = list(range(self.size))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]
