"""Rollouts of micro tasks, played in the real environment and its sandbox from scripted text. No tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from forge_composer.envs import prompts
from forge_composer.envs.feature_deletion import (
    FeatureDeletionAction,
    FeatureDeletionEnvironment,
    FeatureDeletionOptions,
)
from forge_composer.envs.micro_tasks import MicroTask
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.types import Feedback, FinishReason, Rollout, RolloutGroup, RolloutStatus, Turn

MALFORMED = '<tool_call>\n{"name": "write_body", "arguments": {"body": "return 1"\n</tool_call>'


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write(body: str) -> str:
    return call("write_body", body=body)


RUN, SUBMIT, READ = call("run_tests"), call("submit"), call("read")


def environment() -> FeatureDeletionEnvironment:
    return FeatureDeletionEnvironment(FeatureDeletionOptions())


def play(
    env: FeatureDeletionEnvironment,
    script: Sequence[str],
    *,
    task_index: int = 5,
    group_id: int = 0,
    index: int = 0,
    cut: int | None = None,
) -> Rollout:
    """An episode as an `EpisodeRunner` would leave it; turn `cut` ran into its token limit."""
    start = env.reset(index=task_index)
    rollout = Rollout(
        rollout_id=f"train-{group_id:06d}-{index:03d}",
        group_id=group_id,
        index=index,
        task_id=start.task_id,
        seed=index,
        messages=start.messages,  # type: ignore[arg-type]
        tools=start.tools,
        status=RolloutStatus.COMPLETED,
    )
    for number, text in enumerate(script):
        action = parse_action(text)
        calls = [{"name": c.name, "arguments": c.arguments} for c in action.tool_calls]
        last = number + 1 == len(script)
        answer = env.step(FeatureDeletionAction(calls=calls, error=action.error, finish=last))  # type: ignore[arg-type]
        assert answer.error is None
        reason: FinishReason = "length" if number == cut else "stop"
        turn = Turn([], [], [], [], reason, action, observations=list(answer.results))
        turn.feedback = [Feedback(**remark) for remark in answer.feedback]
        rollout.turns.append(turn)
        if answer.done:
            rollout.reward = float(answer.reward)
            break
    return rollout


def group_of(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(rollouts[0].group_id, rollouts[0].task_id, 0, list(rollouts))


def failing_scripts(task: MicroTask, rng: random.Random) -> list[list[str]]:
    """Ways to fail a task: each kind of remark, in the first turn and later, alone and after others."""
    wrong = [*task.plausible_wrong_bodies(rng, 2), "return None", "return 1 // 0"]
    first, second = rng.sample(wrong, 2)
    return [
        [write(first) + RUN, SUBMIT],
        [write(first), RUN, write(second) + RUN + SUBMIT],
        [write(first) + SUBMIT],
        [READ, READ, write(first) + RUN, write(first) + RUN, SUBMIT],
        [write("return ("), RUN, SUBMIT],
        [call("test"), write(first), call("write_body", text=second), RUN],
        [MALFORMED, "I think it is done.", SUBMIT],
        [RUN, RUN, write(second) + RUN, SUBMIT + READ],
    ]


def shown_texts(group: RolloutGroup) -> list[str]:
    """Everything that the policy was given or wrote in a group."""
    texts = [prompts.SYSTEM_PROMPT]
    for rollout in group.rollouts:
        texts += [message["content"] for message in rollout.messages]
        for turn in rollout.turns:
            texts += [turn.action.text, *turn.observations]
            texts += [str(value) for c in turn.action.tool_calls for value in c.arguments.values()]
    return texts
