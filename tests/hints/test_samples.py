"""Targets on their samples: attached, made for them, dropped and counted, written down."""

from __future__ import annotations

import json
from pathlib import Path

from forge_composer.batching.samples import samples_from_rollout
from forge_composer.config.hints import HintsConfig
from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.records import Target
from forge_composer.hints.samples import TargetedSampleBuilder, write_targets
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.types import Rollout, RolloutGroup
from tests.rendering.chat_fixtures import make_renderer
from tests.traces.rollout_fixtures import make_rollout


def wrote(body: str) -> str:
    return f'<tool_call>\n{{"name": "write_body", "arguments": {{"body": "{body}"}}}}\n</tool_call>'


def members(renderer: ChatRenderer, *bodies: tuple[str, str, float]) -> list[Rollout]:
    """Rollouts of two writing turns each, with their rewards."""
    return [
        make_rollout(number, renderer=renderer, script=[wrote(first), wrote(second)], reward=reward)
        for number, (first, second, reward) in enumerate(bodies)
    ]


def builder(renderer: ChatRenderer, max_tokens: int = 4000) -> TargetedSampleBuilder:
    contexts = TeacherContexts(renderer, "user", max_tokens=max_tokens)
    return TargetedSampleBuilder(HintsConfig(), contexts, seed=0)


async def test_samples_get_their_targets() -> None:
    """A trained rollout keeps its sample; another failed one gets a sample that GRPO does not see."""
    renderer = make_renderer()
    group = members(renderer, ("a", "b", 0.0), ("c", "right", 1.0), ("d", "e", 0.0))
    trained = samples_from_rollout(group[0], -0.5)
    found = await builder(renderer).add(trained, [RolloutGroup(0, "t", 0, group)])
    first, *others = found.samples
    assert first is trained[0]
    assert first.policy_gradient
    assert [target.turn for target in first.targets] == [0, 1]
    assert [sample.rollout_id for sample in others] == [group[2].rollout_id]
    assert not others[0].policy_gradient
    assert [target.turn for target in others[0].targets] == [0, 1]
    for sample in found.samples:
        for target in sample.targets:
            assert [sample.token_ids[p] for p in target.positions] == [
                target.teacher_ids[p] for p in target.teacher_positions
            ]
            text = renderer.tokenizer.decode(target.teacher_ids)
            assert "Hint: this body is right:\nright" in text
            assert "Hint" not in renderer.tokenizer.decode(sample.token_ids)
    assert len(found.targets) == 4
    assert found.counts["source/sibling"] == 4
    assert found.counts["skipped/success"] == 1


async def test_groups_without_variance_are_distilled_alone() -> None:
    """Nothing for GRPO; what the environment said is the hint, where the turn's context does not hold it."""
    renderer = make_renderer()
    group = members(renderer, ("a", "b", 0.0), ("c", "d", 0.0))
    found = await builder(renderer).add([], [RolloutGroup(0, "t", 0, group)])
    assert len(found.samples) == 2
    assert not any(sample.policy_gradient for sample in found.samples)
    assert {target.source for target in found.targets} == {"feedback"}


async def test_what_does_not_fit_is_counted() -> None:
    renderer = make_renderer()
    group = members(renderer, ("a", "b", 0.0), ("c", "right", 1.0))
    found = await builder(renderer, max_tokens=30).add([], [RolloutGroup(0, "t", 0, group)])
    assert found.samples == []
    assert found.targets == []
    assert found.counts["misaligned/too long"] == 2


def test_targets_are_written_down(tmp_path: Path) -> None:
    path = tmp_path / "targets.jsonl"
    for step in (1, 2):
        write_targets(path, step, [Target("r0", 1, "test_failed", "Hint: ü", "sibling", 0.5)])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0] == {
        "step": 1,
        "rollout_id": "r0",
        "turn": 1,
        "kind": "test_failed",
        "hint": "Hint: ü",
        "source": "sibling",
        "weight": 0.5,
    }
