"""Hints from a judge: a model at an OpenAI-compatible endpoint that reads the rollout.

A judge that fails costs a hint and never a run: there is none for that target, and the reason is counted.
Only the reason's name is kept; what an endpoint or a client says about an error may hold the key.
"""

from __future__ import annotations

import asyncio
import json
import os

import httpx
import tenacity

from forge_composer.config.hints import JudgeConfig
from forge_composer.hints import texts
from forge_composer.hints.filters import clip
from forge_composer.hints.sources import HintRequest
from forge_composer.rendering.tool_calls import THINK_CLOSE, THINK_OPEN
from forge_composer.types import Rollout, Turn

_MOST_BYTES = 1 << 20
"""Longest answer that is read."""
_CUT = "\n[...]\n"


class _JudgeError(Exception):
    """No hint; `reason` is what is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _PassingError(_JudgeError):
    """One that may be gone at the next attempt."""


class JudgeHints:
    """Asks for one hint a target. Bounded in time, in requests at once and in the length of an answer."""

    def __init__(self, config: JudgeConfig) -> None:
        """Read the key from the environment.

        Raises:
            ValueError: the endpoint is not configured, or the key's variable holds no key.
        """
        if config.base_url is None or config.model is None:
            raise ValueError("hints.judge: base_url and model are needed")
        self._key = _key(config.api_key_env) if config.api_key_env else None
        self._config = config
        self._url = config.base_url.rstrip("/") + "/chat/completions"
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def write(self, request: HintRequest) -> str | None:
        """The judge's hint; None, and one more `judge_failed/REASON`, if there is none."""
        try:
            async with asyncio.timeout(self._config.timeout_s), self._slots:
                answer = await self._ask(request)
        except TimeoutError:
            reason = "timeout"
        except _JudgeError as error:
            reason = error.reason
        else:
            hint = answer if answer.startswith(texts.LEAD) else texts.LEAD + answer
            return clip(hint, request.max_chars)
        request.counts[f"judge_failed/{reason}"] += 1
        return None

    async def _ask(self, request: HintRequest) -> str:
        payload = {
            "model": self._config.model,
            "messages": judge_messages(request, self._config.max_trace_chars),
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        question = json.dumps(payload).encode()  # ASCII: whatever a rollout holds can be sent
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._config.attempts),
            wait=tenacity.wait_exponential(multiplier=0.25, max=4.0),
            retry=tenacity.retry_if_exception_type(_PassingError),
            reraise=True,
        )
        # The deadline around all of this bounds each step; the client's own would only cut it in pieces.
        async with httpx.AsyncClient(timeout=None, headers=headers) as client:
            body: bytes = await retrying(self._post, client, question)
        answer = _content(body)
        if self._key and self._key in answer:
            raise _JudgeError("malformed")  # an endpoint that echoes its request
        return answer

    async def _post(self, client: httpx.AsyncClient, question: bytes) -> bytes:
        try:
            async with client.stream("POST", self._url, content=question) as response:
                status = response.status_code
                if status == 429 or status >= 500:
                    raise _PassingError(f"status_{status}")
                if status != 200:
                    raise _JudgeError(f"status_{status}")
                body: bytes = b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > _MOST_BYTES:
                        raise _JudgeError("too_long")
                return body
        except httpx.HTTPError:
            raise _PassingError("connection") from None


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"hints.judge.api_key_env: the environment has no {variable}")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"hints.judge.api_key_env: {variable} holds characters that no HTTP header may have")
    return key


def _content(body: bytes) -> str:
    """The text of a chat completion, without the reasoning that some models leave in it."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _JudgeError("malformed") from None
    if not isinstance(content, str):
        raise _JudgeError("malformed")
    _, thought, answer = content.rpartition(THINK_CLOSE)
    if not thought and content.lstrip().startswith(THINK_OPEN):
        raise _JudgeError("malformed")  # its thinking was cut off
    answer = answer.strip()
    if not answer:
        raise _JudgeError("empty")
    return answer


def judge_messages(request: HintRequest, max_chars: int) -> list[dict[str, str]]:
    """What the judge reads: the rollout as the policy saw it, at most `max_chars` of it.

    The marked turn gets half of the room, from its start; the task and what came before a quarter each.
    """
    rollout, fault = request.rollout, request.fault
    task = "\n\n".join(message["content"] for message in rollout.messages)
    before = "\n".join(_told(rollout, range(fault.turn)))
    after = "\n".join(_told(rollout, range(fault.turn, len(rollout.turns))))
    problem = fault.message or texts.JUDGE_PROBLEMS.get(fault.kind, fault.kind)
    content = texts.JUDGE_REQUEST.format(
        task=_without_middle(task, max_chars // 4),
        before=_without_start(before, max_chars // 4) or "nothing",
        after=after if len(after) <= max_chars // 2 else after[: max_chars // 2] + _CUT,
        problem=problem,
        max_chars=request.max_chars,
    )
    return [{"role": "system", "content": texts.JUDGE_SYSTEM}, {"role": "user", "content": content}]


def _told(rollout: Rollout, numbers: range) -> list[str]:
    return [_turn_text(rollout.turns[number]) for number in numbers]


def _turn_text(turn: Turn) -> str:
    lines = ["[agent]"]
    if turn.action.text:
        lines.append(turn.action.text)
    lines += [json.dumps({"name": c.name, "arguments": c.arguments}) for c in turn.action.tool_calls]
    for observation in turn.observations:
        lines += ["[answer]", observation]
    return "\n".join(lines)


def _without_middle(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit // 2] + _CUT + text[-limit // 2 :]


def _without_start(text: str, limit: int) -> str:
    return text if len(text) <= limit else _CUT + text[-limit:]
