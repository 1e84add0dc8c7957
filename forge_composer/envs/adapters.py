"""What differs between OpenEnv environments, seen from the rollout loop.

An adapter says how an assistant turn becomes actions and what the answers mean. `FeatureDeletionAdapter`
is for our own environment; `GenericAdapter` drives any other one by a single tool whose parameters are the
environment's action schema.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Protocol

from forge_composer.envs import prompts
from forge_composer.types import EpisodeStart, EpisodeStep, Feedback, Message, ParsedAction

STEP_TOOL = "step"
GENERIC_SYSTEM_PROMPT = f"Act on the environment with the tool {STEP_TOOL}."


class Transport(Protocol):
    """The part of OpenEnv's client that adapters use."""

    async def act(self, action: dict[str, Any]) -> Any:
        """Send one action; returns OpenEnv's StepResult.

        Raises:
            ActionRefusedError: the action does not fit the environment's schema.
        """
        ...


class ActionRefusedError(RuntimeError):
    """The server refused an action because it does not fit the schema; the session goes on."""


class Adapter(Protocol):
    """One environment kind. A new object per episode, so it may keep what the episode has seen."""

    def start(self, result: Any, episode_id: str) -> EpisodeStart:
        """The episode's start from the answer to reset."""
        ...

    async def turn(self, transport: Transport, action: ParsedAction, *, finish: bool) -> EpisodeStep:
        """Carry out one assistant turn."""
        ...


class FeatureDeletionAdapter:
    """Our own environment: one action is one whole turn."""

    def start(self, result: Any, episode_id: str) -> EpisodeStart:
        """Messages and tools come from the environment."""
        observation = result.observation
        return EpisodeStart(
            task_id=observation["task_id"],
            messages=observation["messages"],
            tools=observation["tools"],
            info={"episode_id": episode_id},
        )

    async def turn(self, transport: Transport, action: ParsedAction, *, finish: bool) -> EpisodeStep:
        """Send all calls at once."""
        calls = [{"name": call.name, "arguments": call.arguments} for call in action.tool_calls]
        result = await transport.act({"calls": calls, "error": action.error, "finish": finish})
        observation = result.observation
        return EpisodeStep(
            observations=observation["results"],
            reward=None if result.reward is None else float(result.reward),
            done=bool(result.done),
            feedback=[Feedback(**remark) for remark in observation["feedback"]],
            reward_breakdown=observation["reward_breakdown"],
            error=observation["error"],
        )


@dataclass(slots=True)
class GenericAdapter:
    """Any OpenEnv environment. The episode's reward is the sum of the rewards that its steps gave.

    An episode whose steps never gave a reward has none (None), also when it is finished early.
    """

    action_schema: dict[str, Any]
    """JSON schema of the environment's action."""
    _return: float | None = field(default=None, init=False)

    def start(self, result: Any, episode_id: str) -> EpisodeStart:
        """The first user message is the observation as JSON; the only tool is `step`."""
        observation = result.observation
        task_id = str(observation.get("task_id") or (result.metadata or {}).get("task_id") or episode_id)
        messages = [
            Message(role="system", content=GENERIC_SYSTEM_PROMPT),
            Message(role="user", content=_as_text(observation)),
        ]
        tools = [step_tool(self.action_schema)]
        return EpisodeStart(task_id, messages, tools, info={"episode_id": episode_id})

    async def turn(self, transport: Transport, action: ParsedAction, *, finish: bool) -> EpisodeStep:
        """One environment step per call, in order, until the episode is over."""
        step = EpisodeStep(observations=[], reward=None, done=False)
        for call in action.tool_calls:
            if step.done:
                _complain(step, "episode_over", prompts.EPISODE_OVER)
            elif call.name != STEP_TOOL:
                _complain(
                    step, "unknown_tool", f"unknown tool {prompts.clip(call.name, 40)}: use {STEP_TOOL}"
                )
            else:
                await self._act(transport, call.arguments, step)
        if action.error is not None:
            _complain(step, "malformed_call", prompts.malformed_call(action.error))
        elif not action.tool_calls:
            _complain(step, "no_call", f"no tool call: use {STEP_TOOL}")
        if step.done or finish:
            step.done, step.reward = True, self._return
        return step

    async def _act(self, transport: Transport, arguments: dict[str, Any], step: EpisodeStep) -> None:
        try:
            result = await transport.act(arguments)
        except ActionRefusedError:
            problem = "they do not fit the parameters"
            _complain(step, "bad_arguments", prompts.bad_arguments(STEP_TOOL, problem))
            return
        if result.reward is not None:
            self._return = (self._return or 0.0) + float(result.reward)
        step.done = bool(result.done)
        step.observations.append(_as_text(result.observation))


def step_tool(action_schema: dict[str, Any]) -> dict[str, Any]:
    """The tool `step`: each field of the action is a parameter; OpenEnv's own `metadata` is left out."""
    fields = action_schema.get("properties", {})
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema for name, schema in fields.items() if name != "metadata"},
        "required": [name for name in action_schema.get("required", []) if name != "metadata"],
    }
    if "$defs" in action_schema:
        parameters["$defs"] = action_schema["$defs"]
    description = action_schema.get("description") or "Act on the environment."
    return {
        "type": "function",
        "function": {"name": STEP_TOOL, "description": description, "parameters": parameters},
    }


async def fetch_action_schema(url: str, timeout_s: float) -> dict[str, Any]:
    """The JSON schema of a server's actions.

    Raises:
        OSError: the server does not answer.
        ValueError: it answers something else.
    """

    def fetch() -> dict[str, Any]:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=timeout_s) as answer:
            schema = json.load(answer)["action"]
        if not isinstance(schema, dict):
            raise ValueError(f"{url}/schema: 'action' is no JSON schema")
        return schema

    return await asyncio.to_thread(fetch)


def _complain(step: EpisodeStep, kind: str, message: str) -> None:
    step.observations.append(message)
    step.feedback.append(Feedback(kind, message))


def _as_text(observation: dict[str, Any]) -> str:
    """An observation as JSON, without OpenEnv's empty metadata."""
    shown = {name: value for name, value in observation.items() if name != "metadata" or value}
    return json.dumps(shown, ensure_ascii=False)
