"""Episodes with a scripted sampler and environment: tokens are the truth, failures are not zeros."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "rendering"))
from chat_fixtures import KEEPS_ALL, STRIPS_ALL_EARLIER, make_renderer

from forge_composer.batching.samples import samples_from_rollout
from forge_composer.config.schema import GRPOConfig, RolloutConfig
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rollout.episode import EpisodeRunner, EpisodeSpec, TokenLimits, derived_seed
from forge_composer.rollout.groups import GroupSpec, advantages_of, run_group
from forge_composer.types import (
    Completion,
    EpisodeStart,
    EpisodeStep,
    Message,
    ParsedAction,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SamplingRequest,
)

CALL = '<tool_call>\n{"name": "run", "arguments": {"n": 1}}\n</tool_call>'
LIMITS = TokenLimits(
    max_turn_tokens=200, max_prompt_tokens=400, max_completion_tokens=400, max_model_len=2000
)


class Scripted:
    """A sampler that says the given texts, and an environment that answers and grades."""

    def __init__(self, renderer: ChatRenderer, turns: Sequence[str], **options: Any) -> None:
        self.renderer, self.turns, self.options = renderer, list(turns), options
        self.requests: list[SamplingRequest] = []
        self.finishes: list[bool] = []
        self.ended: list[str] = []
        self.failures = options.get("failures", 0)

    async def generate(self, request: SamplingRequest) -> Completion:
        text = self.turns[len(self.requests) % len(self.turns)]
        self.requests.append(request)
        ids = self.renderer.tokenizer.encode(text, add_special_tokens=False)
        reason = "length" if text == "cut" else "stop"
        if reason == "stop":
            ids = [*ids, self.renderer.turn_end_ids[0]]
        return Completion(request.request_id, ids, [-0.25] * len(ids), [7] * len(ids), reason)

    async def start(self, rollout_id: str, *, index: int, split: str, seed: int) -> EpisodeStart:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the server is gone")
        return EpisodeStart(f"t-{split}-{index}", [Message(role="user", content="begin")], [])

    async def step(self, rollout_id: str, action: ParsedAction, *, finish: bool) -> EpisodeStep:
        self.finishes.append(finish)
        done = finish or any(call.name == "submit" for call in action.tool_calls)
        if self.options.get("broken"):
            return EpisodeStep([], None, True, error="sandbox unavailable")
        return EpisodeStep(["2 passed"] * max(1, len(action.tool_calls)), 1.0 if done else None, done)

    async def end(self, rollout_id: str) -> None:
        self.ended.append(rollout_id)


def spec(**changes: Any) -> EpisodeSpec:
    values = {"rollout_id": "train-000001-000", "group_id": 1, "index": 0, "task_index": 5, "split": "train"}
    return EpisodeSpec(**(values | {"seed": 3, "temperature": 1.0} | changes))


async def play(
    turns: Sequence[str], template: str = KEEPS_ALL, limits: TokenLimits = LIMITS, **options: Any
) -> tuple[Rollout, Scripted]:
    renderer = make_renderer(template)
    scripted = Scripted(renderer, turns, **options)
    runner = EpisodeRunner(renderer, scripted, RolloutConfig(max_turns=3), limits)
    return await runner.run(spec(), scripted), scripted


async def test_each_prompt_is_the_exact_tokens_before_it_and_the_rendered_answer() -> None:
    rollout, scripted = await play([CALL, "no change", CALL])
    assert rollout.status is RolloutStatus.TRUNCATED_TURNS
    assert (rollout.reward, scripted.finishes) == (1.0, [False, False, True])
    first, second, third = rollout.turns
    for before, after in ((first, second), (second, third)):
        known = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(known)] == known
        assert not after.opens_sample
        assert "2 passed" in scripted.renderer.tokenizer.decode(after.prompt_ids[len(known) :])
    (sample,) = samples_from_rollout(rollout, 0.5)
    trained = [i for i, own in zip(sample.token_ids, sample.action_mask, strict=True) if own]
    assert trained == first.completion_ids + second.completion_ids + third.completion_ids


async def test_a_template_that_strips_thinking_opens_a_new_sample() -> None:
    thought = f"<think>\nhm\n</think>\n\n{CALL}"
    rollout, scripted = await play([thought, CALL, CALL], STRIPS_ALL_EARLIER)
    assert [turn.opens_sample for turn in rollout.turns] == [True, True, False]
    assert "hm" not in scripted.renderer.tokenizer.decode(rollout.turns[1].prompt_ids)
    samples = samples_from_rollout(rollout, 1.0)
    assert len(samples) == 2
    assert sum(map(sum, (sample.action_mask for sample in samples))) == rollout.completion_tokens


async def test_submitting_completes_and_a_cut_turn_truncates() -> None:
    submit = CALL.replace("run", "submit")
    rollout, _ = await play([CALL, submit])
    assert (rollout.status, len(rollout.turns), rollout.reward) == (RolloutStatus.COMPLETED, 2, 1.0)
    rollout, scripted = await play([CALL, "cut"])
    assert (rollout.status, rollout.truncated, rollout.reward) == (RolloutStatus.TRUNCATED_LENGTH, True, 1.0)
    assert scripted.finishes == [False, True]


async def test_budgets_bound_every_request() -> None:
    limits = TokenLimits(
        max_turn_tokens=100, max_prompt_tokens=400, max_completion_tokens=60, max_model_len=2000
    )
    rollout, scripted = await play([CALL, CALL, CALL], limits=limits)
    rooms = [request.max_new_tokens for request in scripted.requests]
    size = len(rollout.turns[0].completion_ids)
    assert rooms == [60 - size * k for k in range(len(rooms))]
    assert rollout.status in (RolloutStatus.TRUNCATED_LENGTH, RolloutStatus.TRUNCATED_TURNS)
    assert rollout.reward == 1.0


@pytest.mark.parametrize(
    ("options", "limits", "reason"),
    [
        ({"failures": 1}, LIMITS, "the server is gone"),
        ({"broken": True}, LIMITS, "sandbox unavailable"),
        ({}, TokenLimits(100, 2, 100, 2000), "rollout.max_prompt_tokens = 2"),
    ],
)
async def test_a_failed_episode_has_no_reward_and_says_why(
    options: dict[str, Any], limits: TokenLimits, reason: str
) -> None:
    rollout, scripted = await play([CALL], limits=limits, **options)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert reason in str(rollout.error)
    assert scripted.ended == [rollout.rollout_id]


async def test_void_rollouts_are_run_again_with_the_same_seed_and_every_attempt_is_recorded() -> None:
    renderer = make_renderer(KEEPS_ALL)
    scripted = Scripted(renderer, [CALL.replace("run", "submit")], failures=1)
    runner = EpisodeRunner(renderer, scripted, RolloutConfig(), LIMITS)
    recorded: list[Rollout] = []
    group_spec = GroupSpec("train", 4, 9, "train", 2, 11, 0.7, 3)
    group = await run_group(group_spec, runner, scripted, retries=1, record=recorded.append)
    assert sorted(r.rollout_id for r in recorded) == [
        "train-000004-000", "train-000004-000.1", "train-000004-001"
    ]  # fmt: skip
    assert group.rewards == [1.0, 1.0]
    assert [r.seed for r in group.rollouts] == [derived_seed(11, "train", 4, i) for i in (0, 1)]
    assert len({request.seed for request in scripted.requests}) == 2
    assert {request.temperature for request in scripted.requests} == {0.7}


def group_of(*members: tuple[float | None, RolloutStatus]) -> RolloutGroup:
    rollouts = [
        Rollout(f"r{i}", 0, i, "t", 0, [], [], status=status, reward=reward)
        for i, (reward, status) in enumerate(members)
    ]
    return RolloutGroup(0, "t", 0, rollouts)


def test_truncated_rollouts_are_kept_masked_or_penalised() -> None:
    done, cut, failed = RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED_LENGTH, RolloutStatus.FAILED
    group = group_of((1.0, done), (0.0, done), (1.0, cut), (None, failed))
    third = 1 / 3
    expected = {
        "keep": [third, -2 * third, third, None],
        "mask": [third, -2 * third, None, None],
        "penalise": [0.5, -0.5, 0.0, None],
    }
    for mode, advantages in expected.items():
        config = RolloutConfig(truncated=mode, truncation_penalty=0.5)
        assert advantages_of(group, config, GRPOConfig()) == pytest.approx(advantages)
