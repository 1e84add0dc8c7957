"""Episodes entered again at a turn: in the real micro environment, in this process and behind a server."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from forge_composer.config.schema import EnvironmentConfig
from forge_composer.envs.server import LocalServer
from forge_composer.envs.session import SessionPool
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.rollout.episode import TokenLimits, derived_seed
from forge_composer.rollout.fork import Fork, GivenTurn, SampledTurn, fork_failure, run_fork
from forge_composer.traces.atif import rollout_from_trajectory, trajectory_from_rollout
from forge_composer.types import Rollout, RolloutStatus
from tests.rendering.chat_fixtures import KEEPS_ALL, NO_THINK_PROMPT, STRIPS_ALL_EARLIER, make_renderer
from tests.rollout.micro_episodes import (
    LIMITS,
    RIGHT,
    SUBMIT,
    TASK,
    WRONG,
    MicroEnvironments,
    Policy,
    Says,
    episode,
    make_runner,
    turns,
    write,
)

SCRIPT = (write(WRONG), write("return t"), SUBMIT)
"""Three turns that fail."""
FAILS = turns(*SCRIPT)
MOVES_THE_LAST = KEEPS_ALL.replace(
    "== 'assistant' %}<|im_start|>", "== 'assistant' %}{% if loop.last %} {% endif %}<|im_start|>"
)
"""Extends its own past, but writes a last assistant turn elsewhere than after the generation prompt."""


class Table:
    """A recorded episode, and what is needed to enter it again."""

    def __init__(self, template: str = KEEPS_ALL, limits: TokenLimits = LIMITS, **rollout: Any) -> None:
        self.renderer = make_renderer(template)
        self.environments = MicroEnvironments()
        self.runner = make_runner(self.renderer, self.environments, limits, **rollout)

    async def record(self, *script: str) -> Rollout:
        rollout = await self.runner.run(episode(), Policy(self.renderer, turns(*(script or SCRIPT))))
        assert rollout.reward == 0.0, rollout.error
        return rollout

    async def fork(
        self, recorded: Rollout, turn: int, take: GivenTurn | SampledTurn, says: Says = FAILS
    ) -> tuple[Rollout, Policy]:
        policy = Policy(self.renderer, says)
        forked = await run_fork(Fork(recorded, turn, take, "fork", 99), self.runner, policy)
        assert self.environments.open == {}
        assert self.environments.ended[-1] == "fork"
        return forked, policy


@pytest.mark.parametrize("template", [KEEPS_ALL, STRIPS_ALL_EARLIER])
@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_the_same_turns_give_the_same_episode(turn: int, template: str) -> None:
    """Sampled from the recorded prompt, by a policy that says the same again: equal in every token."""
    table = Table(template)
    script = (f"<think>\nhm\n</think>\n\n{SCRIPT[0]}", *SCRIPT[1:])
    recorded = await table.record(*script)
    untouched = copy.deepcopy(recorded)
    forked, policy = await table.fork(recorded, turn, SampledTurn(), turns(*script))
    assert recorded == untouched
    assert (forked.status, forked.reward, forked.error) == (recorded.status, recorded.reward, None)
    for again, before in zip(forked.turns, recorded.turns, strict=True):
        clock = {"generate_s": 0.0, "environment_s": 0.0}
        assert dataclasses.replace(again, **clock) == dataclasses.replace(before, **clock)
    assert [again.generate_s == 0.0 for again in forked.turns] == [number < turn for number in range(3)]
    assert len(policy.requests) == 3 - turn
    assert [request.seed for request in policy.requests] == [derived_seed(99, k) for k in range(turn, 3)]
    assert {request.temperature for request in policy.requests} == {0.8}
    assert table.environments.starts[1] == ("fork", TASK, "train", recorded.seed)
    assert [finish for name, finish in table.environments.steps if name == "fork"] == [False] * 3
    assert (forked.seed, forked.task_id) == (recorded.seed, recorded.task_id)
    assert forked.info["fork"] == {"of": recorded.rollout_id, "turn": turn, "sampling_seed": 99}
    assert forked.info["episode_id"] == "fork"


async def test_a_hint_is_before_its_turn_and_nowhere_after() -> None:
    table = Table()
    recorded = await table.record()
    plain = recorded.turns[1].prompt_ids
    hint = table.renderer.tokenizer.encode("Psst: d\n", add_special_tokens=False)
    hinted = (*plain[:-4], *hint, *plain[-4:])

    def says(prompt: str, request: Any) -> str:
        return write(RIGHT) if "Psst" in prompt else SUBMIT

    forked, policy = await table.fork(recorded, 1, SampledTurn(hinted), says)
    assert (forked.reward, forked.status) == (1.0, RolloutStatus.COMPLETED)
    first, second, third = forked.turns
    assert (first.completion_ids, first.prompt_ids) == (
        recorded.turns[0].completion_ids, recorded.turns[0].prompt_ids
    )  # fmt: skip
    assert policy.requests[0].prompt_ids == hinted == tuple(second.prompt_ids)
    assert third.prompt_ids[: len(plain)] == plain
    known = [*plain, *second.completion_ids]
    assert third.prompt_ids[: len(known)] == known
    assert "all tests passed" in table.renderer.tokenizer.decode(third.prompt_ids[len(known) :])
    assert [turn.opens_sample for turn in forked.turns] == [True, True, True]
    forked, _ = await table.fork(recorded, 1, SampledTurn(tuple(plain)), says)
    assert (forked.reward, forked.turns[1].opens_sample) == (0.0, False)


async def test_a_given_action_is_carried_out_and_the_policy_goes_on() -> None:
    table = Table()
    recorded = await table.record()
    action = parse_action(write(RIGHT), id_prefix="theirs")
    forked, policy = await table.fork(recorded, 1, GivenTurn(action))
    assert (forked.reward, forked.status, len(forked.turns)) == (1.0, RolloutStatus.COMPLETED, 3)
    given, after = forked.turns[1:]
    assert given.action == action
    assert table.renderer.decode(given.completion_ids).count("<tool_call>") == 2
    assert RIGHT.replace('"', '\\"') in table.renderer.decode(given.completion_ids)
    assert table.renderer.ends_turn(given.completion_ids)
    assert all(math.isnan(logprob) for logprob in given.logprobs)
    assert len(given.logprobs) == len(given.versions) == len(given.completion_ids)
    known = [*recorded.turns[1].prompt_ids, *given.completion_ids]
    assert after.prompt_ids[: len(known)] == known
    assert not after.opens_sample
    assert len(policy.requests) == 1
    ids = tuple(recorded.turns[0].completion_ids)
    forked, _ = await table.fork(recorded, 1, GivenTurn(action, ids))
    assert forked.turns[1].completion_ids == list(ids)
    forked, _ = await table.fork(recorded, 1, GivenTurn(action, ids[:-1]))
    assert "turn-end token" in str(forked.error)


async def test_a_given_action_that_submits_ends_the_episode() -> None:
    table = Table()
    recorded = await table.record()
    forked, policy = await table.fork(recorded, 2, GivenTurn(parse_action(write(RIGHT) + SUBMIT)))
    assert (forked.reward, forked.status, policy.requests) == (1.0, RolloutStatus.COMPLETED, [])


@pytest.mark.parametrize("template", [NO_THINK_PROMPT, MOVES_THE_LAST])
async def test_a_template_that_cannot_write_the_given_turn_renders_the_history_afresh(template: str) -> None:
    table = Table(template)
    recorded = await table.record()
    forked, _ = await table.fork(recorded, 1, GivenTurn(parse_action(write(RIGHT))))
    assert (forked.reward, forked.turns[1].completion_ids) == (1.0, [])
    assert forked.turns[2].opens_sample
    text = table.renderer.tokenizer.decode(forked.turns[2].prompt_ids)
    assert 0 < text.find(RIGHT.replace('"', '\\"')) < text.find("all tests passed")


async def test_the_limits_of_the_episode_hold_over_both_parts() -> None:
    table = Table(max_turns=3)
    recorded = await table.record()
    forked, _ = await table.fork(recorded, 1, SampledTurn(), turns("", write("return t"), write(RIGHT)))
    assert (forked.reward, forked.status) == (1.0, RolloutStatus.TRUNCATED_TURNS)
    assert [finish for name, finish in table.environments.steps if name == "fork"] == [False, False, True]

    size = len(recorded.turns[0].completion_ids)
    limits = dataclasses.replace(LIMITS, max_completion_tokens=size + 50)
    table = Table(limits=limits)
    forked, policy = await table.fork(recorded, 1, SampledTurn(), turns("", SUBMIT))
    assert [request.max_new_tokens for request in policy.requests] == [50]
    forked, policy = await table.fork(recorded, 1, SampledTurn(max_tokens=8), turns("", SUBMIT))
    assert [request.max_new_tokens for request in policy.requests] == [8]
    assert (forked.status, forked.reward) == (RolloutStatus.TRUNCATED_LENGTH, 0.0)
    action = parse_action(write(RIGHT))  # longer than what is left: nothing can be sampled after it
    forked, policy = await table.fork(recorded, 1, GivenTurn(action))
    assert (forked.status, forked.reward, policy.requests) == (RolloutStatus.TRUNCATED_LENGTH, 1.0, [])


async def test_what_the_environment_does_not_repeat_is_told() -> None:
    """A record that says otherwise, in an answer, in the task's text, and in where the episode ended."""
    table = Table()
    recorded = await table.record()
    other = dataclasses.replace(recorded.turns[0], observations=["ok", "form('beg'): expected 'd', got 'y'"])
    changed = dataclasses.replace(recorded, turns=[other, *recorded.turns[1:]])
    forked, policy = await table.fork(changed, 1, SampledTurn())
    assert (forked.status, forked.reward) == (RolloutStatus.FAILED, None)
    assert "not deterministic: the answers to turn 0 were ['ok'," in str(forked.error)
    assert "got 'y'" in str(forked.error)
    assert (fork_failure(forked), policy.requests) == ("not_deterministic", [])
    forked, _ = await table.fork(changed, 0, SampledTurn())
    assert (fork_failure(forked), forked.reward) == (None, 0.0)  # what comes later is not repeated

    moved = dataclasses.replace(recorded, info=recorded.info | {"task_index": TASK + 1})
    forked, _ = await table.fork(moved, 0, SampledTurn())
    assert fork_failure(forked) == "not_deterministic"
    assert "the first messages were" in str(forked.error)

    over = dataclasses.replace(recorded.turns[0], action=parse_action(SUBMIT), observations=["submitted"])
    ended = dataclasses.replace(recorded, turns=[over, *recorded.turns[1:]])
    forked, _ = await table.fork(ended, 1, SampledTurn())
    assert fork_failure(forked) == "not_deterministic"
    assert "ended with turn 0" in str(forked.error)


async def test_other_failures_are_no_verdict_and_end_the_session() -> None:
    table = Table()
    recorded = await table.record()

    def broken(prompt: str, request: Any) -> str:
        raise ConnectionError("the generator is gone")

    forked, _ = await table.fork(recorded, 1, SampledTurn(), broken)
    assert (forked.status, forked.reward, fork_failure(forked)) == (RolloutStatus.FAILED, None, "failed")
    assert forked.error == "ConnectionError: the generator is gone"
    forked, _ = await table.fork(recorded, 1, SampledTurn(prompt_ids=(1,) * 4000))
    assert "no token is left for turn 1: its prompt has 4000 tokens" in str(forked.error)
    table.runner = make_runner(table.renderer, table.environments, max_turns=1)
    forked, _ = await table.fork(recorded, 1, SampledTurn())
    assert forked.error == "ValueError: rollout.max_turns = 1: there is no turn 1"
    table.runner = make_runner(table.renderer, table.environments, timeout_s=0.05)
    table.environments.delay_s = lambda rollout_id: 5.0
    forked, _ = await table.fork(recorded, 1, SampledTurn())
    assert "rollout.timeout_s = 0.05" in str(forked.error)


async def test_cancelling_ends_the_session() -> None:
    table = Table()
    recorded = await table.record()
    table.environments.delay_s = lambda rollout_id: 5.0
    running = asyncio.create_task(table.fork(recorded, 1, SampledTurn()))
    await asyncio.sleep(0.05)
    assert list(table.environments.open) == ["fork"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert table.environments.open == {}


async def test_records_that_cannot_be_forked_are_refused() -> None:
    recorded = await Table().record()
    with pytest.raises(ValueError, match=r"it has 3 turns, there is no turn 3"):
        Fork(recorded, 3, SampledTurn(), "fork", 0)
    with pytest.raises(ValueError, match=r"no task_index and no temperature"):
        Fork(dataclasses.replace(recorded, info={}), 0, SampledTurn(), "fork", 0)
    bare = dataclasses.replace(recorded.turns[0], prompt_ids=[])
    with pytest.raises(ValueError, match=r"turn 0 was recorded without its prompt ids"):
        Fork(dataclasses.replace(recorded, turns=[bare]), 0, SampledTurn(), "fork", 0)


async def test_a_trace_and_a_fork_can_be_forked() -> None:
    table = Table()
    recorded = rollout_from_trajectory(trajectory_from_rollout(await table.record()))
    forked, _ = await table.fork(recorded, 1, GivenTurn(parse_action(write(RIGHT))))
    assert forked.reward == 1.0
    stored = rollout_from_trajectory(trajectory_from_rollout(forked))
    again, _ = await table.fork(stored, 2, SampledTurn())
    assert (again.reward, again.info["fork"]["of"]) == (1.0, "fork")


async def test_over_real_sessions(tmp_path: Path) -> None:
    """One session serves the record and its forks, one after the other."""
    config = EnvironmentConfig(sessions_per_worker=1)
    server = LocalServer(config, log_file=tmp_path / "server.log")
    try:
        pool = SessionPool(server.start(), config)
        renderer = make_renderer()
        runner = make_runner(renderer, pool)
        recorded = await runner.run(episode(), Policy(renderer, turns(*SCRIPT)))
        takes = [GivenTurn(parse_action(write(RIGHT))), SampledTurn(), GivenTurn(parse_action(SUBMIT))]
        forks = [Fork(recorded, 1, take, f"fork-{number}", 9) for number, take in enumerate(takes)]
        ended = await asyncio.gather(
            *(run_fork(fork, runner, Policy(renderer, turns(*SCRIPT))) for fork in forks)
        )
        assert [rollout.error for rollout in ended] == [None] * 3
        assert [rollout.reward for rollout in ended] == [1.0, 0.0, 0.0]
        assert [len(rollout.turns) for rollout in ended] == [3, 3, 2]
        assert pool.open_sessions == 1
        await pool.close()
    finally:
        server.stop()
