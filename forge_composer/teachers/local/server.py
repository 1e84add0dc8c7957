"""The local teacher server: chat completions in the OpenAI shape, over real HTTP on this machine.

    async with TeacherServer(TeacherServerConfig(seed=1)) as server:
        ...  # POST {server.url}/chat/completions

Routes: `POST /v1/chat/completions`, `GET /v1/models`, `GET /health`, `GET /stats`. An answer depends on the
seed, the model and the request alone; its latency and its faults also on how often this request was made, so
that a request that met a fault can be sent again. Streaming is not offered.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
import time
from collections import Counter, defaultdict
from types import TracebackType
from typing import Any

from aiohttp import web

from forge_composer.teachers.local import replies, scripted, tasks
from forge_composer.teachers.local.settings import FaultRates, ScriptedTeacher, TeacherServerConfig
from forge_composer.types import ParsedAction

MOST_CHOICES = 64
"""Most samples (`n`) of one request."""
_MOST_BYTES = 32 * 2**20


class _RequestError(ValueError):
    """The request is wrong; status and message go back to the client."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class TeacherServer:
    """Serves scripted teachers until it is stopped. For one event loop.

    Attributes:
        counts: requests by (model, outcome); an outcome is `ok`, a fault's name, or `gone` where the client
            left before the answer.
        billed_usd: what was charged, by model. A fault that gives no completion costs nothing.
        peak: most requests that were in flight at once.
    """

    def __init__(
        self,
        config: TeacherServerConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ) -> None:
        """See the class.

        Args:
            config: teachers, faults, seed.
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            api_key: requests must carry it as a bearer token; None accepts any.
        """
        self.config = config or TeacherServerConfig()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.billed_usd: defaultdict[str, float] = defaultdict(float)
        self.peak = 0
        self._host, self._port, self._api_key = host, port, api_key
        self._teachers = {teacher.name: teacher for teacher in self.config.teachers}
        self._seen: Counter[str] = Counter()
        self._in_flight = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL for clients, `http://127.0.0.1:PORT/v1`.

        Raises:
            RuntimeError: the server is not started.
        """
        if self._runner is None or not self._runner.addresses:
            raise RuntimeError("the teacher server is not started")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        tasks.warm()
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/stats", self._stats)
        # Without the cancellation a client that gave up would keep its hanging request alive.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Close all connections; requests in flight get no answer. May be called again."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def __aenter__(self) -> TeacherServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def stats(self) -> dict[str, Any]:
        """Counts and money so far, as `GET /stats` gives them."""
        outcomes: dict[str, dict[str, int]] = {name: {} for name in self._teachers}
        for (model, outcome), count in sorted(self.counts.items()):
            outcomes[model][outcome] = count
        return {
            "requests": self.counts.total(),
            "outcomes": outcomes,
            "billed_usd": {name: round(self.billed_usd[name], 9) for name in self._teachers},
            "peak_in_flight": self.peak,
        }

    # -- routes ---------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response(self.stats())

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._authorize(request)
        except _RequestError as error:
            return _refused(error)
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": teacher.family}
            for name, teacher in self._teachers.items()
        ]
        return web.json_response({"object": "list", "data": models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            self._authorize(request)
            body = await _read_body(request)
            teacher = self._teacher(body)
        except _RequestError as error:
            return _refused(error)
        began = time.perf_counter()
        self._in_flight += 1
        self.peak = max(self.peak, self._in_flight)
        try:
            return await self._answer(request, teacher, body, began)
        finally:
            self._in_flight -= 1

    async def _answer(
        self, request: web.Request, teacher: ScriptedTeacher, body: dict[str, Any], began: float
    ) -> web.StreamResponse:
        digest = _digest(body)
        self._seen[digest] += 1
        rng = random.Random(f"serve/{self.config.seed}/{digest}/{self._seen[digest]}")
        latency = replies.draw_latency(teacher, rng)
        rates = self.config.faults.rates(teacher.name)
        fault = replies.draw_fault(rates, rng)
        if fault in ("rate_limit", "server_error", "hang", "disconnect"):
            return await self._fail(request, teacher, fault, rates)
        reply = self._reply(teacher, body, digest)
        try:
            await asyncio.sleep(latency * self.config.latency_scale - (time.perf_counter() - began))
        except asyncio.CancelledError:
            self.counts[teacher.name, "gone"] += 1
            raise
        self.counts[teacher.name, fault or "ok"] += 1
        self.billed_usd[teacher.name] += self._price(teacher, reply["usage"])
        if fault in replies.SPOILED:
            reply = replies.spoil(reply, fault, rng)
        text = json.dumps(reply)
        if fault == "truncated":
            text = text[: len(text) // 2]
        return web.Response(text=text, content_type="application/json")

    def _reply(self, teacher: ScriptedTeacher, body: dict[str, Any], digest: str) -> dict[str, Any]:
        wanted = "" if body.get("seed") is None else str(body["seed"])
        samples = [wanted if index == 0 else f"{wanted}#{index}" for index in range(body["n"])]
        actions: list[ParsedAction] = [
            scripted.answer(teacher, body["messages"], body["tools"], seed=self.config.seed, sample=sample)
            for sample in samples
        ]
        characters = len(json.dumps([body["messages"], body["tools"]]))
        return replies.completion(
            teacher,
            actions,
            reply_id=digest[:24],
            prompt_characters=characters,
            report_cost=self.config.report_cost,
        )

    async def _fail(
        self, request: web.Request, teacher: ScriptedTeacher, fault: str, rates: FaultRates
    ) -> web.StreamResponse:
        """A fault without a completion. Counted before it is shown: a client leaves a hanging request."""
        self.counts[teacher.name, fault] += 1
        if fault == "rate_limit":
            headers = {"Retry-After": f"{rates.retry_after_s:g}"}
            return web.json_response(
                _error("too many requests", "rate_limit_exceeded"), status=429, headers=headers
            )
        if fault == "server_error":
            return web.json_response(_error("the server had an error", "server_error"), status=500)
        if fault == "hang":
            await asyncio.sleep(rates.hang_s)
        if request.transport is not None:
            request.transport.close()
        return web.Response(status=503)

    # -- requests -------------------------------------------------------------------------------------

    def _authorize(self, request: web.Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self._api_key}".encode()):
            raise _RequestError(401, "the API key is missing or wrong", "invalid_api_key")

    def _teacher(self, body: dict[str, Any]) -> ScriptedTeacher:
        teacher = self._teachers.get(body["model"])
        if teacher is None:
            known = ", ".join(self._teachers)
            raise _RequestError(
                404, f"there is no model {body['model']!r}; there are {known}", "model_not_found"
            )
        return teacher

    @staticmethod
    def _price(teacher: ScriptedTeacher, usage: dict[str, Any]) -> float:
        prompt = usage["prompt_tokens"] * teacher.input_usd_per_million
        return float(prompt + usage["completion_tokens"] * teacher.output_usd_per_million) / 1e6


async def _read_body(request: web.Request) -> dict[str, Any]:
    """The request, checked: `model`, `messages`, `tools` (a list) and `n` (a number) are there."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise _RequestError(400, "the request is not JSON", "invalid_json") from None
    if not isinstance(body, dict):
        raise _RequestError(400, "the request is not a JSON object", "invalid_request")
    if not isinstance(body.get("model"), str):
        raise _RequestError(400, "`model` is missing or not a string", "invalid_request")
    if not _are_objects(body.get("messages")) or not body["messages"]:
        raise _RequestError(
            400, "`messages` is missing, empty or not a list of JSON objects", "invalid_request"
        )
    for number, message in enumerate(body["messages"]):
        if not _are_calls(message.get("tool_calls") or []):
            raise _RequestError(400, f"`messages[{number}].tool_calls` is malformed", "invalid_request")
    if not _are_objects(body.get("tools") or []):
        raise _RequestError(400, "`tools` is not a list of JSON objects", "invalid_request")
    if body.get("stream"):
        raise _RequestError(400, "`stream` is not offered; leave it out", "unsupported_parameter")
    choices = 1 if body.get("n") is None else body["n"]
    if type(choices) is not int or not 1 <= choices <= MOST_CHOICES:
        raise _RequestError(400, f"`n` must be a number from 1 to {MOST_CHOICES}", "invalid_request")
    return body | {"tools": body.get("tools") or [], "n": choices}


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _are_calls(value: Any) -> bool:
    return _are_objects(value) and all(isinstance(call.get("function"), dict) for call in value)


def _digest(body: dict[str, Any]) -> str:
    """Names a request: everything in it counts, its spelling does not."""
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": code, "param": None, "code": code}}


def _refused(error: _RequestError) -> web.Response:
    return web.json_response(_error(str(error), error.code), status=error.status)
