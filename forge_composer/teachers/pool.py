"""All teachers of a run, over one HTTP session and one ledger."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

import aiohttp

from forge_composer.config.teachers import TeacherConfig, doubled_names
from forge_composer.teachers.client import TeacherClient, TeacherReply
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.ledger import Ledger
from forge_composer.teachers.limits import Clock
from forge_composer.teachers.requests import TeacherRequest


class TeacherPool:
    """The clients of several teachers.

    Example:
        >>> async with TeacherPool(config.teachers, ledger) as teachers:
        ...     replies = await teachers.ask(TeacherRequest("trace-1", "3", messages, tools))
    """

    def __init__(
        self, configs: Sequence[TeacherConfig], ledger: Ledger, *, clock: Clock | None = None
    ) -> None:
        """See the class; the session is opened by `async with`.

        Raises:
            ValueError: two teachers of one name, which share their answers in the ledger.
        """
        if doubled := doubled_names(configs):
            raise ValueError(f"teachers: more than one is named {doubled[0]!r}; give each its own name")
        self._configs, self._ledger, self._clock = tuple(configs), ledger, clock
        self._session: aiohttp.ClientSession | None = None
        self.clients: tuple[TeacherClient, ...] = ()

    async def ask(self, request: TeacherRequest) -> tuple[TeacherReply, ...]:
        """The replies of all teachers, asked at once, in the order of the config."""
        return tuple(await asyncio.gather(*(client.ask(request) for client in self.clients)))

    def counts(self) -> dict[str, Counter[ReplyKind]]:
        """Replies by teacher and kind."""
        return {client.config.name: client.counts for client in self.clients}

    async def __aenter__(self) -> TeacherPool:
        # Each teacher has its own limit of calls at once.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            self.clients = tuple(
                TeacherClient(config, self._ledger, self._session, clock=self._clock)
                for config in self._configs
            )
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
