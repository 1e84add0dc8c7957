"""A chat-completions endpoint over real HTTP whose answers a test scripts, and a clock that does not wait."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

from forge_composer.config.teachers import TeacherConfig
from forge_composer.teachers.limits import Clock
from forge_composer.teachers.requests import TeacherRequest

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "write_body",
            "parameters": {
                "type": "object",
                "properties": {"body": {"type": "string"}},
                "required": ["body"],
            },
        },
    },
]
PRICE = {"input": 0.0, "output": 10.0}
"""With `max_tokens` 1000 the bound of a call is 0.01 USD."""
USAGE = {"prompt_tokens": 100, "completion_tokens": 500}
"""0.005 USD by that table."""

Script = Callable[[str, int], Any]
"""From the question and how often it was asked before to JSON, a response, or a word: see `_answer`."""


def completion(
    *calls: tuple[str, Any],
    content: Any = None,
    finish: Any = "tool_calls",
    usage: Any = USAGE,
    **message: Any,
) -> dict[str, Any]:
    """A chat completion; arguments that are no string are written as JSON."""
    said: dict[str, Any] = {"role": "assistant", "content": content} | message
    if calls:
        said["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)},
            }
            for index, (name, args) in enumerate(calls)
        ]
    return {"choices": [{"index": 0, "message": said, "finish_reason": finish}], "usage": usage}


READ = completion(("read", {}))


def ask(question: str, trace: str = "trace", **more: Any) -> TeacherRequest:
    messages: Any = [{"role": "user", "content": question}]
    return TeacherRequest(trace, question, messages, TOOLS, **more)


def teacher(url: str, **fields: Any) -> TeacherConfig:
    """A teacher that retries at once and is benched late."""
    base: dict[str, Any] = {
        "name": "t",
        "model": "lab/m",
        "base_url": url,
        "price": PRICE,
        "sampling": {"max_tokens": 1000},
        "retry": {"attempts": 6, "backoff_s": 0.001},
        "breaker": {"failures": 1000},
        "timeout_s": 20.0,
        "concurrency": 64,
    }
    return TeacherConfig.model_validate(base | fields)


class FakeClock(Clock):
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Endpoint:
    """The server. `seen` counts requests by question, `answered` whole answers of status 200."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.peak = 0
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        assert self._runner is not None
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aenter__(self) -> Endpoint:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def until_in_flight(self, requests: int) -> None:
        """Wait until so many requests are unanswered."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.in_flight >= requests)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        question = body["messages"][-1]["content"]
        count = self.seen[question]
        self.seen[question] += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        async with self._changed:
            self._changed.notify_all()
        try:
            return await self._answer(request, question, self.script(question, count))
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, question: str, what: Any) -> web.StreamResponse:
        if isinstance(what, web.Response):
            return what
        if what == "hang":
            await asyncio.sleep(60)
        if what in ("hang", "drop"):
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if what == "slow":
            await asyncio.sleep(0.02)
            what = READ
        text = json.dumps(READ if what in ("cut", "half") else what)
        if what == "half":
            text = text[: len(text) // 2]
        if what == "cut":  # the connection ends before the announced length
            response = web.StreamResponse(headers={"Content-Length": str(len(text))})
            await response.prepare(request)
            await response.write(text[: len(text) // 2].encode())
            assert request.transport is not None
            request.transport.close()
            return response
        self.answered[question] += 1
        return web.Response(text=text, content_type="application/json")


def file_bytes(ledger: Path) -> bytes:
    """Everything on disk that belongs to a ledger."""
    return b"".join(path.read_bytes() for path in sorted(ledger.parent.glob(ledger.name + "*")))
