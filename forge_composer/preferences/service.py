"""What the teacher-replay process runs: the clients of all teachers, and the run's ledger."""

from __future__ import annotations

from contextlib import AsyncExitStack

from forge_composer.config.schema import Config
from forge_composer.preferences.replay import ReplayedStep, StepReplayer
from forge_composer.preferences.steps import StepState
from forge_composer.teachers.kinds import NOT_SENT, ReplyKind
from forge_composer.teachers.ledger import Ledger
from forge_composer.teachers.opened import open_teachers


class ReplayService:
    """Asks the teachers of one run: a `TeacherReplay` (`forge_composer.services`). For one event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._stack = AsyncExitStack()
        self._ledger: Ledger | None = None
        self._replayer: StepReplayer | None = None

    async def start(self) -> None:
        """Open the ledger and the clients.

        Raises:
            BlockingIOError: another process has the ledger.
            ValueError: a key is not in the environment, or two teachers have one name.
        """
        config = self.config
        opening = open_teachers(
            config.output_dir, config.teachers, config.local_teachers, config.replay.budget
        )
        pool, self._ledger = await self._stack.enter_async_context(opening)
        self._replayer = StepReplayer(pool, config.replay)

    async def replay(self, state: StepState) -> ReplayedStep:
        """Ask every teacher about one step.

        Raises:
            RuntimeError: the service is not started.
        """
        if self._replayer is None:
            raise RuntimeError("the replay service is not started")
        return await self._replayer.replay(state)

    async def totals(self) -> dict[str, float]:
        """Of this start: `replies`, how many were `cached`, `not_sent` or `errors`; of all starts of the run:
        `cost_usd`."""
        assert self._replayer is not None
        assert self._ledger is not None
        kinds = self._replayer.counts
        not_sent = sum(kinds[kind] for kind in NOT_SENT)
        return {
            "replies": float(kinds.total()),
            "cached": float(sum(client.cached for client in self._replayer.pool.clients)),
            "not_sent": float(not_sent),
            "errors": float(kinds.total() - not_sent - kinds[ReplyKind.OK]),
            "cost_usd": self._ledger.spend().spent_usd,
        }

    async def stop(self) -> None:
        """Close clients and ledger."""
        self._replayer = None
        await self._stack.aclose()
