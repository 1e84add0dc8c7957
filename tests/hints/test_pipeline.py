"""From a group to its targets: routing, who says what, limits, weights."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from forge_composer.config.hints import HintsConfig
from forge_composer.hints import texts
from forge_composer.hints.pipeline import HintPipeline, HintResult
from forge_composer.hints.records import Target
from forge_composer.hints.sources import make_sources
from forge_composer.types import Feedback, ParsedAction, Rollout, RolloutGroup, RolloutStatus, ToolCall, Turn
from tests.rendering.chat_fixtures import TOOLS


def turn(
    *calls: tuple[str, dict[str, Any]], text: str = "", feedback: list[Feedback] | None = None, **fields: Any
) -> Turn:
    action = ParsedAction(
        text, tuple(ToolCall(f"call_{i}", name, args) for i, (name, args) in enumerate(calls))
    )
    return Turn(
        [1, 2],
        [3],
        [-0.5],
        [0],
        fields.pop("finish_reason", "stop"),
        action,
        feedback=feedback or [],
        **fields,
    )


def wrote(body: str, *kinds: str) -> Turn:
    """A turn that writes a body and runs the tests."""
    remarks = [Feedback(kind, f"said {kind}") for kind in kinds]
    answers = ["ok", "\n".join(remark.message for remark in remarks)]
    return turn(("write_body", {"body": body}), ("run_tests", {}), feedback=remarks, observations=answers)


SUBMIT = turn(("submit", {}))


def rollout(number: int, reward: float | None, *turns: Turn) -> Rollout:
    return Rollout(
        rollout_id=f"r{number}",
        group_id=0,
        index=number,
        task_id="t",
        seed=0,
        messages=[],
        tools=TOOLS,
        turns=list(turns),
        status=RolloutStatus.COMPLETED,
        reward=reward,
    )


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(0, "t", 0, list(rollouts))


def targets(*rollouts: Rollout, seed: int = 0, **options: Any) -> HintResult:
    config = HintsConfig(**options)
    return asyncio.run(HintPipeline(config, make_sources(config), seed).targets_for(group(*rollouts)))


GOOD = rollout(1, 1.0, wrote("return 1"), SUBMIT)


def test_a_sibling_shows_what_was_right() -> None:
    found = targets(rollout(0, 0.0, wrote("return 0", "test_failed"), SUBMIT), GOOD)
    assert found.targets == [Target("r0", 0, "test_failed", "Hint: this body is right:\nreturn 1", "sibling")]
    assert found.counts == {"kind/test_failed": 1, "source/sibling": 1, "skipped/success": 1}


def test_an_example_that_says_what_the_turn_said_is_none() -> None:
    """The only success wrote the same: the environment's feedback is what is left."""
    found = targets(rollout(0, 0.0, wrote("return  1", "test_failed"), SUBMIT), GOOD)
    assert [(t.source, t.hint) for t in found.targets] == [
        ("feedback", "Hint: an earlier attempt failed: said test_failed")
    ]


def test_a_success_is_left_to_the_policy_gradient() -> None:
    fumbled = rollout(2, 1.0, wrote("return 0", "test_failed"), wrote("return 1"), SUBMIT)
    assert targets(fumbled, GOOD).targets == []
    (target,) = targets(fumbled, GOOD, routing="all").targets
    assert (target.rollout_id, target.turn, target.source) == ("r2", 0, "sibling")


def test_nobody_to_learn_from() -> None:
    """All failed, nothing was said: no hint, counted. Unscored rollouts are no targets."""
    found = targets(rollout(0, 0.0, wrote("a"), SUBMIT), rollout(1, None, wrote("b"), SUBMIT))
    assert found.targets == []
    assert found.counts == {"no_hint": 1, "skipped/no_reward": 1}


@pytest.mark.parametrize("kind", list(texts.TEMPLATES))
def test_templates(kind: str) -> None:
    """Faults of form get a reminder, also where a sibling succeeded; no placeholder is left."""
    said = "expected body, got text"
    bad = turn(("write_body", {"body": "x"}), feedback=[Feedback(kind, said)], observations=[said])
    (target,) = targets(rollout(0, 0.0, bad), GOOD).targets
    assert target.source == "template"
    assert "{" not in target.hint.replace('{"', "")
    if "{tools}" in texts.TEMPLATES[kind]:
        assert TOOLS[0]["function"]["name"] in target.hint


def test_order_of_sources() -> None:
    failed = rollout(0, 0.0, wrote("return 0", "test_failed"))
    (target,) = targets(failed, GOOD, sources=("feedback", "sibling")).targets
    assert target.source == "feedback"


def test_other_actions_are_shown_as_they_are() -> None:
    talker = rollout(1, 1.0, turn(text="It is 4."))
    mover = rollout(1, 1.0, turn(("move", {"x": 1, "y": 2})))
    failed = rollout(0, 0.0, turn(text="It is 5."))
    assert targets(failed, talker).targets[0].hint == "Hint: this action was right:\nIt is 4."
    shown = targets(failed, mover).targets[0].hint.removeprefix("Hint: this action was right:\n")
    assert json.loads(shown) == {"name": "move", "arguments": {"x": 1, "y": 2}}


def test_limits() -> None:
    many = rollout(0, 0.0, *(wrote(str(i), "test_failed") for i in range(5)))
    found = targets(many, GOOD, max_targets_per_rollout=3)
    assert [target.turn for target in found.targets] == [0, 1, 2]
    assert found.counts["over_limit"] == 2
    assert targets(many, GOOD, ignore=("test_failed", "low_reward")).targets == []
    (short, *_) = targets(many, GOOD, max_hint_chars=25).targets
    assert short.hint == "Hint: an earlier attempt"  # half a demonstration would say something wrong


def test_weight_by_success() -> None:
    """sqrt(p (1 - p)): one of four; nothing where nobody or everybody succeeds."""
    failed = [rollout(i, 0.0, wrote("return 0", "test_failed")) for i in (0, 2, 3)]
    found = targets(*failed, GOOD, weight_by_success=True)
    assert {target.weight for target in found.targets} == {math.sqrt(0.25 * 0.75)}
    assert targets(*failed, weight_by_success=True).targets == []


def test_examples_are_random_and_repeatable() -> None:
    successes = [rollout(i, 1.0, wrote(f"return {'1' * i}")) for i in range(1, 6)]
    failed = rollout(0, 0.0, wrote("return 0", "test_failed"))
    hints = [targets(failed, *successes, seed=seed).targets[0].hint for seed in range(40)]
    assert len(set(hints)) == 5
    assert hints == [targets(failed, *successes, seed=seed).targets[0].hint for seed in range(40)]
