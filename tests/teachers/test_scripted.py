"""Scripted teachers: they find the task, act in order, and are right as often as they should."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from forge_composer.envs import prompts
from forge_composer.envs.micro_grammar import DIFFICULTIES, SPLITS, space
from forge_composer.envs.micro_tasks import (
    NAMINGS,
    MicroTask,
    make_task,
    name_function,
    task_count,
    trusted_report,
)
from forge_composer.rendering.tool_calls import to_message
from forge_composer.teachers.actions import canonical_action
from forge_composer.teachers.local.scripted import (
    DONE,
    NO_TASK,
    NO_TOOL,
    answer,
    choose_body,
    read_progress,
    styled,
    wrong_bodies,
)
from forge_composer.teachers.local.settings import DEFAULT_TEACHERS, ScriptedTeacher
from forge_composer.teachers.local.tasks import find_task, task_of_source
from forge_composer.types import Message, ParsedAction

TASK = make_task("easy", "train", 5)
TOOLS = prompts.TOOLS
STATES = [make_task("easy", "train", index) for index in range(200)]


def teacher(**fields: Any) -> ScriptedTeacher:
    return ScriptedTeacher(**({"name": "t", "family": "f"} | fields))


def start(task: MicroTask = TASK) -> list[Message]:
    return prompts.initial_messages(task.module_source)


def play(messages: Sequence[Message], action: ParsedAction, *results: str) -> list[Message]:
    """The conversation after an action and its results."""
    answers = [
        Message(role="tool", content=text, tool_call_id=call.id)
        for call, text in zip(action.tool_calls, results, strict=True)
    ]
    return [*messages, to_message(action), *answers]


def names(action: ParsedAction) -> list[str]:
    return [call.name for call in action.tool_calls]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_the_task_is_found_from_its_module(difficulty: Any, split: Any) -> None:
    count = task_count(difficulty, split)
    for index in range(0, count, count // 5):
        task = make_task(difficulty, split, index)
        found = task_of_source(task.module_source)
        assert found == dataclasses.replace(task, visible=task.visible[:2], hidden=())
        hinted = f"{task.module_with(task.reference_body)}\nA hint: def other(x): return 1"
        assert task_of_source(f"Here is the module.\n{hinted}") == found


@pytest.mark.parametrize("naming", range(0, NAMINGS, 8))
def test_no_two_functions_read_the_same(naming: int) -> None:
    seen = set()
    for difficulty in DIFFICULTIES:
        for spec in space(difficulty).train + space(difficulty).eval:
            named = name_function(spec, naming)
            seen.add((named.parameters, named.sentence))
    assert len(seen) == sum(len(space(d).train) + len(space(d).eval) for d in DIFFICULTIES)


def test_texts_that_are_no_task() -> None:
    assert find_task([]) is None
    assert find_task([{"role": "user", "content": None}, {"role": "user", "content": 3}]) is None
    for text in (
        "def calc(a, b): pass",
        'def calc(a, b):\n    """Return the meaning of life."""',
        'def other(a, b):\n    """Return a plus b.\n    """',
        'def calc(q, b):\n    """Return q plus b.\n    """',
    ):
        assert task_of_source(text) is None
    parts = [{"type": "text", "text": TASK.module_source}, {"type": "image_url", "image_url": {}}]
    assert find_task([{"role": "user", "content": parts}]) == task_of_source(TASK.module_source)


@pytest.mark.parametrize(
    "example",
    ["form('x' * 9)", "form(9999999)", "form('" + "x" * 51 + "')", "other('x')", "form", "form([[1]])", "(("],
)
def test_examples_that_are_not_the_grammars_are_not_run(example: str) -> None:
    """Then the task has its own tests, all three, and not what the text says."""
    source = TASK.module_source.replace("form('beg')", example)
    assert source != TASK.module_source
    assert task_of_source(source) == TASK


def test_an_episode_from_its_start_to_its_end() -> None:
    always = teacher(skill=1.0)
    messages = start()
    action = answer(always, messages, TOOLS, seed=0)
    assert names(action) == ["write_body", "run_tests"]
    assert action.tool_calls[0].arguments == {"body": TASK.reference_body}
    messages = play(messages, action, prompts.WRITTEN, prompts.ALL_PASSED)
    action = answer(always, messages, TOOLS, seed=0)
    assert names(action) == ["submit"]
    messages = play(messages, action, prompts.SUBMITTED)
    assert answer(always, messages, TOOLS, seed=0) == ParsedAction(DONE)


def test_a_correction_is_another_body() -> None:
    never = teacher(skill=0.0, alternatives=4)
    messages, tried = start(), []
    for _ in range(4):
        action = answer(never, messages, TOOLS, seed=0)
        tried.append(action.tool_calls[0].arguments["body"])
        report = trusted_report(TASK, tried[-1])
        assert report != prompts.ALL_PASSED
        messages = play(messages, action, prompts.WRITTEN, report)
    assert sorted(tried) == sorted(wrong_bodies(TASK, 4))
    action = answer(never, messages, TOOLS, seed=0)  # nothing wrong is left to say
    assert action.tool_calls[0].arguments["body"] == TASK.reference_body


def test_states_that_a_student_leaves() -> None:
    always = teacher(skill=1.0)
    write = answer(always, start(), [TOOLS[1]], seed=0)
    assert names(write) == ["write_body"]
    untested = play(start(), write, prompts.WRITTEN)
    assert names(answer(always, untested, TOOLS, seed=0)) == ["run_tests"]
    refused = play(start(), write, prompts.syntax_error("invalid syntax", 1))
    assert names(answer(always, refused, TOOLS, seed=0)) == ["write_body", "run_tests"]
    talk = [*start(), Message(role="assistant", content="hm"), Message(role="tool", content=prompts.NO_CALL)]
    assert names(answer(always, talk, TOOLS, seed=0)) == ["write_body", "run_tests"]


def test_arguments_as_text_and_results_without_ids() -> None:
    call = {"type": "function", "function": {"name": "write_body", "arguments": json.dumps({"body": "x"})}}
    run = {"type": "function", "function": {"name": "run_tests", "arguments": "{}"}}
    broken = {"type": "function", "function": {"name": "write_body", "arguments": '{"body'}}
    messages = [
        *start(),
        {"role": "assistant", "content": None, "tool_calls": [call, run]},
        {"role": "tool", "content": "ok"},
        {"role": "tool", "content": "form('a'): expected 'd', got 'x'"},
        {"role": "assistant", "content": None, "tool_calls": [broken]},
        {"role": "tool", "content": "bad arguments"},
    ]
    progress = read_progress(TASK, messages)
    assert progress.bodies == ("x",)
    assert progress.report == "form('a'): expected 'd', got 'x'"
    assert not progress.submitted


def test_what_a_teacher_cannot_do() -> None:
    assert answer(teacher(), [{"role": "user", "content": "Hello"}], TOOLS, seed=0).text == NO_TASK
    assert answer(teacher(), start(), [], seed=0).text == NO_TOOL
    assert answer(teacher(), start(), [{"type": "function"}], seed=0).text == NO_TOOL


def test_answers_depend_on_seed_model_and_conversation_only() -> None:
    tasks = STATES[:60]
    half = teacher(skill=0.5, alternatives=4)

    def bodies(seed: int = 0, sample: str = "", who: ScriptedTeacher = half) -> list[str]:
        return [
            choose_body(who, read_progress(task, start(task)), seed=seed, sample=sample) for task in tasks
        ]

    assert bodies() == bodies()
    assert bodies() != bodies(seed=1)
    assert bodies() != bodies(sample="7")
    assert bodies() != bodies(who=teacher(name="u", skill=0.5, alternatives=4))
    played = play(start(), answer(half, start(), TOOLS, seed=0), "ok", "failed")
    renamed = json.loads(json.dumps(played).replace("call_0", "other_0").replace("call_1", "other_1"))
    assert answer(half, renamed, TOOLS, seed=0) == answer(half, played, TOOLS, seed=0)


@pytest.mark.parametrize("style", ["plain", "indented", "quoted"])
def test_a_style_is_another_spelling_of_the_same_action(style: Any) -> None:
    tasks = [make_task(d, "train", index) for d in DIFFICULTIES for index in range(12)]
    for task in tasks:
        messages = prompts.initial_messages(task.module_source)
        plain = answer(teacher(skill=1.0, alternatives=1), messages, TOOLS, seed=0)
        other = answer(teacher(skill=1.0, style=style, alternatives=1), messages, TOOLS, seed=0)
        assert canonical_action(plain) == canonical_action(other)
        assert trusted_report(task, styled(task.reference_body, "quoted")) == prompts.ALL_PASSED
    assert styled('return t + "d"', "quoted") == "return t + 'd'"
    assert styled("if a:\n    return b", "indented") == "    if a:\n        return b"


def test_right_as_often_as_the_skill_says() -> None:
    """200 states: the share is within 4 standard errors of the skill, for first attempts and corrections."""
    for skill, correction in ((0.8, 0.5), (0.3, None)):
        who = teacher(skill=skill, correction_skill=correction, alternatives=4)
        first = corrected = 0
        for task in STATES:
            messages = start(task)
            first += choose_body(who, read_progress(task, messages), seed=3) == task.reference_body
            wrong = ParsedAction(
                "", answer(teacher(skill=0.0, alternatives=4), messages, TOOLS, seed=3).tool_calls
            )
            after = play(messages, wrong, "ok", "failed")
            corrected += choose_body(who, read_progress(task, after), seed=3) == task.reference_body
        for share, wanted in (
            (first / len(STATES), skill),
            (corrected / len(STATES), skill if correction is None else correction),
        ):
            assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / len(STATES))


def test_a_shared_bias_is_one_wrong_answer_of_the_whole_family() -> None:
    """A quarter of the states is blind: every member says the same wrong thing there, a stranger does not."""
    members = [teacher(name=name, skill=1.0, shared_bias=0.25, alternatives=4) for name in "abc"]
    stranger = teacher(name="d", family="other", skill=1.0, shared_bias=0.25, alternatives=4)
    blind = same_as_stranger = 0
    for task in STATES:
        progress = read_progress(task, start(task))
        said = {choose_body(member, progress, seed=0) for member in members}
        assert len(said) == 1
        if said != {task.reference_body}:
            blind += 1
            same_as_stranger += said == {choose_body(stranger, progress, seed=0)}
    assert abs(blind / len(STATES) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(STATES))
    assert same_as_stranger < blind / 4


def test_the_default_teachers_differ_in_everything_that_matters() -> None:
    for field in ("name", "family", "skill", "style", "latency_s", "output_usd_per_million"):
        assert len({getattr(entry, field) for entry in DEFAULT_TEACHERS}) == 3
    slowest = max(entry.latency_s * math.exp(1.645 * entry.latency_spread) for entry in DEFAULT_TEACHERS)
    assert slowest == pytest.approx(20.5, abs=0.1)
