"""Episodes over OpenEnv's WebSocket client: one session, and a pool of them.

What OpenEnv does quietly is made loud here: after a time-out or a server restart its client opens a fresh
environment that nobody has reset, so every answer is checked for the episode's id, and an episode whose
connection was lost is void (`EpisodeStep.error`, reward None) and its session is not used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

from openenv.core import GenericEnvClient
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)
from websockets.exceptions import WebSocketException

from forge_composer.config.schema import EnvironmentConfig
from forge_composer.envs.adapters import (
    ActionRefusedError,
    Adapter,
    FeatureDeletionAdapter,
    GenericAdapter,
    fetch_action_schema,
)
from forge_composer.types import EpisodeStart, EpisodeStep, ParsedAction

OURS = "feature_deletion"
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for a connection to close."""


class SessionError(RuntimeError):
    """An episode could not be started, or there is none by that name."""


class _RetryLaterError(SessionError):
    """The server is full or away for a moment."""


class EnvironmentSession:
    """One connection to an OpenEnv server, which runs one episode after the other."""

    def __init__(self, url: str, *, action_schema: dict[str, Any] | None, timeout_s: float) -> None:
        """See the class.

        Args:
            url: base URL of the server.
            action_schema: the environment's action schema; None for `feature_deletion`.
            timeout_s: longest wait for one answer, and for a place on a full server.
        """
        self.url = url
        self.timeout_s = timeout_s
        self._action_schema = action_schema
        self._client = self._new_client()
        self._adapter: Adapter | None = None
        self._episode_id: str | None = None
        self._busy = False
        self._broken = False

    @property
    def reusable(self) -> bool:
        """True if nothing is in flight and no answer was lost."""
        return not (self._busy or self._broken)

    async def reset(
        self,
        *,
        index: int | None = None,
        task_id: str | None = None,
        split: str = "train",
        seed: int = 0,
        episode_id: str | None = None,
    ) -> EpisodeStart:
        """Start an episode; a full or restarting server is tried again for `timeout_s` seconds.

        Raises:
            SessionError: the server refused (no such task, ...) or stayed full or away.
        """
        wanted = {"index": index, "task_id": task_id, "split": split, "seed": seed}
        arguments = {name: value for name, value in wanted.items() if value is not None}
        arguments["episode_id"] = episode_id or uuid.uuid4().hex
        self._busy = True
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(_RetryLaterError),
                wait=wait_random_exponential(multiplier=0.1, max=2.0),
                stop=stop_after_delay(self.timeout_s),
                reraise=True,
            ):
                with attempt:
                    result = await self._reset_once(arguments)
        except BaseException:
            self._broken = True
            raise
        finally:
            self._busy = False
        self._broken = False
        schema = self._action_schema
        self._adapter = FeatureDeletionAdapter() if schema is None else GenericAdapter(schema)
        return self._adapter.start(result, str(arguments["episode_id"]))

    async def _reset_once(self, arguments: dict[str, Any]) -> Any:
        try:
            result = await self._client.reset(**arguments)
            self._episode_id = await self._current_episode(result)
            return result
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise SessionError(f"{self.url} refused the reset: {error}") from error
            await self._renew()
            raise _RetryLaterError(f"{self.url} has no free session: {error}") from error
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            await self._renew()
            raise _RetryLaterError(f"{self.url} does not answer: {_words(error)}") from error

    async def step(self, action: ParsedAction, *, finish: bool = False) -> EpisodeStep:
        """Carry out one assistant turn; `finish` grades the episode after it. Never raises for a failure.

        A time-out, a lost connection or a fault of the environment gives a step with `error` and `done`.
        """
        if self._adapter is None or self._broken or self._busy:
            return _void("no episode is open in this session")
        self._busy = True
        try:
            step = await self._adapter.turn(self, action, finish=finish)
        except TimeoutError:
            self._broken = True
            return _void(f"no answer within environment.step_timeout_s = {self.timeout_s:g} s")
        except Exception as error:  # whatever OpenEnv or the network raises voids the episode
            self._broken = True
            return _void(_words(error))
        except BaseException:  # cancelled: the answer is lost
            self._broken = True
            raise
        finally:
            self._busy = False
        if step.done:
            self._adapter = None
        return step

    async def finish(self) -> EpisodeStep:
        """Grade the episode as it stands."""
        return await self.step(ParsedAction(text=""), finish=True)

    async def act(self, action: dict[str, Any]) -> Any:
        """Send one action of the open episode (adapters' `Transport`).

        Raises:
            ActionRefusedError: the action does not fit the schema.
            SessionError: the answer comes from another episode: the connection was lost in between.
        """
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise ActionRefusedError(str(error)) from error
            raise
        current = await self._current_episode(result)
        if current != self._episode_id:
            raise SessionError("the connection was lost and the server opened a fresh environment")
        return result

    async def _current_episode(self, result: Any) -> str | None:
        """The episode that an answer belongs to: our environment says it, others are asked."""
        if self._action_schema is None:
            stated = (result.metadata or {}).get("episode_id")
            return None if stated is None else str(stated)
        state = await self._client.state()
        return None if state.get("episode_id") is None else str(state["episode_id"])

    async def close(self) -> None:
        """Close the connection; an answer in flight is lost."""
        self._broken = True
        self._adapter = None
        with contextlib.suppress(Exception):  # it may be gone already
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.close()

    async def _renew(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.close()
        self._client = self._new_client()

    def _new_client(self) -> Any:
        # No keep-alive pings: a busy event loop would miss them; a dead server shows as a time-out.
        return GenericEnvClient(
            base_url=self.url,
            message_timeout_s=self.timeout_s,
            connect_timeout_s=min(10.0, self.timeout_s),
            websocket_ping_interval_s=None,
        )


class SessionPool:
    """At most `sessions_per_worker` sessions, handed out to rollouts and used again.

    For one event loop. An episode is known by its rollout's id, from `start` to `end`.
    """

    def __init__(self, url: str, config: EnvironmentConfig) -> None:
        self.url = url
        self.config = config
        self._places = asyncio.Semaphore(config.sessions_per_worker)
        self._idle: list[EnvironmentSession] = []
        self._active: dict[str, EnvironmentSession] = {}
        self._starting: dict[str, asyncio.Task[EpisodeStart]] = {}
        self._schema: dict[str, Any] | None = None
        self._schema_lock = asyncio.Lock()
        self._closed = False

    @property
    def open_sessions(self) -> int:
        """Sessions connected now, in use or not."""
        return len(self._active) + len(self._idle)

    async def start(self, rollout_id: str, *, index: int, split: str, seed: int) -> EpisodeStart:
        """Open an episode on task `index` of `split`; waits while all sessions are in use.

        Raises:
            SessionError: the episode could not be started, was ended meanwhile, or its id is in use.
        """
        if self._closed:
            raise SessionError("the session pool is closed")
        if rollout_id in self._active or rollout_id in self._starting:
            raise SessionError(f"rollout {rollout_id!r} has an episode already")
        opening = asyncio.create_task(self._open(rollout_id, index, split, seed))
        self._starting[rollout_id] = opening
        try:
            await asyncio.wait([opening])
        except asyncio.CancelledError:
            opening.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await opening
            await self.end(rollout_id)  # it may have opened just now
            raise
        finally:
            self._starting.pop(rollout_id, None)
        if opening.cancelled() or opening.cancelling():
            raise SessionError(f"rollout {rollout_id!r} was ended while its episode started")
        return opening.result()

    async def _open(self, rollout_id: str, index: int, split: str, seed: int) -> EpisodeStart:
        await self._places.acquire()
        session: EnvironmentSession | None = None
        try:
            session = self._idle.pop() if self._idle else await self._new_session()
            start = await session.reset(index=index, split=split, seed=seed, episode_id=rollout_id)
        except BaseException:
            self._places.release()
            if session is not None:
                await session.close()
            raise
        self._active[rollout_id] = session
        return start

    async def step(self, rollout_id: str, action: ParsedAction, finish: bool = False) -> EpisodeStep:
        """Carry out one assistant turn; `finish` grades the episode after it.

        Raises:
            SessionError: the rollout has no open episode.
        """
        session = self._active.get(rollout_id)
        if session is None:
            raise SessionError(f"rollout {rollout_id!r} has no open episode")
        return await session.step(action, finish=finish)

    async def end(self, rollout_id: str) -> None:
        """Give the session back; a broken or busy one is closed. Unknown rollouts are ignored."""
        opening = self._starting.get(rollout_id)
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait([opening])  # it may open all the same: a client can lose a cancellation
        session = self._active.pop(rollout_id, None)
        if session is None:
            return
        try:
            if session.reusable and not self._closed:
                self._idle.append(session)
            else:
                await session.close()
        finally:
            self._places.release()

    async def close(self) -> None:
        """Close all sessions; nothing can be started any more."""
        self._closed = True
        for opening in list(self._starting.values()):
            opening.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        sessions = [*self._active.values(), *self._idle]
        self._active.clear()
        self._idle.clear()
        await asyncio.gather(*(session.close() for session in sessions))

    async def _new_session(self) -> EnvironmentSession:
        timeout_s = self.config.step_timeout_s
        if self.config.name != OURS:
            async with self._schema_lock:
                if self._schema is None:
                    try:
                        self._schema = await fetch_action_schema(self.url, timeout_s)
                    except (OSError, ValueError, KeyError) as error:
                        raise SessionError(f"{self.url}/schema: {_words(error)}") from error
        return EnvironmentSession(self.url, action_schema=self._schema, timeout_s=timeout_s)


def _void(reason: str) -> EpisodeStep:
    return EpisodeStep(observations=[], reward=None, done=True, error=reason)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
