"""Teacher against student on targets of real micro episodes, with a scripted policy."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.records import Target
from forge_composer.hints.regrade import Regrader
from forge_composer.rollout.episode import TokenLimits
from forge_composer.rollout.lockstep import LockstepGate
from forge_composer.types import Rollout, SamplingRequest
from tests.rendering.chat_fixtures import make_renderer
from tests.rollout.micro_episodes import (
    LIMITS,
    RIGHT,
    SUBMIT,
    WRONG,
    MicroEnvironments,
    Policy,
    episode,
    make_runner,
    turns,
    write,
)

GOOD, BAD = f"Hint: write {RIGHT}", f"Hint: write {WRONG}"


def obeys(prompt: str, request: SamplingRequest) -> str:
    """Writes what the hint at the end says, in the turn that has one; is right by itself in half of the
    episodes, by seed; submits after a test."""
    hint = prompt.rpartition("Hint: write ")[2].partition("<|im_end|>")[0] if "Hint" in prompt else ""
    if hint:
        return write(hint)
    if "tests passed" in prompt or request.request_id.endswith("/02"):
        return SUBMIT
    return write(RIGHT if request.seed % 2 else WRONG)


class Table:
    """Failed episodes of two writing turns and a submission, and a regrader of their targets."""

    def __init__(self, limits: TokenLimits = LIMITS, **options: Any) -> None:
        self.renderer = make_renderer()
        self.environments = MicroEnvironments()
        self.runner = make_runner(self.renderer, self.environments, limits)
        self.contexts = TeacherContexts(self.renderer, "user", max_tokens=4000)
        self.regrader = Regrader(
            self.runner, self.contexts, **({"fraction": 1.0, "seed": 0, "max_concurrent": 4} | options)
        )
        self.policy = Policy(self.renderer, obeys)

    async def record(self, count: int) -> list[Rollout]:
        policy = Policy(self.renderer, turns(write(WRONG), write("return t"), SUBMIT))
        return [await self.runner.run(episode(f"r{number}"), policy) for number in range(count)]


def target(rollout: Rollout, hint: str, turn: int = 1) -> Target:
    return Target(rollout.rollout_id, turn, "test_failed", hint, "sibling")


async def test_a_good_hint_a_bad_one_and_one_without_effect() -> None:
    """Rewards by hand: the teacher writes what the hint says; the student is right where its seed is odd."""
    table = Table()
    rollouts = await table.record(12)
    targets = [target(rollout, GOOD if number < 6 else BAD) for number, rollout in enumerate(rollouts)]
    result = await table.regrader.measure(targets, rollouts, table.policy)
    assert [pair.target for pair in result.comparisons] == targets
    assert [pair.with_hint.reward for pair in result.comparisons] == [1.0] * 6 + [0.0] * 6
    first = {request.request_id: request for request in table.policy.requests}
    right = [float(first[f"r{number}+1.plain/01"].seed % 2) for number in range(12)]
    assert [pair.without.reward for pair in result.comparisons] == right
    solved_good, solved_bad = int(sum(right[:6])), int(sum(right[6:]))
    assert 0 < solved_good < 6, "the seeds should show both cases"
    assert 0 < solved_bad < 6
    assert result.metrics() == {
        "regrade/tried": 12.0,
        "regrade/unusable": 0.0,
        "regrade/teacher_better": 6.0 - solved_good,
        "regrade/student_better": float(solved_bad),
        "regrade/equal": float(solved_good + 6 - solved_bad),
        "regrade/teacher_better_share": (6 - solved_good) / 12,
        "regrade/reward_with_hint": 0.5,
        "regrade/reward_without": sum(right) / 12,
    }


async def test_both_sides_differ_in_the_hint_alone() -> None:
    table = Table()
    (rollout,) = await table.record(1)
    result = await table.regrader.measure([target(rollout, GOOD)], [rollout], table.policy)
    requests = {request.request_id: request for request in table.policy.requests}
    hinted, plain = requests["r0+1.hint/01"], requests["r0+1.plain/01"]
    assert (hinted.seed, hinted.max_new_tokens, hinted.temperature) == (
        plain.seed, plain.max_new_tokens, plain.temperature
    )  # fmt: skip
    assert list(plain.prompt_ids) == rollout.turns[1].prompt_ids
    assert GOOD in table.renderer.tokenizer.decode(hinted.prompt_ids)
    assert len(hinted.prompt_ids) > len(plain.prompt_ids)
    (pair,) = result.comparisons
    later = [turn.prompt_ids for turn in pair.with_hint.turns[2:]]
    assert later
    assert not any("Hint" in table.renderer.tokenizer.decode(ids) for ids in later)
    assert table.environments.open == {}


async def test_a_recorded_failure_is_not_taken_for_the_student() -> None:
    """The student samples its turn with a seed of its own: not the recorded one, not always the same."""
    table = Table()
    rollouts = await table.record(5)
    await table.regrader.measure([target(rollout, GOOD) for rollout in rollouts], rollouts, table.policy)
    seeds = {request.seed for request in table.policy.requests if request.request_id.endswith("plain/01")}
    assert len(seeds) == 5
    recorded = Policy(table.renderer, obeys)
    await table.runner.run(episode("again"), recorded)
    assert not seeds & {request.seed for request in recorded.requests}


async def test_the_sample() -> None:
    """Each target on its own: the same whatever else is in the batch, nested in fraction and limit."""
    targets = [Target(f"r{number}", 1, "test_failed", GOOD, "sibling") for number in range(400)]

    def chosen(**options: Any) -> list[Target]:
        return Table(**options).regrader.choose(targets)

    quarter = chosen(fraction=0.25)
    assert 70 <= len(quarter) <= 130
    assert quarter == sorted(quarter, key=targets.index)
    assert Table(fraction=0.25).regrader.choose(targets[::2]) == [t for t in quarter if t in targets[::2]]
    assert set(quarter) < set(chosen(fraction=0.5))
    few = chosen(fraction=0.25, at_most=5)
    assert (len(few), set(few) < set(quarter)) == (5, True)
    assert few != quarter[:5]
    assert chosen(fraction=0.25, seed=1) != quarter
    assert chosen(fraction=0.0) == []
    assert chosen(fraction=1.0) == targets
    assert chosen(fraction=1.0, at_most=0) == []


async def test_nothing_to_try() -> None:
    table = Table(fraction=0.0)
    rollouts = await table.record(1)
    result = await table.regrader.measure([target(rollouts[0], GOOD)], rollouts, table.policy)
    assert result.metrics() == {
        "regrade/tried": 0.0,
        "regrade/unusable": 0.0,
        "regrade/teacher_better": 0.0,
        "regrade/student_better": 0.0,
        "regrade/equal": 0.0,
    }


async def test_unusable_targets_are_counted_with_their_reason() -> None:
    table = Table()
    rollouts = await table.record(4)
    other = dataclasses.replace(rollouts[0].turns[0], observations=["ok", "form('beg'): expected 'd', got 1"])
    moved = dataclasses.replace(rollouts[1], info=rollouts[1].info | {"task_index": 6})
    broken = dataclasses.replace(rollouts[2], info=rollouts[2].info | {"task_index": 10**9})
    changed = dataclasses.replace(rollouts[0], turns=[other, *rollouts[0].turns[1:]])  # not its own prompt
    batch = [changed, moved, broken, rollouts[3]]
    targets = [target(rollout, GOOD) for rollout in batch]
    result = await table.regrader.measure(targets, batch, table.policy)
    assert result.unusable == {"misaligned": 1, "not_deterministic": 1, "failed": 1}
    assert (result.tried, len(result.comparisons)) == (4, 1)
    assert result.errors["misaligned"] == "rollout r0, turn 1: context"
    assert "r1+1.hint: NotDeterministicError: the environment is not" in result.errors["not_deterministic"]
    assert "IndexError" in result.errors["failed"]
    metrics = result.metrics()
    assert metrics["regrade/unusable"] == 3.0
    assert metrics["regrade/unusable/not_deterministic"] == 1.0
    assert metrics["regrade/reward_with_hint"] == 1.0
    assert table.environments.open == {}


async def test_one_failed_side_makes_no_comparison() -> None:
    table = Table()
    rollouts = await table.record(2)

    def says(prompt: str, request: SamplingRequest) -> str:
        if request.request_id.startswith("r0+1.plain"):
            raise ConnectionError("gone")
        return obeys(prompt, request)

    result = await table.regrader.measure(
        [target(rollout, GOOD) for rollout in rollouts], rollouts, Policy(table.renderer, says)
    )
    assert result.unusable == {"failed": 1}
    assert result.errors == {"failed": "r0+1.plain: ConnectionError: gone"}
    assert [pair.target.rollout_id for pair in result.comparisons] == ["r1"]


async def test_near_the_context_limit_both_sides_have_the_same_room() -> None:
    table = Table()
    rollouts = await table.record(1)
    plain = len(rollouts[0].turns[1].prompt_ids)
    aligned = table.contexts.build(rollouts[0], target(rollouts[0], GOOD))
    hinted = len(aligned.teacher_ids) - len(rollouts[0].turns[1].completion_ids)  # type: ignore[union-attr]
    for room in (40, 0):
        tight = Table(dataclasses.replace(LIMITS, max_model_len=hinted + room))
        result = await tight.regrader.measure([target(rollouts[0], GOOD)], rollouts, tight.policy)
        if room:
            rooms = [r.max_new_tokens for r in tight.policy.requests if r.request_id.endswith("/01")]
            assert rooms == [40, 40]
            assert hinted > plain
        else:
            assert result.unusable == {"no_room": 1}
            assert tight.environments.starts == []


async def test_episodes_at_once_are_bounded() -> None:
    for most, open_at_once in ((2, 2), (5, 4), (100, 12)):
        table = Table(max_concurrent=most)
        rollouts = await table.record(6)
        table.environments.delay_s = lambda rollout_id: 0.002
        targets = [target(rollout, GOOD) for rollout in rollouts]
        result = await table.regrader.measure(targets, rollouts, table.policy)
        assert len(result.comparisons) == 6
        assert table.environments.most_open == open_at_once


@pytest.mark.parametrize("slow", ["hint", "plain"])
async def test_in_lockstep_the_batches_do_not_depend_on_who_is_fast(slow: str) -> None:
    """Two waves of two targets, of which one cannot be played; the turns of a wave are one batch."""
    table = Table(max_concurrent=4)
    rollouts = await table.record(4)
    rollouts[3].info["task_index"] = 10**9
    table.environments.delay_s = lambda rollout_id: 0.02 if slow in rollout_id else 0.0
    targets = [target(rollout, GOOD) for rollout in rollouts]
    gate = LockstepGate(table.policy)  # type: ignore[arg-type]
    result = await asyncio.wait_for(table.regrader.measure(targets, rollouts, gate), 20)
    assert len(result.comparisons) == 3
    assert table.policy.batches[0] == [
        "r0+1.hint/01", "r0+1.plain/01", "r1+1.hint/01", "r1+1.plain/01"
    ]  # fmt: skip
    assert ["r2+1.hint/01", "r2+1.plain/01"] in table.policy.batches
    assert all(batch == sorted(batch) for batch in table.policy.batches)
    together = [sorted({name[-2:] for name in batch}) for batch in table.policy.batches]
    assert together == [["01"], ["02"], ["01"], ["02"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.5}, "fraction = 1.5: expected 0 to 1"),
        ({"at_most": -1}, "at_most = -1"),
        ({"max_concurrent": 1}, "a target needs two episodes at once"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table(**options)
