"""Calls to actors with a deadline, and errors that say what failed."""

from __future__ import annotations

import asyncio
from typing import Any


class ActorCallError(RuntimeError):
    """A call to another process failed: it raised, its process died, or the deadline passed."""


async def _await(future: Any, what: str, timeout: float) -> Any:
    from monarch._rust_bindings.monarch_hyperactor.supervision import (
        SupervisionError,  # exported nowhere else
    )
    from monarch.actor import ActorError

    try:
        # Not `wait_for`: before Python 3.12 it can lose a cancellation that comes with the answer.
        async with asyncio.timeout(timeout):
            return await future.as_asyncio()
    except TimeoutError as error:
        raise ActorCallError(f"{what} did not answer within {timeout:g} s") from error
    except ActorError as error:
        original = getattr(error, "exception", None)
        if isinstance(original, Exception):
            raise original from error
        raise ActorCallError(f"{what} failed: {error}") from error
    except SupervisionError as error:
        raise ActorCallError(f"the process that ran {what} died: {error}") from error


async def call_one(actor: Any, name: str, *args: Any, timeout: float) -> Any:
    """Call an endpoint of a single actor. What it raised is raised here, as it was.

    Raises:
        ActorCallError: no answer in time, or the process died.
    """
    return await _await(getattr(actor, name).call_one(*args), f"{name}()", timeout)


async def call_all(actors: Any, name: str, *args: Any, timeout: float) -> list[Any]:
    """Call an endpoint of every actor of a mesh; the answers in order of rank."""
    values = await _await(getattr(actors, name).call(*args), f"{name}()", timeout)
    return list(values.values())


def each(mesh: Any) -> list[Any]:
    """The members of an actor mesh one by one, in order of rank, whatever its dimensions."""
    sizes: dict[str, int] = dict(mesh.sizes)
    members: list[dict[str, int]] = [{}]
    for dimension, size in sizes.items():
        members = [{**member, dimension: index} for member in members for index in range(size)]
    return [mesh.slice(**member) for member in members]
