"""The environment in this process: tools, texts, structured feedback, grading, failures of ours."""

import random
from typing import Any

import pytest

from forge_composer.envs import prompts
from forge_composer.envs.feature_deletion import (
    FeatureDeletionAction,
    FeatureDeletionEnvironment,
    FeatureDeletionObservation,
    FeatureDeletionOptions,
)
from forge_composer.envs.micro_tasks import make_task, trusted_report
from forge_composer.envs.sandbox import Sandbox, SandboxError

TASK = make_task("easy", "train", 5)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def act(environment: FeatureDeletionEnvironment, *calls: dict, **rest: Any) -> FeatureDeletionObservation:
    return environment.step(FeatureDeletionAction(calls=list(calls), **rest))


@pytest.fixture
def environment() -> FeatureDeletionEnvironment:
    made = FeatureDeletionEnvironment(FeatureDeletionOptions())
    made.reset(index=5)
    return made


def test_reset_gives_messages_tools_and_no_answer(environment: FeatureDeletionEnvironment) -> None:
    start = environment.reset(index=5, split="train", episode_id="e1", seed=9)
    assert start.task_id == TASK.task_id
    assert [message["role"] for message in start.messages] == ["system", "user"]
    assert start.messages[1]["content"] == TASK.module_source
    assert [tool["function"]["name"] for tool in start.tools] == ["read", "write_body", "run_tests", "submit"]
    assert (start.reward, start.done, start.metadata) == (None, False, {"episode_id": "e1"})
    assert TASK.reference_body not in start.model_dump_json()


def test_right_body_in_one_turn(environment: FeatureDeletionEnvironment) -> None:
    seen = act(environment, call("write_body", body=TASK.reference_body), call("run_tests"), call("submit"))
    assert seen.results == ["ok", "all tests passed", "submitted"]
    assert (seen.reward, seen.done, seen.feedback) == (1.0, True, [])
    assert seen.reward_breakdown == {"passed": 6.0, "hidden_tests": 6.0}


def test_failing_test_comes_back_as_text_and_feedback(environment: FeatureDeletionEnvironment) -> None:
    body = 'return t[:-2] + "d"'
    seen = act(environment, call("write_body", body=body), call("run_tests"))
    assert seen.results == ["ok", trusted_report(TASK, body)]
    assert seen.feedback[0] == {
        "kind": "test_failed",
        "message": "form('fbedg'): expected 'fbd', got 'fbed'",
        "details": {"call": "form('fbedg')", "expected": "fbd", "got": "'fbed'"},
    }
    assert (seen.reward, seen.done) == (None, False)


def test_raised_error_and_correction(environment: FeatureDeletionEnvironment) -> None:
    seen = act(environment, call("write_body", body="return 1 // 0"), call("run_tests"))
    first = "form('fbedg'): raised ZeroDivisionError: integer division or modulo by zero"
    assert seen.results[1].splitlines()[0] == first
    seen = act(environment, call("write_body", body=f"    {TASK.reference_body}\n"), call("submit"))
    assert seen.reward == 1.0


def test_read_shows_the_current_body(environment: FeatureDeletionEnvironment) -> None:
    assert act(environment, call("read")).results == [TASK.module_source]
    seen = act(environment, call("write_body", body="x = 1\nreturn x"), call("read"))
    assert seen.results[1] == TASK.module_source.replace("raise NotImplementedError", "x = 1\n    return x")


def write(body: Any) -> dict[str, Any]:
    return {"calls": [call("write_body", body=body)]}


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ({"calls": [call("open")]}, "unknown_tool", prompts.unknown_tool("open")),
        ({"calls": [call("run_tests", n=1)]}, "bad_arguments", "run_tests: expected none, got n"),
        ({"calls": [call("write_body", code="")]}, "bad_arguments", "write_body: expected body, got code"),
        (write(3), "bad_arguments", "write_body: body must be a string"),
        (write(" \n"), "bad_arguments", "write_body: body is empty"),
        (write("x" * 5000), "bad_arguments", "write_body: body is longer than 4000 characters"),
        ({"error": "not valid JSON"}, "malformed_call", "malformed tool call: not valid JSON"),
        ({}, "no_call", prompts.NO_CALL),
        (write("x = 1\nreturn x +"), "syntax_error", "syntax error in line 2: invalid syntax"),
        (write("return '\0'"), "syntax_error", "source code string cannot contain null bytes"),
    ],
)
def test_mistakes_are_answered_in_words(
    environment: FeatureDeletionEnvironment, action: dict, kind: str, message: str
) -> None:
    seen = environment.step(FeatureDeletionAction(**action))
    (remark,) = seen.feedback
    assert remark["kind"] == kind
    assert remark["message"].endswith(message)
    assert seen.results == [remark["message"]]
    assert (seen.reward, seen.done, seen.error) == (None, False, None)


def test_calls_before_a_malformed_one_are_carried_out(environment: FeatureDeletionEnvironment) -> None:
    seen = act(environment, call("write_body", body=TASK.reference_body), error="cut off")
    assert seen.results == ["ok", "malformed tool call: cut off"]
    assert act(environment, call("submit")).reward == 1.0


def test_nothing_happens_after_the_end(environment: FeatureDeletionEnvironment) -> None:
    seen = act(environment, call("submit"), call("write_body", body=TASK.reference_body))
    assert seen.results == ["submitted", "the episode is over"]
    assert (seen.reward, seen.done) == (0.0, True)
    seen = act(environment, call("write_body", body=TASK.reference_body), call("submit"), finish=True)
    assert seen.results == ["the episode is over"]
    assert (seen.reward, seen.done) == (None, True)


def test_finish_grades_what_is_there(environment: FeatureDeletionEnvironment) -> None:
    act(environment, call("write_body", body=TASK.reference_body))
    seen = act(environment, call("run_tests"), finish=True)
    assert seen.results == ["all tests passed"]
    assert (seen.reward, seen.done) == (1.0, True)


def test_finish_without_a_body_is_zero_and_not_void(environment: FeatureDeletionEnvironment) -> None:
    seen = act(environment, finish=True)
    assert (seen.reward, seen.done, seen.error) == (0.0, True, None)


def test_share_reward_counts_the_hidden_tests() -> None:
    environment = FeatureDeletionEnvironment(FeatureDeletionOptions(reward="share"))
    shares = set()
    for index in range(12):
        task = make_task("easy", "train", index)
        for body in task.plausible_wrong_bodies(random.Random(0), count=4):
            environment.reset(index=index)
            seen = act(environment, call("write_body", body=body), call("submit"))
            assert seen.reward == seen.reward_breakdown["passed"] / 6 < 1
            shares.add(seen.reward)
    assert len(shares) > 1, "no partial credit seen"


def test_hidden_cases_never_leave(environment: FeatureDeletionEnvironment) -> None:
    """Not in any observation of any tool, nor in state, tasks or the answer to submit."""
    hidden = [prompts.call_text(TASK.function, case.arguments) for case in TASK.hidden]
    inputs = [repr(case.arguments[0]) for case in TASK.hidden]
    texts = [environment.get_task("train", 5)]
    for body in ("return t", "raise ValueError(t)", "return t +"):
        environment.reset(index=5)
        for calls in ([call("read")], [call("write_body", body=body), call("run_tests")], [call("submit")]):
            texts.append(act(environment, *calls).model_dump_json())
        texts.append(environment.state.model_dump_json())
    for text in map(str, texts):
        assert not any(case in text for case in hidden)
        assert not any(value in text for value in inputs)


@pytest.mark.hacks
@pytest.mark.parametrize(
    "body",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\nreturn Any()",
        "class S(str):\n    def __eq__(self, other): return True\n    __hash__ = None\nreturn S('x')",
        "import json\njson.dumps = lambda value, **rest: '{\"value\": true}'\nreturn 0",
        'import os\nos.write(3, b\'{"value": ""}\\n\' * 6)\nos._exit(0)',
        "import builtins\nbuiltins.compile = None\nreturn t",
        "while True: pass",
        "raise SystemExit('all tests passed')",
        "return True",
    ],
)
def test_cheating_bodies_earn_nothing(body: str) -> None:
    environment = FeatureDeletionEnvironment(
        FeatureDeletionOptions(reward="share", sandbox_cpu_s=0.2, sandbox_wall_s=2)
    )
    environment.reset(index=5)
    seen = act(environment, call("write_body", body=body), call("submit"))
    assert (seen.reward, seen.done, seen.error) == (0.0, True, None)


def test_time_out_is_told_apart() -> None:
    environment = FeatureDeletionEnvironment(FeatureDeletionOptions(sandbox_cpu_s=0.2, sandbox_wall_s=2))
    environment.reset(index=5)
    seen = act(environment, call("write_body", body="while True: pass"), call("run_tests"))
    assert seen.feedback[0]["kind"] == "timeout"
    assert seen.results[1].splitlines()[0] == "form('fbedg'): timed out after 0.2 s"


class BrokenSandbox(Sandbox):
    """A sandbox whose machinery fails."""

    def run(self, *_: Any) -> Any:
        raise SandboxError("the sandbox process ended (-9)")


def test_infrastructure_failure_is_void_and_not_zero() -> None:
    environment = FeatureDeletionEnvironment(FeatureDeletionOptions(), BrokenSandbox(processes=1))
    environment.reset(index=5)
    seen = act(environment, call("submit"))
    assert (seen.reward, seen.done) == (None, True)
    assert seen.error == "sandbox: the sandbox process ended (-9)"


def test_a_fault_of_ours_is_void_and_not_zero(
    environment: FeatureDeletionEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_grade", lambda episode: 1 // 0)
    seen = act(environment, call("submit"))
    assert (seen.reward, seen.done) == (None, True)
    assert seen.error == "ZeroDivisionError: integer division or modulo by zero"


def test_step_before_reset_is_an_error() -> None:
    seen = act(FeatureDeletionEnvironment(FeatureDeletionOptions()), call("submit"))
    assert (seen.reward, seen.error) == (None, "step before reset")


def test_addressing_tasks() -> None:
    environment = FeatureDeletionEnvironment(FeatureDeletionOptions(train_tasks=10))
    assert environment.reset(split="eval", index=3).task_id == "micro-easy-eval-00003"
    assert environment.reset(task_id="micro-easy-eval-00007").task_id == "micro-easy-eval-00007"
    assert environment.reset(seed=13).task_id == "micro-easy-train-00003"
    assert environment.num_tasks("train") == 10
    assert environment.list_tasks("train")[-1] == "micro-easy-train-00009"
    assert [split["name"] for split in environment.list_splits()] == ["train", "eval"]
    with pytest.raises(IndexError, match="there are tasks 0 to 9"):
        environment.reset(index=10)
    with pytest.raises(ValueError, match="there are train, eval"):
        environment.reset(split="test", index=0)
    with pytest.raises(ValueError, match="expected micro-easy-SPLIT-INDEX"):
        environment.reset(task_id="micro-hard-train-00001")
