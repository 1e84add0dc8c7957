"""Chat completions as JSON: good ones, and ones that are broken in a chosen way."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Sequence
from typing import Any

from forge_composer.teachers.local.settings import FAULT_KINDS, FaultRates, ScriptedTeacher
from forge_composer.types import ParsedAction

CHARACTERS_PER_TOKEN = 4
"""Scripted teachers have no tokenizer: counts are estimates of the usual size."""

SPOILED = ("wrong_schema", "bad_arguments", "length", "refusal", "bad_usage")
"""Faults in the JSON of an answer with status 200."""


def draw_fault(rates: FaultRates, rng: random.Random) -> str | None:
    """The fault that falls on an answer, None for a good one."""
    left = rng.random()
    for kind in FAULT_KINDS:
        left -= getattr(rates, kind)
        if left < 0:
            return kind
    return None


def draw_latency(teacher: ScriptedTeacher, rng: random.Random) -> float:
    """Seconds that an answer takes, before the server's scale: log-normal around the teacher's median."""
    return teacher.latency_s * rng.lognormvariate(0.0, teacher.latency_spread)


def completion(
    teacher: ScriptedTeacher,
    actions: Sequence[ParsedAction],
    *,
    reply_id: str,
    prompt_characters: int,
    report_cost: bool,
) -> dict[str, Any]:
    """A chat completion with one choice an action."""
    choices = [_choice(index, action, reply_id) for index, action in enumerate(actions)]
    return {
        "id": f"chatcmpl-{reply_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": teacher.name,
        "choices": choices,
        "usage": _usage(teacher, prompt_characters, choices, report_cost),
    }


def _choice(index: int, action: ParsedAction, reply_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": action.text or None}
    if action.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{reply_id[:12]}_{index}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(action.tool_calls)
        ]
    reason = "tool_calls" if action.tool_calls else "stop"
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


def _usage(
    teacher: ScriptedTeacher, prompt_characters: int, choices: list[dict[str, Any]], report_cost: bool
) -> dict[str, Any]:
    written = sum(len(json.dumps(choice["message"])) for choice in choices)
    prompt = -(-prompt_characters // CHARACTERS_PER_TOKEN)
    answer = -(-written // CHARACTERS_PER_TOKEN)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }
    if report_cost:
        usd = prompt * teacher.input_usd_per_million + answer * teacher.output_usd_per_million
        usage["cost"] = round(usd / 1e6, 9)
    return usage


def spoil(reply: dict[str, Any], kind: str, rng: random.Random) -> Any:
    """A copy of a good reply with one of the faults `SPOILED`."""
    reply = copy.deepcopy(reply)
    choice = reply["choices"][0]
    if kind == "wrong_schema":
        return rng.choice(
            (
                reply | {"choices": []},
                {"id": reply["id"], "object": "text_completion", "text": "return"},
                {"error": {"message": "the model gave no answer", "type": "provider_error", "code": 502}},
                reply | {"choices": [{"index": 0, "finish_reason": "stop"}]},
                [],
            )
        )
    if kind in ("bad_arguments", "length"):
        _cut_call(choice, rng)
        choice["finish_reason"] = "length" if kind == "length" else choice["finish_reason"]
    elif kind == "refusal":
        text = "I cannot help with that."
        choice["message"] = {"role": "assistant", "content": None, "refusal": text}
        choice["finish_reason"] = rng.choice(("stop", "content_filter"))
    elif kind == "bad_usage":
        _break_usage(reply, rng)
    return reply


def _cut_call(choice: dict[str, Any], rng: random.Random) -> None:
    """Cut the arguments of the first call somewhere in the middle; without calls, the text."""
    message = choice["message"]
    if not message.get("tool_calls"):
        message["content"] = (message["content"] or "")[:5]
        return
    del message["tool_calls"][1:]
    function = message["tool_calls"][0]["function"]
    arguments = function["arguments"]
    function["arguments"] = arguments[: rng.randrange(1, len(arguments))]


def _break_usage(reply: dict[str, Any], rng: random.Random) -> None:
    usage = reply["usage"]
    match rng.randrange(5):
        case 0:
            del reply["usage"]
        case 1:
            reply["usage"] = None
        case 2:
            reply["usage"] = usage | {"prompt_tokens": -usage["prompt_tokens"], "cost": -1.0}
        case 3:
            reply["usage"] = {"prompt_tokens": "many", "completion_tokens": None, "cost": "0.1 USD"}
        case _:
            reply["usage"] = [usage]
