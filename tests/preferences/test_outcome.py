"""Pairs played in the real micro environment: verdicts, the gate, the audit, episodes that fail."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.extraction import PairExtractor
from forge_composer.preferences.outcome import Outcome, OutcomeJudge
from forge_composer.preferences.records import PairTokens, PreferencePair
from forge_composer.preferences.steps import StepState, steps_of_rollout
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.rollout.episode import derived_seed
from forge_composer.types import ParsedAction, Rollout
from tests.preferences.replayed import replayed
from tests.rendering.chat_fixtures import make_renderer
from tests.rollout.micro_episodes import (
    RIGHT,
    SUBMIT,
    WRONG,
    MicroEnvironments,
    Policy,
    Says,
    call,
    episode,
    make_runner,
    turns,
    write,
)  # fmt: skip

RENDERER = make_renderer()
GOOD, BAD = parse_action(write(RIGHT)), parse_action(write("return t + t"))


def submits(prompt: str, request: Any) -> str:
    return SUBMIT


class Table:
    def __init__(self, says: Says = submits, **judge: Any) -> None:
        self.environments = MicroEnvironments()
        self.runner = make_runner(RENDERER, self.environments)
        self.policy = Policy(RENDERER, says)
        self.rollouts: list[Rollout] = []
        self.judge = OutcomeJudge(self.runner, self.policy, on_rollout=self.rollouts.append, **judge)

    async def record(self, first: str = write(WRONG), **spec: Any) -> StepState:
        """The first step of an episode that writes something and submits."""
        rollout = await self.runner.run(episode(**spec), Policy(RENDERER, turns(first, SUBMIT)))
        assert rollout.reward is not None, rollout.error
        return steps_of_rollout(rollout)[0]

    def extractor(self, **options: Any) -> PairExtractor:
        return PairExtractor(ReplayConfig(**options), renderer=RENDERER, judge=self.judge)


async def verdict(step: StepState, agreed: ParsedAction, **options: Any) -> tuple[Any, Table]:
    table = Table()
    extractor = table.extractor(**options)
    return await extractor.extract(replayed(step, [agreed, agreed])), table


async def test_both_sides_are_played_from_the_step_under_one_seed() -> None:
    step = await Table().record()
    pair, table = await verdict(step, GOOD, outcome_gate="better")
    assert isinstance(pair, PreferencePair)
    assert pair.outcome == {"chosen": 1.0, "rejected": 0.0}
    assert pair.tokens is not None
    chosen, rejected = table.rollouts
    assert [rollout.rollout_id for rollout in table.rollouts] == [
        "train-000001-000+0.chosen", "train-000001-000+0.rejected"
    ]  # fmt: skip
    assert tuple(chosen.turns[0].completion_ids) == pair.tokens.chosen_ids
    assert tuple(rejected.turns[0].completion_ids) == pair.tokens.rejected_ids == step.completion_ids
    seed = derived_seed("outcome", 0, "train-000001-000", 0)
    assert [rollout.info["fork"]["sampling_seed"] for rollout in table.rollouts] == [seed, seed]
    assert [request.seed for request in table.policy.requests] == [derived_seed(seed, 1)] * 2
    assert table.environments.open == {}
    assert table.judge.counts.metrics() == {
        "replay/audit_pairs": 1.0, "replay/audit_void": 0.0, "replay/audit_better": 1.0,
        "replay/audit_equal": 0.0, "replay/audit_worse": 0.0, "replay/audit_gain": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("student", "agreed", "gate", "kept"),
    [
        (write(WRONG), GOOD, "not_worse", True),
        (write(WRONG), BAD, "not_worse", True),
        (write(WRONG), BAD, "better", False),
        (write(RIGHT), BAD, "not_worse", False),
        (write(RIGHT), BAD, "better", False),
    ],
)
async def test_the_gate(student: str, agreed: ParsedAction, gate: Any, kept: bool) -> None:
    step = await Table().record(student)
    found, _ = await verdict(step, agreed, outcome_gate=gate)
    assert isinstance(found, PreferencePair) is kept
    assert kept or found == "outcome_worse"


async def test_the_audit_keeps_what_it_grades() -> None:
    step = await Table().record(write(RIGHT))
    pair, table = await verdict(step, BAD, audit_fraction=1.0)
    assert isinstance(pair, PreferencePair)
    assert pair.outcome == {"chosen": 0.0, "rejected": 1.0}
    assert table.judge.counts.metrics()["replay/audit_worse"] == 1.0
    assert table.judge.counts.metrics()["replay/audit_gain"] == -1.0
    pair, table = await verdict(step, BAD)
    assert isinstance(pair, PreferencePair)
    assert (pair.outcome, table.rollouts) == (None, [])


async def test_a_share_is_audited_whatever_the_order() -> None:
    table = Table(seed=3)
    step = await table.record()
    pair, _ = await verdict(step, GOOD)
    pairs = [dataclasses.replace(pair, step=number) for number in range(1000)]
    drawn = [table.judge.audits(pair, 0.3) for pair in pairs]
    assert drawn[::-1] == [table.judge.audits(pair, 0.3) for pair in pairs[::-1]]
    assert 240 < sum(drawn) < 360  # 4 standard deviations
    assert not any(table.judge.audits(pair, 0.0) for pair in pairs)
    assert all(table.judge.audits(pair, 1.0) for pair in pairs)


async def test_a_void_episode_is_no_verdict() -> None:
    """The record says otherwise than the environment; there is no record; it lacks what a fork needs."""
    table = Table()
    rollout = (await table.record()).rollout
    assert rollout is not None
    moved = dataclasses.replace(rollout, info=rollout.info | {"task_index": 9})
    bare = dataclasses.replace(rollout, info={"temperature": 1.0})
    for recorded, reason in ((moved, "not_deterministic"), (bare, "no_fork"), (None, "no_rollout")):
        step = dataclasses.replace(steps_of_rollout(recorded or rollout)[0], rollout=recorded)
        gated, table = await verdict(step, GOOD, outcome_gate="not_worse")
        assert gated == "outcome_void"
        assert table.judge.counts.void == {reason: 1}
        assert table.judge.counts.errors[reason]
        audited, table = await verdict(step, GOOD, audit_fraction=1.0)
        assert isinstance(audited, PreferencePair)
        assert audited.outcome is None
        assert table.judge.counts.metrics() == {"replay/audit_pairs": 0.0, "replay/audit_void": 1.0}


async def test_a_malformed_rejected_side_is_played() -> None:
    step = await Table().record("<tool_call>\n{nonsense")
    pair, table = await verdict(step, GOOD, outcome_gate="better", max_length_ratio=50.0)
    assert isinstance(pair, PreferencePair)
    assert pair.outcome == {"chosen": 1.0, "rejected": 0.0}
    assert table.rollouts[1].turns[0].feedback[0].kind == "malformed_call"


async def test_a_later_step_and_a_pair_of_text() -> None:
    table = Table()
    script = (call("run_tests"), write(WRONG), SUBMIT)
    rollout = await table.runner.run(episode(), Policy(RENDERER, turns(*script)))
    step = steps_of_rollout(rollout)[1]
    extractor = PairExtractor(ReplayConfig(outcome_gate="better"), judge=table.judge)
    pair = await extractor.extract(replayed(step, [GOOD, GOOD]))
    assert isinstance(pair, PreferencePair)
    assert (pair.tokens, pair.outcome) == (None, {"chosen": 1.0, "rejected": 0.0})
    assert [len(played.turns) for played in table.rollouts] == [3, 3]


async def test_sessions_are_bounded_and_cancelled_ones_end() -> None:
    table = Table(max_concurrent=3)
    step = await table.record()
    pair, _ = await verdict(step, GOOD)
    table.environments.delay_s = lambda rollout_id: 0.01
    table.environments.most_open = 0
    pairs = [dataclasses.replace(pair, step=0, trace=f"other-{number}") for number in range(4)]
    played = await asyncio.gather(
        *(
            table.judge.play(pair, dataclasses.replace(step.rollout, rollout_id=pair.trace))
            for pair in pairs
            if step.rollout is not None
        )
    )
    assert played == [Outcome(1.0, 0.0)] * 4
    assert table.environments.most_open == 3
    table.environments.delay_s = lambda rollout_id: 30.0
    running = asyncio.create_task(table.judge.play(pair, step.rollout))
    await asyncio.sleep(0.05)
    assert len(table.environments.open) == 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert table.environments.open == {}


async def test_tokens_without_an_end_are_void() -> None:
    table = Table()
    step = await table.record()
    pair, _ = await verdict(step, GOOD)
    tokens = PairTokens(pair.tokens.prompt_ids, pair.tokens.chosen_ids[:-1], pair.tokens.rejected_ids)
    assert await table.judge.play(dataclasses.replace(pair, tokens=tokens), step.rollout) is None
    assert "turn-end token" in table.judge.counts.errors["failed"]


def test_bounds() -> None:
    with pytest.raises(ValueError, match="max_concurrent = 0"):
        Table(max_concurrent=0)
