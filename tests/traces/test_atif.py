"""Rollout -> ATIF trajectory -> the same rollout."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from atif import Trajectory

from forge_composer.traces.atif import (
    TraceFormatError,
    rollout_from_trajectory,
    trajectory_from_rollout,
    validate,
)
from forge_composer.traces.verify import verify_rollout
from forge_composer.types import Message, Rollout, RolloutStatus
from tests.rendering.chat_fixtures import STRIPS_ALL_EARLIER, make_renderer
from tests.traces.rollout_fixtures import SCRIPTS, make_rollout


def through_json(rollout: Rollout) -> Rollout:
    return rollout_from_trajectory(json.loads(json.dumps(trajectory_from_rollout(rollout), allow_nan=False)))


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_rollout_comes_back_equal(number: int) -> None:
    rollout = make_rollout(number)
    assert through_json(rollout) == rollout


def test_failed_and_unscored_rollouts_come_back_equal() -> None:
    failed = make_rollout(reward=None, status=RolloutStatus.FAILED)
    assert through_json(failed) == failed
    before_first_message = Rollout("r", 1, 2, "", 3, [], [], error="no server", started_at=1.0)
    document = trajectory_from_rollout(before_first_message)
    assert len(document["steps"]) == 1  # ATIF wants a step
    assert rollout_from_trajectory(document) == before_first_message


def test_demonstrations_in_the_start_come_back_equal() -> None:
    rollout = make_rollout()
    call: dict[str, Any] = {
        "id": "c",
        "type": "function",
        "function": {"name": "read", "arguments": {"n": 1}},
    }
    rollout.messages += [
        Message(role="assistant", content="", tool_calls=[call], reasoning_content="hm"),
        Message(role="tool", content="ok", tool_call_id="c", name="read"),
        Message(role="user", content="now you", name="someone"),
    ]
    assert through_json(rollout) == rollout


def test_numbers_that_json_lacks() -> None:
    rollout = make_rollout(info={"ratio": math.inf})
    rollout.turns[0].logprobs[1] = -math.inf
    document = trajectory_from_rollout(rollout)
    metrics = document["steps"][2]["metrics"]
    assert "logprobs" not in metrics  # ATIF's field holds numbers only
    assert metrics["extra"]["forge_composer"]["logprobs"][1] == {"$float": "-inf"}
    assert through_json(rollout) == rollout
    rollout.reward = math.nan
    back = through_json(rollout).reward
    assert back is not None
    assert math.isnan(back)


def test_atif_fields_mean_what_atif_says() -> None:
    rollout = make_rollout(2)
    document = trajectory_from_rollout(rollout, run="demo", model="tiny", sampling={"top_p": 1.0})
    trajectory = Trajectory.model_validate(document)
    assert trajectory.schema_version == "ATIF-v1.8"
    assert (trajectory.session_id, trajectory.trajectory_id) == ("demo", rollout.rollout_id)
    assert (trajectory.agent.name, trajectory.agent.model_name) == ("forge_composer", "tiny")
    assert trajectory.agent.tool_definitions == rollout.tools
    assert [step.source for step in trajectory.steps] == ["system", "user", "agent", "agent", "agent"]
    assert trajectory.steps[0].timestamp == "2026-09-21T14:13:22.250000+00:00"
    first, second = rollout.turns[:2]
    step = trajectory.steps[2]
    assert step.metrics is not None
    assert step.tool_calls is not None
    assert step.observation is not None
    assert step.metrics.prompt_token_ids == first.prompt_ids
    assert step.metrics.completion_token_ids == first.completion_ids
    assert step.metrics.logprobs == first.logprobs
    assert step.metrics.prompt_tokens == len(first.prompt_ids)
    assert [call.function_name for call in step.tool_calls] == ["read", "read"]
    assert [r.source_call_id for r in step.observation.results] == ["call_0", "call_1"]
    following = trajectory.steps[3].metrics
    assert following is not None
    assert following.prompt_token_ids is None  # the whole prompt or nothing
    assert following.prompt_tokens == len(second.prompt_ids)
    assert following.extra is not None
    suffix = following.extra["forge_composer"]["prompt_suffix_ids"]
    assert [*first.prompt_ids, *first.completion_ids, *suffix] == second.prompt_ids
    assert trajectory.final_metrics is not None
    assert trajectory.final_metrics.total_completion_tokens == rollout.completion_tokens
    extra = document["extra"]["forge_composer"]
    assert (extra["reward"], extra["policy_version_min"], extra["policy_version_max"]) == (1.0, 3, 4)
    half = len(first.completion_ids) // 2
    runs = document["steps"][2]["metrics"]["extra"]["forge_composer"]["policy_versions"]
    assert runs == [[3, half], [4, len(first.completion_ids) - half]]


def test_a_turn_that_opens_a_sample_has_its_whole_prompt() -> None:
    renderer = make_renderer(STRIPS_ALL_EARLIER)
    rollout = make_rollout(1, renderer=renderer)
    assert [turn.opens_sample for turn in rollout.turns] == [True, True]
    steps = trajectory_from_rollout(rollout)["steps"]
    assert [s["metrics"]["prompt_token_ids"] for s in steps[2:]] == [t.prompt_ids for t in rollout.turns]
    assert through_json(rollout) == rollout


def test_foreign_newer_and_broken_documents_are_refused() -> None:
    document = trajectory_from_rollout(make_rollout())
    with pytest.raises(TraceFormatError, match="not written by forge_composer"):
        rollout_from_trajectory({**document, "extra": None})
    newer = {"forge_composer": {**document["extra"]["forge_composer"], "version": 99}}
    with pytest.raises(TraceFormatError, match="reads up to 1"):
        rollout_from_trajectory({**document, "extra": newer})
    with pytest.raises(TraceFormatError, match="incomplete: KeyError\\('group_id'\\)"):
        rollout_from_trajectory({**document, "extra": {"forge_composer": {"version": 1}}})
    with pytest.raises(TraceFormatError, match=r"steps: .*sequential|not sequential"):
        validate({**document, "steps": list(reversed(document["steps"]))})


@pytest.mark.parametrize("template", [None, STRIPS_ALL_EARLIER])
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_rendering_again_gives_the_recorded_ids(number: int, template: str | None) -> None:
    renderer = make_renderer(template) if template else make_renderer()
    assert verify_rollout(through_json(make_rollout(number, renderer=renderer)), renderer) == []


def test_rendering_again_finds_every_kind_of_difference() -> None:
    renderer = make_renderer()
    rollout = make_rollout(0)
    rollout.turns[1].prompt_ids[-1] += 1
    rollout.turns[1].opens_sample = True
    rollout.turns[0].action = dataclasses.replace(rollout.turns[0].action, error="made up")
    found = verify_rollout(rollout, renderer)
    assert [(m.turn, m.what) for m in found] == [(0, "action"), (1, "prompt_ids"), (1, "opens_sample")]
    last = len(rollout.turns[1].prompt_ids) - 1
    assert f"they part at {last}" in str(found[1])
    other = make_renderer(STRIPS_ALL_EARLIER)
    kept = make_rollout(1)
    assert [(m.turn, m.what) for m in verify_rollout(kept, other)] == [(1, "prompt_ids"), (1, "opens_sample")]
