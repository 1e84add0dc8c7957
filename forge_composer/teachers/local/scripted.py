"""A scripted teacher: from a request's messages and tools to its next action.

It writes a body and runs the tests, corrects the body after a failure, and submits when all tests passed.
The right body comes from the grammar, and so do the wrong ones; no text of a conversation is ever run. An
answer is a function of the server's seed, the model and the conversation (and of the request's `seed`, where
it has one): asked again, a teacher says the same.

Asked to coach (`forge_composer.hints.judge`) it names the body that it would have written, with the same
skill.
"""

from __future__ import annotations

import functools
import json
import random
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_composer.envs import prompts
from forge_composer.envs.micro_tasks import MicroTask
from forge_composer.hints import texts
from forge_composer.teachers.local.settings import ScriptedTeacher, Style
from forge_composer.teachers.local.tasks import find_task, task_of_source, text_of
from forge_composer.types import ParsedAction, ToolCall

NO_TASK = "I can only write the bodies of micro tasks, and there is none here."
NO_TOOL = "I need the tool write_body, which is not among the tools."
DONE = "Done."


@dataclass(slots=True, frozen=True)
class Progress:
    """How far a conversation on a task has come."""

    task: MicroTask
    state: str
    """Everything said so far, without ids: equal for equal conversations."""
    bodies: tuple[str, ...] = ()
    """Bodies written so far, by whomever."""
    report: str | None = None
    """What `run_tests` (or a refused `write_body`) said about the last body; None: not tested yet."""
    submitted: bool = False


def answer(
    teacher: ScriptedTeacher,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    sample: str = "",
) -> ParsedAction:
    """The teacher's next action.

    Args:
        teacher: who answers.
        messages: the conversation in the OpenAI shape; arguments of calls as text or as objects.
        tools: the tools in the OpenAI shape.
        seed: the server's seed.
        sample: what tells repeated samples of one request apart; equal samples give equal answers.
    """
    names = _tool_names(tools)
    task = find_task(messages)
    if task is None:
        return ParsedAction(NO_TASK)
    if text_of(messages[0]) == texts.JUDGE_SYSTEM:
        asked = Progress(task, state_of(messages))
        body = choose_body(teacher, asked, seed=seed, sample=sample)
        return ParsedAction(texts.DEMONSTRATION.format(body=body))
    if prompts.WRITE_BODY not in names:
        return ParsedAction(NO_TOOL)
    progress = read_progress(task, messages)
    if progress.submitted:
        return ParsedAction(DONE)
    if progress.bodies and progress.report is None and prompts.RUN_TESTS in names:
        return _calls((prompts.RUN_TESTS, {}))
    if progress.report == prompts.ALL_PASSED:
        return _calls((prompts.SUBMIT, {})) if prompts.SUBMIT in names else ParsedAction(DONE)
    body = styled(choose_body(teacher, progress, seed=seed, sample=sample), teacher.style)
    calls: list[tuple[str, dict[str, Any]]] = [(prompts.WRITE_BODY, {"body": body})]
    if prompts.RUN_TESTS in names:
        calls.append((prompts.RUN_TESTS, {}))
    return _calls(*calls)


def choose_body(teacher: ScriptedTeacher, progress: Progress, *, seed: int, sample: str = "") -> str:
    """The right body with the teacher's probability, else a wrong one that was not tried yet."""
    task = progress.task
    blind = random.Random(f"bias/{seed}/{teacher.family}/{progress.state}")
    own = random.Random(f"answer/{seed}/{teacher.name}/{sample}/{progress.state}")
    skill = teacher.skill
    if progress.bodies and teacher.correction_skill is not None:
        skill = teacher.correction_skill
    if blind.random() < teacher.shared_bias:
        draw = blind
    elif own.random() < skill:
        return task.reference_body
    else:
        draw = own
    tried = {_bare(body) for body in progress.bodies}
    wrong = [body for body in wrong_bodies(task, teacher.alternatives) if _bare(body) not in tried]
    return draw.choice(wrong) if wrong else task.reference_body


def wrong_bodies(task: MicroTask, count: int) -> tuple[str, ...]:
    """At most `count` wrong bodies of a task, the same for every teacher."""
    return _wrong_bodies(task.module_source, count)


@functools.lru_cache(maxsize=8192)
def _wrong_bodies(module_source: str, count: int) -> tuple[str, ...]:
    task = task_of_source(module_source)
    assert task is not None
    return tuple(task.plausible_wrong_bodies(random.Random(f"wrong/{task.task_id}"), count))


def styled(body: str, style: Style) -> str:
    """The body in another spelling of the same syntax tree."""
    if style == "indented":
        return textwrap.indent(body, "    ")
    return body.replace('"', "'") if style == "quoted" else body


def read_progress(task: MicroTask, messages: Sequence[Mapping[str, Any]]) -> Progress:
    """What was written, tested and submitted in a conversation."""
    bodies: list[str] = []
    report: str | None = None
    submitted = False
    for name, arguments, result in _exchanges(messages):
        if name == prompts.WRITE_BODY and isinstance(body := arguments.get("body"), str):
            bodies.append(body)
            report = None if result in (None, prompts.WRITTEN) else result
        elif name == prompts.RUN_TESTS and bodies and report is None:
            report = result
        elif name == prompts.SUBMIT:
            submitted = True
    return Progress(task, state_of(messages), tuple(bodies), report, submitted)


def state_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation without what changes from one telling to the next: ids, names, spelling of JSON."""
    said = [
        [
            message.get("role"),
            text_of(message),
            [list(_name_and_arguments(call)) for call in message.get("tool_calls") or []],
        ]
        for message in messages
    ]
    return json.dumps(said, sort_keys=True)


def _exchanges(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any], str | None]]:
    """Every call with its result, in order; a result of no known id is that of the first call without one."""
    calls: list[tuple[Any, str, Mapping[str, Any]]] = []
    results: dict[int, str] = {}
    opened = 0
    for message in messages:
        if message.get("role") == "assistant":
            opened = len(calls)
            for call in message.get("tool_calls") or []:
                calls.append((call.get("id"), *_name_and_arguments(call)))
        elif message.get("role") == "tool":
            waiting = [place for place in range(opened, len(calls)) if place not in results]
            wanted = message.get("tool_call_id")
            named = [place for place in waiting if wanted is not None and calls[place][0] == wanted]
            if places := named or waiting:
                results[places[0]] = text_of(message)
    return [(name, arguments, results.get(place)) for place, (_, name, arguments) in enumerate(calls)]


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"": arguments}
    return str(function.get("name", "")), arguments if isinstance(arguments, Mapping) else {}


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    functions = (tool.get("function") for tool in tools)
    return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


def _calls(*calls: tuple[str, dict[str, Any]]) -> ParsedAction:
    named = (ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls))
    return ParsedAction("", tuple(named))


def _bare(body: str) -> str:
    return textwrap.dedent(body).strip()
