"""Reading ATIF trajectories of any producer, versions 1.0 to 1.8.

Reading is lenient: producers deviate from the format, and so does the example in its own text (37 token ids,
44 log-probabilities). What deviates is mended or left out, and a warning says so; `strict` refuses it. Our
own trace files are ATIF, too: `forge_composer.traces.store` reads them back as rollouts, this reads them as
conversations. `atif_export` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from forge_composer.traces.atif import NAMESPACE as ROLLOUT
from forge_composer.traces.atif import SCHEMA_VERSION, TraceFormatError, validate
from forge_composer.traces.formats.conversation import Conversation, Step, StepTokens
from forge_composer.traces.formats.fields import Fields, ids_of, numbers_of, parse_json
from forge_composer.traces.formats.messages import action_of, read_messages, read_tools, text_of_parts
from forge_composer.types import Message, ParsedAction

NAME = "atif"
CONVERSATION = "forge_composer_conversation"
"""The key under `extra` for what a conversation has and ATIF has not."""
NEWEST_MINOR = int(SCHEMA_VERSION.rpartition(".")[2])

_STEP_FIELDS = ("timestamp", "model_name", "reasoning_effort", "extra", "llm_call_count")
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def read_atif(document: Mapping[str, Any], *, strict: bool = False) -> Conversation:
    """One trajectory.

    Args:
        document: the JSON object.
        strict: refuse what does not keep to the format, as before training.

    Raises:
        TraceFormatError: not ATIF 1.x, no steps, a step that is no object; with `strict` anything else, too.
    """
    if strict:
        validate(document)
    conversation = _Reader(document).read()
    if strict and conversation.warnings:
        raise TraceFormatError("; ".join(conversation.warnings[:5]))
    return conversation


class _Reader:
    """Reads one trajectory; a step may need the tokens of the one before."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.warnings: list[str] = []
        self.root = Fields(document, "", self.warnings)
        self.start: list[Message] = []
        self.steps: list[Step] = []
        self.ours = ROLLOUT in (self.root.peek("extra", dict) or {})
        """Written by a run of ours: every answer to a turn is a tool message."""

    def read(self) -> Conversation:
        root = self.root
        self._check_version()
        agent = root.sub("agent")
        for key in ("name", "version"):
            if agent.peek(key, str) is None:
                agent.warn(key, "the field is missing, or not a string")
        tools = read_tools(
            agent.take("tool_definitions", list) or [], "agent.tool_definitions", self.warnings
        )
        model = agent.take("model_name", str)
        for number, value in enumerate(root.need("steps", list)):
            self._step(Fields(value, f"steps[{number}]", self.warnings), number)
        if subagents := root.peek("subagent_trajectories", list):
            root.warn("subagent_trajectories", f"{len(subagents)} trajectories of sub-agents are not read")
        own = _own(root)
        reward, task = own.get("reward"), own.get("task_id")
        return Conversation(
            format=NAME,
            start=self.start,
            steps=self.steps,
            tools=tools,
            trace_id=root.take("trajectory_id", str) or root.peek("session_id", str) or "",
            task_id=task if isinstance(task, str) else None,
            model=model,
            reward=float(reward) if isinstance(reward, int | float) else None,
            extra=_foreign(_without_count(root.rest()))
            | ({"agent": _foreign(agent.rest())} if agent.rest() else {}),
            warnings=self.warnings,
        )

    def _check_version(self) -> None:
        version = self.root.take("schema_version", str)
        if version is None:
            self.root.warn("schema_version", "the field is missing; read as ATIF 1")
            return
        found = re.fullmatch(r"ATIF-v(\d{1,4})\.(\d{1,4})", version)
        if found is None or found[1] != "1":
            raise TraceFormatError(
                f"schema_version: {version[:40]!r} is not ATIF-v1.0 to ATIF-v1.{NEWEST_MINOR}"
            )
        if int(found[2]) > NEWEST_MINOR:
            self.root.warn(
                "schema_version", f"{version} is newer than {SCHEMA_VERSION}, which this release knows"
            )

    def _step(self, step: Fields, number: int) -> None:
        identity = step.take("step_id", int)
        if identity != number + 1:
            step.warn("step_id", f"expected {number + 1}, got {identity}")
        self._check_time(step)
        source = step.take("source", str)
        if source not in ("system", "user", "agent"):
            raise TraceFormatError(
                f"{step.place('source')}: expected system, user or agent, got {source!r:.40}"
            )
        own = _own(step)
        if own.get("placeholder") is True:
            return
        if source == "agent":
            self._agent_step(step, own)
            return
        for key in _AGENT_ONLY:
            if step.has(key):
                step.warn(key, f"only agents have the field, and the source is {source}; left out")
        self._place(self._verbatim(own, step) or Message(role=source, content=self._text(step, "message")))
        for _, content, _ in self._results(step):
            self._place(Message(role="system" if source == "system" else "user", content=content))

    def _check_time(self, step: Fields) -> None:
        stamp = step.peek("timestamp", str)
        if stamp is None:
            return
        try:
            datetime.fromisoformat(stamp.replace("Z", "+00:00"))
        except ValueError:
            step.take("timestamp", str)
            step.warn("timestamp", f"{stamp[:40]!r} is not ISO 8601; left out")

    def _agent_step(self, step: Fields, own: Mapping[str, Any]) -> None:
        message = self._verbatim(own, step) or self._agent_message(step)
        answers = [self._answer(step, message, *result) for result in self._results(step)]
        copied = step.take("is_copied_context", bool) is True
        if copied or step.peek("llm_call_count", int) == 0:  # a copied turn, or one that no model made
            for item in (message, *answers):
                self._place(item)
            return
        turn = Step(message, self._action(message, own), answers)
        if isinstance(context := own.get("context"), list):
            read = read_messages(context, step.place(f"extra.{CONVERSATION}.context"), self.warnings)
            turn.context = [item for item, _ in read]
        metrics = step.sub("metrics")
        turn.tokens = self._tokens(metrics)
        turn.extra = _foreign({key: value for key, value in step.rest().items() if key in _STEP_FIELDS})
        if kept := _foreign(metrics.rest()):
            turn.extra["metrics"] = kept
        self.steps.append(turn)

    def _agent_message(self, step: Fields) -> Message:
        message = Message(role="assistant", content=self._text(step, "message"))
        if reasoning := step.take("reasoning_content", str):
            message["reasoning_content"] = reasoning
        calls = [
            self._call(step, number, call) for number, call in enumerate(step.take("tool_calls", list) or [])
        ]
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, step: Fields, number: int, value: Any) -> dict[str, Any]:
        call = Fields(value, step.place(f"tool_calls[{number}]"), self.warnings)
        identity = call.take("tool_call_id", str)
        if not identity:
            identity = re.sub(r"\W+", "_", call.place("")).strip("_")
            call.warn("tool_call_id", "the field is missing")
        name = call.need("function_name", str)
        arguments: Any = call.rest().get("arguments")
        if not isinstance(arguments, dict):
            call.warn("arguments", "expected a JSON object")
            arguments = _decoded(arguments)
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _action(self, message: Message, own: Mapping[str, Any]) -> ParsedAction:
        action = action_of(message)
        if isinstance(error := own.get("parse_error"), str):
            return ParsedAction(action.text, action.tool_calls, action.reasoning, error)
        return action

    def _results(self, step: Fields) -> Iterator[tuple[str | None, str, bool]]:
        """Call id and text of each result of an observation; and whether its message has the tool's name."""
        observation = step.sub("observation")
        for number, value in enumerate(observation.take("results", list) or []):
            result = Fields(value, observation.place(f"results[{number}]"), self.warnings)
            named = self.ours or _own(result).get("named") is True
            yield result.take("source_call_id", str), self._text(result, "content"), named

    def _answer(
        self, step: Fields, message: Message, identity: str | None, text: str, named: bool
    ) -> Message:
        """A result as a message: of its tool, or else of the user."""
        names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", [])}
        if identity is None and len(names) == 1 and not self.ours:
            identity = next(iter(names))
        if identity is not None and identity in names:
            answer = Message(role="tool", content=text, tool_call_id=identity)
            if named:
                answer["name"] = names[identity]
            return answer
        if identity is not None:
            step.warn("observation", f"no call has the id {identity[:40]!r}")
        return Message(role="tool" if self.ours else "user", content=text)

    def _tokens(self, metrics: Fields) -> StepTokens | None:
        given = metrics.take("completion_token_ids", list)
        completion = ids_of(given)
        prompt = self._prompt(metrics)
        values = metrics.take("logprobs", list)
        if completion is None:
            if given is not None:
                metrics.warn("completion_token_ids", "not whole numbers; the ids of the step are left out")
            return None
        for key, ids in (("completion_tokens", completion), ("prompt_tokens", prompt)):
            count = metrics.peek(key, int)
            if ids is not None and count is not None and count != len(ids):
                metrics.warn(key, f"{count} tokens, but {len(ids)} ids")
        logprobs = numbers_of(values)
        if values is not None and (logprobs is None or len(logprobs) != len(completion)):
            metrics.warn("logprobs", f"{len(values)} values for {len(completion)} ids; left out")
            logprobs = None
        return StepTokens(completion, prompt, logprobs)

    def _prompt(self, metrics: Fields) -> list[int] | None:
        """The prompt's ids, also where our own traces give only what they add to the turn before."""
        suffix = _own(metrics).get("prompt_suffix_ids")
        before = self.steps[-1].tokens if self.steps else None
        if isinstance(suffix, list) and before is not None and before.prompt_ids is not None:
            added = ids_of(suffix)
            return None if added is None else [*before.prompt_ids, *before.completion_ids, *added]
        return ids_of(metrics.take("prompt_token_ids", list))

    def _text(self, fields: Fields, key: str) -> str:
        if fields.peek(key, list) is None:
            return fields.take(key, str) or ""
        return text_of_parts(fields.take(key, list) or [], fields, key)

    def _verbatim(self, own: Mapping[str, Any], step: Fields) -> Message | None:
        """The message that ATIF could not hold, if we wrote the step."""
        kept = own.get("message")
        if not isinstance(kept, Mapping):
            return None
        ((message, _),) = read_messages([kept], step.place("extra"), [])
        return message

    def _place(self, message: Message) -> None:
        (self.steps[-1].after if self.steps else self.start).append(message)


def _own(holder: Fields) -> dict[str, Any]:
    """What we wrote under `extra` of an object, as a rollout or as a conversation."""
    extra = holder.peek("extra", dict) or {}
    found: dict[str, Any] = {}
    for key in (ROLLOUT, CONVERSATION):
        found |= extra[key] if isinstance(extra.get(key), dict) else {}
    return found


def _without_count(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without the number of steps, which is counted anew on export."""
    totals = fields.get("final_metrics")
    if isinstance(totals, dict) and "total_steps" in totals:
        fields["final_metrics"] = {key: value for key, value in totals.items() if key != "total_steps"}
    return fields


def _foreign(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without what we wrote under `extra`: the record has it."""
    extra = fields.get("extra")
    if not isinstance(extra, dict):
        return fields
    kept = {key: value for key, value in extra.items() if key not in (ROLLOUT, CONVERSATION)}
    others = {key: value for key, value in fields.items() if key != "extra"}
    return others | ({"extra": kept} if kept else {})


def _decoded(arguments: Any) -> Any:
    """Arguments that are a JSON text, decoded; other values as text."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return str(arguments)
    try:
        decoded = parse_json(arguments)
    except TraceFormatError:
        return arguments
    return decoded if isinstance(decoded, dict) else arguments
