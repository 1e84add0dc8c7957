"""Rollouts as an episode makes them, from scripted text, for tests of traces and metrics."""

from __future__ import annotations

import random
from typing import Any

from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import parse_action, to_message
from forge_composer.rollout.episode import observation_messages
from forge_composer.types import Feedback, Message, Rollout, RolloutStatus, Turn
from tests.rendering.chat_fixtures import TOOLS, make_renderer

START = [Message(role="system", content="You fix code."), Message(role="user", content="Fix add. ü ✓")]
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "x": [1, 2.5, null]}}\n</tool_call>'
SCRIPTS = [
    [CALL, CALL],
    ["<think>\noff by one\n</think>\n\n" + CALL, "I am done."],
    [CALL + "\n" + CALL, '<tool_call>\n{"name": \n</tool_call>', CALL],
    ["no call\u2028 at all"],
]


def make_rollout(
    number: int = 0,
    *,
    renderer: ChatRenderer | None = None,
    script: list[str] | None = None,
    reward: float | None = 1.0,
    status: RolloutStatus = RolloutStatus.COMPLETED,
    versions: tuple[int, int] = (3, 4),
    info: dict[str, Any] | None = None,
) -> Rollout:
    """A rollout whose ids are what the renderer and its tokenizer give."""
    renderer = renderer or make_renderer()
    draw = random.Random(number)
    rollout = Rollout(
        rollout_id=f"train-{number // 8:06d}-{number % 8:03d}",
        group_id=number // 8,
        index=number % 8,
        task_id=f"micro-{number}",
        seed=draw.getrandbits(31),
        messages=list(START),
        tools=TOOLS,
        status=status,
        reward=reward,
        reward_breakdown={"hidden_tests": reward or 0.0},
        error=None if reward is not None else "environment: gone",
        started_at=1_790_000_000.25 + number,
        ended_at=1_790_000_003.5 + number,
        info=info if info is not None else {"temperature": 1.0, "task_index": number},
    )
    history, prompt, opens = list(START), renderer.initial_ids(START, TOOLS), True
    for text in script or SCRIPTS[number % len(SCRIPTS)]:
        ids = [*renderer.tokenizer.encode(text, add_special_tokens=False), renderer.turn_end_ids[0]]
        half = len(ids) // 2
        turn = Turn(
            prompt_ids=prompt,
            completion_ids=ids,
            logprobs=[-draw.random() for _ in ids],
            versions=[versions[0]] * half + [versions[1]] * (len(ids) - half),
            finish_reason="stop",
            action=parse_action(renderer.decode(ids)),
            feedback=[Feedback("test_failed", "add(2, 3): expected 5, got -1", {"expected": 5, "got": [-1]})],
            generate_s=draw.random(),
            environment_s=draw.random(),
            opens_sample=opens,
        )
        turn.observations = ["add(2, 3): expected 5, got -1\n"] * max(1, len(turn.action.tool_calls))
        rollout.turns.append(turn)
        history.append(to_message(turn.action))
        answers = observation_messages(turn)
        suffix = renderer.continuation_ids(history, answers, TOOLS)
        history.extend(answers)
        opens = suffix is None
        prompt = renderer.rerender_ids(history, TOOLS) if suffix is None else [*prompt, *ids, *suffix]
    return rollout
