"""Which steps a trace has, which of them fail, and which are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.steps import (
    StepState,
    choose_steps,
    conversation_is_replayed,
    rollout_is_replayed,
    steps_of_conversation,
    steps_of_rollout,
)
from forge_composer.rendering.tool_calls import to_message
from forge_composer.traces.formats.chat import read_chat
from forge_composer.traces.formats.files import conversation_from_rollout
from forge_composer.types import Feedback, ParsedAction, Rollout, RolloutStatus
from tests.preferences.replayed import calling, state
from tests.rendering.chat_fixtures import make_renderer
from tests.rollout.micro_episodes import (
    RIGHT,
    SUBMIT,
    WRONG,
    MicroEnvironments,
    Policy,
    call,
    episode,
    make_runner,
    turns,
    write,
)
from tests.traces.rollout_fixtures import make_rollout


async def recorded(*script: str) -> Rollout:
    renderer = make_renderer()
    runner = make_runner(renderer, MicroEnvironments(), max_turns=6)
    return await runner.run(episode(), Policy(renderer, turns(*script)))


async def failing(*script: str) -> list[int]:
    return [step.step for step in steps_of_rollout(await recorded(*script)) if step.failing]


async def test_steps_of_a_rollout_are_what_the_policy_had() -> None:
    rollout = await recorded(write(WRONG), write(RIGHT), SUBMIT)
    steps = steps_of_rollout(rollout)
    assert [step.step_id for step in steps] == [f"train-000001-000#{number}" for number in range(3)]
    for step, turn in zip(steps, rollout.turns, strict=True):
        assert step.prompt_ids == tuple(turn.prompt_ids)
        assert step.completion_ids == tuple(turn.completion_ids)
        assert (step.action, step.tools, step.rollout) == (turn.action, rollout.tools, rollout)
        assert (step.surprise, step.version, step.temperature) == (0.25, 7, 0.8)
    renderer = make_renderer()
    history = renderer.tokenizer.decode(renderer.initial_ids(steps[2].messages, steps[2].tools))
    seen = renderer.tokenizer.decode(rollout.turns[2].prompt_ids)
    assert history.replace("</tool_call>\n<tool_call>", "</tool_call><tool_call>") == seen
    assert steps[0].messages == rollout.messages
    assert steps[1].messages[len(rollout.messages)] == to_message(rollout.turns[0].action)


async def test_failing_steps() -> None:
    assert await failing(write(WRONG), write(RIGHT), SUBMIT) == [0]
    assert await failing(write(RIGHT), SUBMIT) == []
    # A failed trace: its last step, and the one that wrote what was graded.
    assert await failing(call("write_body", body=WRONG), SUBMIT) == [0, 1]
    # A failing test is held against the turn that wrote the code.
    assert await failing(call("write_body", body=WRONG), call("run_tests"), write(RIGHT), SUBMIT) == [0, 1]
    assert await failing("<tool_call>\n{nonsense", write(RIGHT), SUBMIT) == [0]
    assert await failing(call("write_file", body=RIGHT), write(RIGHT), SUBMIT) == [0]


def test_unknown_numbers_stay_unknown() -> None:
    rollout = make_rollout(0)
    rollout.turns[0].logprobs[1] = float("nan")
    rollout.turns[1].versions[0] = -1
    rollout.info = {}
    first, second = steps_of_rollout(rollout)
    assert (first.surprise, first.version, first.temperature) == (None, 3, 1.0)
    assert second.version == -1
    assert second.surprise == pytest.approx(-sum(rollout.turns[1].logprobs) / len(rollout.turns[1].logprobs))


def test_steps_of_a_conversation() -> None:
    rollout = make_rollout(2, reward=0.0)
    conversation = conversation_from_rollout(rollout)
    for step, theirs in zip(steps_of_conversation(conversation), steps_of_rollout(rollout), strict=True):
        assert (step.prompt_ids, step.completion_ids) == (theirs.prompt_ids, theirs.completion_ids)
        assert (step.action, step.messages, step.tools) == (theirs.action, theirs.messages, theirs.tools)
        assert step.surprise == pytest.approx(theirs.surprise)
        assert (step.rollout, step.version) == (None, -1)
    assert [step.failing for step in steps_of_conversation(conversation)] == [False, True, True]
    conversation.reward = 1.0
    assert [step.failing for step in steps_of_conversation(conversation)] == [False, True, False]
    conversation.reward = None
    assert [step.failing for step in steps_of_conversation(conversation)] == [False, True, False]
    plain = read_chat({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    (step,) = steps_of_conversation(plain)
    assert (step.prompt_ids, step.completion_ids, step.surprise) == (None, None, None)
    assert (step.messages, step.action.text) == ([{"role": "user", "content": "q"}], "a")


@pytest.mark.parametrize(
    ("reward", "which", "taken"),
    [(0.0, "failed", True), (0.5, "failed", True), (1.0, "failed", False), (1.0, "all", True)],
)
def test_which_traces(reward: float, which: Any, taken: bool) -> None:
    config = ReplayConfig(traces=which)
    assert rollout_is_replayed(make_rollout(reward=reward), config) is taken
    conversation = conversation_from_rollout(make_rollout(reward=reward))
    assert conversation_is_replayed(conversation, config) is taken


def test_void_and_unknown_traces() -> None:
    void = make_rollout(reward=None, status=RolloutStatus.FAILED)
    assert not rollout_is_replayed(void, ReplayConfig(traces="all"))
    assert not rollout_is_replayed(dataclasses.replace(make_rollout(), turns=[]), ReplayConfig(traces="all"))
    conversation = conversation_from_rollout(make_rollout())
    conversation.reward = None
    assert conversation_is_replayed(conversation, ReplayConfig())
    conversation.steps = []
    assert not conversation_is_replayed(conversation, ReplayConfig(traces="all"))


def some(*surprise: float | None, failing: tuple[int, ...] = (), trace: str = "a") -> list[StepState]:
    return [
        state(calling("read"), number, trace, surprise=value, failing=number in failing)
        for number, value in enumerate(surprise)
    ]


def chosen(steps: list[StepState], /, **options: Any) -> list[tuple[str, int]]:
    return [(step.trace, step.step) for step in choose_steps(steps, ReplayConfig(**options))]


def test_choices() -> None:
    steps = some(0.1, 0.9, None, 0.5, 0.9, failing=(1, 4))
    numbers = {
        "all": [0, 1, 2, 3, 4],
        "every": [0, 2, 4],
        "failing": [1, 4],
        "entropy": [1],
    }
    for which, expected in numbers.items():
        assert chosen(steps, steps=which) == [("a", number) for number in expected], which
    assert chosen(steps, steps="every", every=3) == [("a", 0), ("a", 3)]
    assert chosen(steps, steps="entropy", entropy_share=0.75) == [("a", 1), ("a", 3), ("a", 4)]
    assert chosen(steps, steps="entropy", entropy_share=0.5) == [("a", 1), ("a", 4)]
    assert chosen(steps, steps="all", max_steps_per_trace=2) == [("a", 0), ("a", 1)]
    assert chosen(some(None, None), steps="entropy") == []


def test_a_share_of_seven_hundredths_of_a_hundred_is_seven() -> None:
    assert 0.07 * 100 > 7  # in floats
    steps = some(*map(float, range(100)))
    assert chosen(steps, steps="entropy", entropy_share=0.07) == [("a", number) for number in range(93, 100)]
    assert len(chosen(steps, steps="entropy", entropy_share=0.071)) == 8
    assert len(chosen(steps, steps="entropy", entropy_share=0.0001)) == 1


def test_traces_are_chosen_from_one_by_one() -> None:
    mixed = [*some(0.1, 0.2, trace="b"), *some(5.0, 6.0, trace="a")]
    assert chosen(mixed, steps="entropy") == [("b", 1), ("a", 1)]
    assert chosen(mixed[::-1], steps="all", max_steps_per_trace=1) == [("a", 0), ("b", 0)]


def test_feedback_alone_is_a_complaint() -> None:
    rollout = make_rollout(0)
    for turn in rollout.turns:
        turn.feedback = []
    assert not any(step.failing for step in steps_of_rollout(rollout))
    rollout.turns[0].feedback = [Feedback("slow", "that took long")]
    assert [step.failing for step in steps_of_rollout(rollout)] == [True, False]
    rollout.turns[1].action = ParsedAction("", error="no JSON")
    assert [step.failing for step in steps_of_rollout(rollout)] == [True, True]
