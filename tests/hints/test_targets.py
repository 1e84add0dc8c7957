"""Which turns are at fault, each rule, on rollouts of the real environment."""

from __future__ import annotations

import pytest

from forge_composer.config.hints import StyleRule
from forge_composer.envs.feature_deletion import FeatureDeletionEnvironment
from forge_composer.envs.micro_tasks import make_task, trusted_report
from forge_composer.hints.targets import Fault, action_key, faults, last_write, written_action
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.types import Feedback, Rollout
from tests.hints.micro_rollouts import (
    MALFORMED,
    READ,
    RUN,
    SUBMIT,
    call,
    environment,
    play,
    write,
)
from tests.traces.rollout_fixtures import make_rollout

TASK = make_task("easy", "train", 5)
WRONG = 'return t[:-2] + "d"'
"""Fails two of the visible tests."""
FIRST_FAILURE = trusted_report(TASK, WRONG).splitlines()[0]


@pytest.fixture(scope="module")
def env() -> FeatureDeletionEnvironment:
    return environment()


def kinds(rollout: Rollout, **options: object) -> list[tuple[int, str]]:
    succeeded = options.pop("succeeded", rollout.reward == 1.0)
    found = faults(rollout, succeeded=bool(succeeded), **options)  # type: ignore[arg-type]
    return [(fault.turn, fault.kind) for fault in found]


def test_failing_test_in_the_turn_that_wrote_the_body(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(WRONG) + RUN, SUBMIT])
    assert faults(rollout, succeeded=False) == [
        Fault(0, "test_failed", FIRST_FAILURE),
        Fault(0, "low_reward", ""),
    ]


def test_failing_test_reported_later_belongs_to_the_turn_that_wrote(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [READ, write(WRONG), RUN, SUBMIT])
    assert kinds(rollout) == [(1, "test_failed"), (1, "low_reward")]


def test_corrected_turn_is_a_fault_of_a_success(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(WRONG) + RUN, write(TASK.reference_body) + RUN, SUBMIT])
    assert rollout.reward == 1.0
    assert kinds(rollout) == [(0, "test_failed")]


def test_two_wrong_bodies_are_two_faults(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(WRONG) + RUN, write("return t") + RUN, SUBMIT])
    assert kinds(rollout) == [(0, "test_failed"), (1, "test_failed"), (1, "low_reward")]


def test_refused_write_is_not_what_the_tests_ran_on(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(WRONG), call("write_body", text="return t") + RUN, SUBMIT])
    assert kinds(rollout) == [(0, "test_failed"), (0, "low_reward"), (1, "bad_arguments")]
    assert last_write(rollout, 2) == 0


def test_tests_before_anything_was_written_are_no_fault(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [RUN, write(TASK.reference_body) + SUBMIT])
    assert "raised NotImplementedError" in rollout.turns[0].feedback[0].message
    assert kinds(rollout) == []


def test_silent_failure_is_where_it_last_wrote(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(TASK.reference_body), write("return t"), READ, SUBMIT])
    assert rollout.reward == 0.0
    assert faults(rollout, succeeded=False) == [Fault(1, "low_reward", "")]


def test_failure_without_a_write_is_its_last_turn(env: FeatureDeletionEnvironment) -> None:
    assert kinds(play(env, [READ, SUBMIT])) == [(1, "low_reward")]


def test_faults_of_form(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [MALFORMED, call("test"), "It is done.", call("submit", now=True), SUBMIT])
    found = [fault for fault in faults(rollout, succeeded=True) if fault.kind != "low_reward"]
    assert [(fault.turn, fault.kind) for fault in found] == [
        (0, "malformed_call"),
        (1, "unknown_tool"),
        (2, "no_call"),
        (3, "bad_arguments"),
    ]
    assert found[1].message == "unknown tool test: use read, write_body, run_tests or submit"


def test_syntax_error_and_call_after_the_end(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write("return ("), RUN, SUBMIT + READ])
    assert kinds(rollout) == [(0, "syntax_error"), (0, "low_reward"), (2, "episode_over")]


def test_repeated_action(env: FeatureDeletionEnvironment) -> None:
    """A body is repeated whenever it comes again, spelled as it may; a look only if nothing changed."""
    other_spelling = "return  t[:-2] + 'd'"
    script = [READ, READ, write(WRONG), READ, write("return t"), write(other_spelling), RUN, RUN, SUBMIT]
    found = kinds(play(env, script), succeeded=True)
    assert [turn for turn, kind in found if kind == "repeated_action"] == [1, 5, 7]


def test_turn_cut_off_by_its_limit(env: FeatureDeletionEnvironment) -> None:
    """That its call does not parse follows from the cut."""
    rollout = play(env, [MALFORMED, write(TASK.reference_body) + SUBMIT], cut=0)
    assert rollout.turns[0].feedback[0].kind == "malformed_call"
    assert kinds(rollout) == [(0, "truncated_turn")]


def test_style_rules(env: FeatureDeletionEnvironment) -> None:
    rules = [
        StyleRule(name="no_print", pattern=r"\bprint\(", hint="Hint: print nothing."),
        StyleRule(name="quiet", pattern=r"(?i)^sure", hint="Hint: no small talk."),
    ]
    body = f"print(1)\n{TASK.reference_body}"
    rollout = play(env, [READ, "Sure!\n" + write(body) + SUBMIT])
    assert rollout.reward == 1.0
    assert kinds(rollout, style_rules=rules) == [(1, "style/no_print"), (1, "style/quiet")]
    thought = play(env, ["<think>\nprint( is no help\n</think>\n" + write(TASK.reference_body) + SUBMIT])
    assert kinds(thought, style_rules=rules) == []


def test_style_comes_after_what_is_wrong(env: FeatureDeletionEnvironment) -> None:
    rules = [StyleRule(name="short", pattern="t", hint="Hint: x")]
    rollout = play(env, [write(WRONG) + RUN + SUBMIT])
    assert [kind for _, kind in kinds(rollout, style_rules=rules)] == [
        "test_failed",
        "low_reward",
        "style/short",
    ]


def test_remark_that_the_policy_was_not_shown_has_no_message(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(WRONG) + SUBMIT])
    rollout.turns[0].feedback.append(Feedback("test_failed", "form('hidden'): expected 'x', got 'y'"))
    assert faults(rollout, succeeded=False)[0] == Fault(0, "test_failed", "")


def test_each_kind_once_a_turn(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(WRONG) + RUN, RUN, SUBMIT])
    assert sum(len(turn.feedback) for turn in rollout.turns) == 4
    assert kinds(rollout) == [(0, "test_failed"), (0, "low_reward")]


def test_plain_text_answers_where_no_call_is_asked_for() -> None:
    """An environment without `no_call`: text is what was written."""
    rollout = make_rollout(script=["first", "second"], reward=0.0)
    for turn in rollout.turns:
        turn.feedback = []
    assert kinds(rollout) == [(1, "low_reward")]
    written = written_action(rollout.turns[1])
    assert written is not None
    assert written.text == "second"


def test_what_a_turn_wrote_last(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write("return 1") + RUN + write("return 2") + SUBMIT])
    written = written_action(rollout.turns[0])
    assert written is not None
    assert [c.arguments for c in written.tool_calls] == [{"body": "return 2"}]
    assert written_action(play(env, [RUN, SUBMIT]).turns[0]) is None


def test_rollout_without_turns() -> None:
    rollout = make_rollout()
    rollout.turns = []
    assert faults(rollout, succeeded=False) == []


def test_action_key() -> None:
    def key(text: str) -> str:
        return action_key(parse_action(text))

    assert key(write("return 1")) == key(write("return (1)"))
    assert key(write("return 1")) != key(write("return 2"))
    assert key(MALFORMED) == key(MALFORMED) != key(MALFORMED + "x")
