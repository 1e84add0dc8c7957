"""One HTTP request to an endpoint, and every way in which it can go wrong on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from forge_composer.teachers.kinds import ReplyKind

_MOST_BYTES = 8 << 20
"""Longest body that is read."""
_MOST_CONNECT_S = 30.0


class _TooLargeError(Exception):
    pass


@dataclass(slots=True, frozen=True)
class Received:
    """What came back. `fault` is set where there is no whole body; `reached` is False where the endpoint
    cannot have seen the request."""

    fault: ReplyKind | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reached: bool = True

    @property
    def is_success(self) -> bool:
        """True for a whole body with a status of success."""
        return self.fault is None and self.status is not None and 200 <= self.status < 300


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
) -> Received:
    """Send JSON and read the whole answer. Raises nothing that the network does.

    Redirects are not followed: a key goes to the configured address and nowhere else.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, _MOST_CONNECT_S))
    status: int | None = None
    try:
        async with session.post(
            url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            status = response.status
            text = await _read(response)
            return Received(status=status, headers=response.headers, body=text)
    except _TooLargeError:
        return Received(ReplyKind.TOO_LARGE, status)
    except aiohttp.ClientPayloadError:
        return Received(ReplyKind.TRUNCATED, status)
    except aiohttp.ConnectionTimeoutError:
        return Received(ReplyKind.TIMEOUT, reached=False)
    except TimeoutError:
        return Received(ReplyKind.TIMEOUT, status)
    except aiohttp.ClientConnectorError:
        return Received(ReplyKind.CONNECTION, reached=False)
    except (aiohttp.ClientError, OSError):
        return Received(ReplyKind.CONNECTION, status)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > _MOST_BYTES:
            raise _TooLargeError
        chunks.append(chunk)
    return b"".join(chunks)
