"""What is asked of a teacher: a step of a trace, and the request that goes over the wire."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from forge_composer.config.teachers import TeacherConfig
from forge_composer.teachers.prices import TokenBound
from forge_composer.types import Message

_TEMPLATE_TOKENS = 1024
"""Room for what chat templates and providers write around messages and tools."""
_CHARS_PER_TOKEN = 4


@dataclass(slots=True, frozen=True)
class TeacherRequest:
    """The question: what would you do at this step? `sample` numbers repetitions of one question."""

    trace: str
    step: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    sample: int = 0


@dataclass(slots=True, frozen=True)
class WireRequest:
    """A request, ready to be sent.

    `key` is a SHA-256 of the payload and the sample number; the address is not part of it, so that a replay
    finds its answers when the same model is served elsewhere. `tokens` is a guess for rate limits, `bound`
    what the request cannot pass.
    """

    body: bytes
    key: str
    tokens: int
    bound: TokenBound


def wire_request(config: TeacherConfig, request: TeacherRequest) -> WireRequest:
    """A step as the chat-completions request of one teacher."""
    payload = payload_of(config, request)
    body = json.dumps(payload, sort_keys=True).encode()  # ASCII: whatever a trace holds can be sent
    key = hashlib.sha256(body + f"#{request.sample}".encode()).hexdigest()
    longest = config.sampling.max_tokens
    # Each token of a byte-level tokenizer is a byte at least, and a byte of text is one of JSON at least.
    bound = TokenBound(prompt=len(body) + _TEMPLATE_TOKENS, completion=longest)
    return WireRequest(body, key, len(body) // _CHARS_PER_TOKEN + longest, bound)


def payload_of(config: TeacherConfig, request: TeacherRequest) -> dict[str, Any]:
    """The JSON object of a request."""
    sampling = config.sampling
    payload: dict[str, Any] = {
        "model": config.model,
        "messages": [wire_message(message) for message in request.messages],
        config.max_tokens_field: sampling.max_tokens,
    }
    if request.tools:
        payload["tools"] = [_tool(tool) for tool in request.tools]
    if sampling.temperature is not None:
        payload["temperature"] = sampling.temperature
    if sampling.top_p is not None:
        payload["top_p"] = sampling.top_p
    if sampling.seed is not None:
        payload["seed"] = sampling.seed + request.sample
    if config.reasoning_effort is not None:
        if _speaks_openrouter(config):
            payload["reasoning"] = {"effort": config.reasoning_effort}
        else:
            payload["reasoning_effort"] = config.reasoning_effort
    return payload | config.extra_body


def wire_message(message: Message) -> dict[str, Any]:
    """A message as endpoints take it: arguments are JSON text, and the student's reasoning stays at home."""
    wire: dict[str, Any] = {key: value for key, value in message.items() if key != "reasoning_content"}
    if calls := message.get("tool_calls"):
        wire["tool_calls"] = [_call(call) for call in calls]
        wire["content"] = message.get("content") or None
    else:
        wire.pop("tool_calls", None)
    return wire


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {})
    return {**call, "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _speaks_openrouter(config: TeacherConfig) -> bool:
    host = urlsplit(config.base_url).hostname or ""
    by_host = host == "openrouter.ai" or host.endswith(".openrouter.ai")
    return config.dialect == "openrouter" or (config.dialect == "auto" and by_host)
