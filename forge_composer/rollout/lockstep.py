"""The lockstep gate: what makes the synchronous mode repeatable.

Floating-point sums depend on how a batch is composed, and which requests share an engine step depends
on how fast each environment answered. In synchronous mode every rollout of a round therefore waits
until all of them want their next turn (or have ended), and the turns are admitted as one batch in the
order of their request ids. The price is that a slow environment step holds up the round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forge_composer.services import Generators
from forge_composer.types import Completion, SamplingRequest

Waiting = tuple[SamplingRequest, asyncio.Future[Completion]]
"""A request, and where its completion goes."""


@dataclass(slots=True)
class LockstepGate:
    """A `Sampler` that gathers the requests of all participants into one batch."""

    generators: Generators
    _participants: int = 0
    _waiting: dict[str, Waiting] = field(default_factory=dict)
    _flushes: set[asyncio.Task[None]] = field(default_factory=set)

    def join(self, participants: int) -> None:
        """Announce rollouts before any of them starts; each must `leave` once."""
        self._participants += participants

    def leave(self) -> None:
        """One rollout has ended."""
        self._participants -= 1
        self._flush_if_complete()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Leave at the end of the block, however it ends."""
        try:
            yield
        finally:
            self.leave()

    async def generate(self, request: SamplingRequest) -> Completion:
        """Wait for the other participants' turns, then sample all of them as one batch."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = (request, future)
        self._flush_if_complete()
        return await future

    def _flush_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._participants:
            batch = [self._waiting[key] for key in sorted(self._waiting)]
            self._waiting.clear()
            task = asyncio.get_running_loop().create_task(sample_together(self.generators, batch))
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)


async def sample_together(generators: Generators, batch: Sequence[Waiting]) -> None:
    """Sample requests as one batch and hand each its completion, or all of them the error."""
    try:
        completions = await generators.generate_batch([request for request, _ in batch])
    except BaseException as error:
        for _, future in batch:
            if not future.done():
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        if not isinstance(error, Exception):
            raise
        return
    for (_, future), completion in zip(batch, completions, strict=True):
        if not future.done():
            future.set_result(completion)
