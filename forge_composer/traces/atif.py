"""Rollout <-> ATIF trajectory (Harbor's Agent Trajectory Interchange Format, version 1.8).

Whatever ATIF has a field for is in that field, with ATIF's meaning. The rest is under one key,
`extra.forge_composer`, of the trajectory, of a step or of a step's metrics. `docs/traces.md` lists all
of it.

ATIF's `prompt_token_ids` is the whole prompt of an inference. Written for each turn it would make a
trace quadratic in the number of turns, so it is written only where a turn opens a training sample. A
turn that extends the one before leaves it out and has `prompt_suffix_ids` in its own extra: its prompt is
the previous prompt, the previous completion, and these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from atif import Trajectory
from pydantic import ValidationError

from forge_composer import __version__
from forge_composer.types import Feedback, Message, ParsedAction, Rollout, RolloutStatus, ToolCall, Turn

SCHEMA_VERSION = "ATIF-v1.8"
NAMESPACE = "forge_composer"
"""The key under every `extra` that is ours."""
EXTRA_VERSION = 1
"""Version of what is under `extra.forge_composer`; a reader refuses a newer one."""

_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}


class TraceFormatError(ValueError):
    """A document that is not an ATIF trajectory, or not one of ours."""


def trajectory_from_rollout(
    rollout: Rollout,
    *,
    run: str | None = None,
    model: str | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The rollout as an ATIF trajectory: a JSON object, validated.

    Args:
        rollout: any rollout, a failed one too.
        run: name of the run (ATIF `session_id`, shared by all rollouts of a run).
        model: name of the policy (ATIF `agent.model_name`).
        sampling: sampling parameters that hold for the whole run (`agent.extra`).
    """
    steps = [_context_step(message) for message in rollout.messages]
    previous: Turn | None = None
    for turn in rollout.turns:
        steps.append(_agent_step(turn, previous))
        previous = turn
    if not steps:  # ATIF wants at least one; the episode failed before its first message
        steps.append({"source": "system", "message": "", "extra": {NAMESPACE: {"placeholder": True}}})
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    steps[0]["timestamp"] = datetime.fromtimestamp(rollout.started_at, tz=UTC).isoformat()
    agent: dict[str, Any] = {
        "name": NAMESPACE,
        "version": __version__,
        "model_name": model,
        "tool_definitions": rollout.tools,
    }
    if sampling:
        agent["extra"] = {NAMESPACE: {"sampling": _jsonable(sampling)}}
    document = {
        "schema_version": SCHEMA_VERSION,
        "session_id": run,
        "trajectory_id": rollout.rollout_id,
        "agent": _without_none(agent),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(turn.prompt_ids) for turn in rollout.turns),
            "total_completion_tokens": rollout.completion_tokens,
            "total_steps": len(steps),
        },
        "extra": {NAMESPACE: _rollout_extra(rollout)},
    }
    document = _without_none(document)
    validate(document)
    return document


def validate(document: Any) -> None:
    """Check a JSON object against ATIF.

    Raises:
        TraceFormatError: with the path of each field that is wrong.
    """
    try:
        Trajectory.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'trajectory'}: {problem['msg']}"
            for problem in error.errors(include_url=False)[:5]
        )
        raise TraceFormatError(f"not an ATIF trajectory: {problems}") from None


def rollout_from_trajectory(document: Mapping[str, Any]) -> Rollout:
    """The rollout that `trajectory_from_rollout` was given.

    Raises:
        TraceFormatError: the trajectory was not written by forge_composer, or by a newer one.
    """
    extra = _ours(document)
    if not extra:
        raise TraceFormatError(
            f"the trajectory has no extra.{NAMESPACE}: it was not written by forge_composer"
        )
    if extra.get("version", 0) > EXTRA_VERSION:
        raise TraceFormatError(
            f"extra.{NAMESPACE}.version is {extra['version']}; this release reads up to {EXTRA_VERSION}"
        )
    try:
        return _read_rollout(document, extra)
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceFormatError(f"extra.{NAMESPACE} is incomplete: {error!r}") from error


# -- writing ----------------------------------------------------------------------------------------


def _rollout_extra(rollout: Rollout) -> dict[str, Any]:
    fields = {
        "version": EXTRA_VERSION,
        "group_id": rollout.group_id,
        "index": rollout.index,
        "task_id": rollout.task_id,
        "seed": rollout.seed,
        "split": rollout.split,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "reward_breakdown": rollout.reward_breakdown,
        "error": rollout.error,
        "started_at": rollout.started_at,
        "ended_at": rollout.ended_at,
        "policy_version_min": rollout.version_min,
        "policy_version_max": rollout.version_max,
        "info": rollout.info,
    }
    return cast("dict[str, Any]", _jsonable(fields))


def _context_step(message: Message) -> dict[str, Any]:
    """One message of the episode's start. What ATIF cannot hold is kept verbatim in the extra."""
    role = message["role"]
    step: dict[str, Any] = {"source": _SOURCES.get(role, "system"), "message": message["content"]}
    if step["source"] == "agent":
        step["is_copied_context"] = True  # a demonstration: not sampled here, not to be trained on
    if role not in ("system", "user") or set(message) != {"role", "content"}:
        step["extra"] = {NAMESPACE: {"message": _jsonable(message)}}
    return step


def _agent_step(turn: Turn, previous: Turn | None) -> dict[str, Any]:
    action = turn.action
    step: dict[str, Any] = {"source": "agent", "message": action.text, "llm_call_count": 1}
    if action.reasoning:
        step["reasoning_content"] = action.reasoning
    if action.tool_calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": _jsonable(call.arguments)}
            for call in action.tool_calls
        ]
    if turn.observations:
        step["observation"] = {"results": _results(turn)}
    step["metrics"] = _metrics(turn, previous)
    fields = {
        "finish_reason": turn.finish_reason,
        "opens_sample": turn.opens_sample,
        "parse_error": action.error,
        "feedback": [
            {"kind": note.kind, "message": note.message, "details": note.details} for note in turn.feedback
        ],
        "generate_s": turn.generate_s,
        "environment_s": turn.environment_s,
    }
    step["extra"] = {NAMESPACE: _jsonable(_without_none(fields))}
    return step


def _results(turn: Turn) -> list[dict[str, Any]]:
    calls = turn.action.tool_calls
    return [
        {"source_call_id": calls[i].id, "content": text} if i < len(calls) else {"content": text}
        for i, text in enumerate(turn.observations)
    ]


def _metrics(turn: Turn, previous: Turn | None) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(turn.prompt_ids),
        "completion_tokens": len(turn.completion_ids),
        "completion_token_ids": turn.completion_ids,
    }
    extra: dict[str, Any] = {"policy_versions": _run_lengths(turn.versions)}
    head = [*previous.prompt_ids, *previous.completion_ids] if previous is not None else None
    if head is not None and not turn.opens_sample and turn.prompt_ids[: len(head)] == head:
        extra["prompt_suffix_ids"] = turn.prompt_ids[len(head) :]
    else:
        metrics["prompt_token_ids"] = turn.prompt_ids
    if all(map(math.isfinite, turn.logprobs)):
        metrics["logprobs"] = turn.logprobs
    else:
        extra["logprobs"] = _jsonable(turn.logprobs)
    return metrics | {"extra": {NAMESPACE: extra}}


def _run_lengths(versions: Sequence[int]) -> list[list[int]]:
    return [[version, len(list(run))] for version, run in itertools.groupby(versions)]


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _jsonable(value: Any) -> Any:
    """The value in JSON's types; a float that JSON lacks becomes `{"$float": "nan"}`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    return repr(value)


# -- reading ----------------------------------------------------------------------------------------


def _ours(holder: Mapping[str, Any]) -> dict[str, Any]:
    return cast("dict[str, Any]", (holder.get("extra") or {}).get(NAMESPACE) or {})


def _read_rollout(document: Mapping[str, Any], written: Mapping[str, Any]) -> Rollout:
    extra = _restored(written)
    messages: list[Message] = []
    turns: list[Turn] = []
    for step in document["steps"]:
        own = _ours(step)
        if step["source"] == "agent" and not step.get("is_copied_context"):
            turns.append(_read_turn(step, own, turns[-1] if turns else None))
        elif "message" in own:
            messages.append(cast("Message", _restored(own["message"])))
        elif not own.get("placeholder"):
            messages.append(Message(role=step["source"], content=step["message"]))
    return Rollout(
        rollout_id=document["trajectory_id"],
        group_id=extra["group_id"],
        index=extra["index"],
        task_id=extra["task_id"],
        seed=extra["seed"],
        messages=messages,
        tools=list(document["agent"].get("tool_definitions") or []),
        turns=turns,
        status=RolloutStatus(extra["status"]),
        reward=extra["reward"],
        reward_breakdown=extra["reward_breakdown"],
        error=extra["error"],
        started_at=extra["started_at"],
        ended_at=extra["ended_at"],
        split=extra["split"],
        info=extra["info"],
    )


def _read_turn(step: Mapping[str, Any], own: Mapping[str, Any], previous: Turn | None) -> Turn:
    metrics = step["metrics"]
    numbers = _ours(metrics)
    if "prompt_suffix_ids" in numbers:
        if previous is None:
            raise TraceFormatError(f"step {step['step_id']} extends a turn that is not there")
        prompt = [*previous.prompt_ids, *previous.completion_ids, *numbers["prompt_suffix_ids"]]
    else:
        prompt = list(metrics["prompt_token_ids"])
    calls = tuple(
        ToolCall(call["tool_call_id"], call["function_name"], _restored(call["arguments"]))
        for call in step.get("tool_calls") or []
    )
    results = (step.get("observation") or {}).get("results", [])
    return Turn(
        prompt_ids=prompt,
        completion_ids=list(metrics["completion_token_ids"]),
        logprobs=list(metrics["logprobs"]) if "logprobs" in metrics else _restored(numbers["logprobs"]),
        versions=[version for version, count in numbers["policy_versions"] for _ in range(count)],
        finish_reason=own["finish_reason"],
        action=ParsedAction(
            text=step["message"],
            tool_calls=calls,
            reasoning=step.get("reasoning_content") or "",
            error=own.get("parse_error"),
        ),
        observations=[result["content"] for result in results],
        feedback=[Feedback(n["kind"], n["message"], _restored(n["details"])) for n in own["feedback"]],
        generate_s=own["generate_s"],
        environment_s=own["environment_s"],
        opens_sample=own["opens_sample"],
    )


def _restored(value: Any) -> Any:
    """Undo `_jsonable` for floats that JSON lacks."""
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
