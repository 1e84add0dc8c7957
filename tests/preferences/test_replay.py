"""Steps replayed to real teachers over HTTP: samples, the ledger's memory, dead teachers, cancelling."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forge_composer.config.replay import ReplayConfig
from forge_composer.config.teachers import TeacherConfig
from forge_composer.envs import prompts
from forge_composer.envs.micro_tasks import make_task
from forge_composer.preferences.replay import ReplayedStep, StepReplayer, replayed_step
from forge_composer.preferences.steps import StepState
from forge_composer.teachers.actions import canonical_action
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.ledger import Ledger, LedgerError
from forge_composer.teachers.local import scripted
from forge_composer.teachers.local.server import TeacherServer
from forge_composer.teachers.local.settings import ScriptedTeacher, TeacherServerConfig
from forge_composer.teachers.pool import TeacherPool
from forge_composer.types import ParsedAction
from tests.preferences.replayed import DEAD, body, calling, replayed, reply, spelled, state
from tests.teachers.endpoint import READ, Endpoint, teacher

LOCAL = (
    ScriptedTeacher(name="strong", family="s", skill=0.9, alternatives=3),
    ScriptedTeacher(name="medium", family="m", skill=0.6, alternatives=3, style="indented"),
    ScriptedTeacher(name="weak", family="w", skill=0.4, alternatives=3, style="quoted"),
)


FREE = {"input": 0.0, "output": 0.0}


def micro_state(index: int) -> StepState:
    task = make_task("easy", "train", index)
    messages = list(prompts.initial_messages(task.module_source))
    action = calling("write_body", body="pass")
    return StepState(f"trace-{index}", 0, messages, list(prompts.TOOLS), action)


def local_teachers(url: str, names: tuple[str, ...] = ("strong", "medium", "weak")) -> list[TeacherConfig]:
    return [
        teacher(url, name=name, model=name, family=name[0], sampling={"max_tokens": 500, "seed": 11})
        for name in names
    ]


def expected_action(at: StepState, who: ScriptedTeacher, sample: int) -> str | None:
    said = scripted.answer(who, at.messages, at.tools, seed=0, sample=str(11 + sample))
    return canonical_action(said)


async def test_three_teachers_three_samples_over_http(tmp_path: Path) -> None:
    config = ReplayConfig(samples=3, concurrency=4)
    states = [micro_state(index) for index in range(8)]
    async with TeacherServer(TeacherServerConfig(teachers=LOCAL, latency_scale=0.0)) as server:
        with Ledger(tmp_path / "ledger.sqlite", budget_usd=1.0) as ledger:
            async with TeacherPool(local_teachers(server.url), ledger) as pool:
                replayer = StepReplayer(pool, config)
                seen: list[ReplayedStep] = []
                steps = await replayer.replay_all(iter(states), on_step=seen.append)
                again = await replayer.replay_all(states)
            spent = ledger.spend().spent_usd
        assert server.counts.total() == 8 * 3 * 3
        billed = sum(server.billed_usd.values())
    assert [step.state for step in steps] == states
    assert sorted(map(id, seen)) == sorted(map(id, steps))
    split = 0
    for step in steps:
        assert [(vote.sample, vote.teacher) for vote in step.votes] == [
            (sample, who.name) for sample in range(3) for who in LOCAL
        ]
        for number, who in enumerate(LOCAL):
            said = [expected_action(step.state, who, sample) for sample in range(3)]
            assert [vote.action for vote in step.votes if vote.teacher == who.name] == said
            counts = Counter(said)
            best = max(counts.values())
            first = next(action for action in said if counts[action] == best)
            cast = step.step_votes().votes[number]
            assert (cast.teacher, cast.family, cast.action) == (who.name, who.name[0], first)
            split += len(counts) > 1
        assert set(step.actions) == {vote.action for vote in step.votes}
        assert all(canonical_action(action) == form for form, action in step.actions.items())
    assert split > 3  # the vote was over answers that differ
    assert sum(step.cost_usd for step in steps) == pytest.approx(billed) == pytest.approx(spent)
    assert [step.step_votes() for step in again] == [step.step_votes() for step in steps]
    assert all(vote.cached and vote.attempts == 0 for step in again for vote in step.votes)
    assert not any(vote.cached for step in steps for vote in step.votes)
    assert (replayer.steps, replayer.counts) == (16, Counter({"ok": 144}))


def voted(*said: Any) -> str | None:
    at = state(calling("read"))
    replies = [reply(at, "t", "f", answer, sample=number) for number, answer in enumerate(said)]
    (vote,) = replayed_step(at, replies, ReplayConfig()).step_votes().votes
    return vote.action


def test_a_teachers_vote_is_its_most_frequent_valid_answer() -> None:
    a, b, c = (calling("read", path=name) for name in "abc")
    form = canonical_action
    assert voted(a, b, b) == form(b)
    assert voted(c, b, b, c) == form(c)
    assert voted(DEAD, b, a) == form(b)
    assert voted(DEAD, DEAD, a) == form(a)
    assert voted(DEAD, ReplyKind.REFUSAL) is None


def test_numbers_of_a_step() -> None:
    at = state(ParsedAction("", error="no JSON"))
    step = replayed(at, [calling("read"), ReplyKind.OVER_BUDGET, body("read", "{")])
    assert (step.student, step.kinds) == (None, Counter({"ok": 1, "over_budget": 1, "bad_arguments": 1}))
    assert (step.cost_usd, step.latency_s, step.is_missing) == (0.02, 0.5, True)
    assert not replayed(at, [calling("read"), DEAD]).is_missing
    empty = replayed_step(at, [], ReplayConfig())
    assert (empty.cost_usd, empty.latency_s, empty.step_votes().votes) == (0, 0.0, ())
    twice = replayed(at, [body("read", spelled(n=1.0)), body("read", spelled(n=1))])
    (first,) = twice.actions.values()
    assert isinstance(first.tool_calls[0].arguments["n"], float)  # as it was first said


async def test_dead_teachers_and_a_spent_budget_are_counted(tmp_path: Path) -> None:
    states = [state(calling("read"), number, f"trace-{number}", messages=[{"role": "user", "content": "q"}])
              for number in range(4)]  # fmt: skip
    async with Endpoint(lambda question, count: READ) as endpoint:
        configs = [
            teacher(endpoint.url, name="alive", model="a/m"),
            teacher("http://127.0.0.1:9/v1", name="dead", model="d/m", retry={"attempts": 1}, price=FREE),
        ]
        with Ledger(tmp_path / "ledger.sqlite", budget_usd=0.012) as ledger:
            async with TeacherPool(configs, ledger) as pool:
                replayer = StepReplayer(pool, ReplayConfig(concurrency=1))
                for at in states:  # the same question: the second time it comes out of the ledger
                    await replayer.replay(at)
                other = state(calling("read"), messages=[{"role": "user", "content": "other"}])
                step = await replayer.replay(other)
    assert replayer.counts == Counter({"ok": 4, "connection": 5, "over_budget": 1})
    assert step.is_missing
    assert step.step_votes().votes[0].action is None


async def test_at_most_so_many_steps_at_once(tmp_path: Path) -> None:
    async with Endpoint(lambda question, count: READ) as endpoint:
        with Ledger(tmp_path / "ledger.sqlite", budget_usd=10.0) as ledger:
            async with TeacherPool([teacher(endpoint.url)], ledger) as pool:
                replayer = StepReplayer(pool, ReplayConfig(concurrency=3, samples=2))
                states = [
                    state(calling("read"), number, messages=[{"role": "user", "content": str(number)}])
                    for number in range(20)
                ]
                steps = await replayer.replay_all(states)
                assert await replayer.replay_all([]) == []
    assert [step.state.step for step in steps] == list(range(20))
    assert endpoint.peak <= 6
    assert endpoint.seen.total() == 40


async def test_cancelling_leaves_no_call_behind(tmp_path: Path) -> None:
    async with Endpoint(lambda question, count: READ if question == "0" else "hang") as endpoint:
        with Ledger(tmp_path / "ledger.sqlite", budget_usd=10.0) as ledger:
            async with TeacherPool([teacher(endpoint.url)], ledger) as pool:
                replayer = StepReplayer(pool, ReplayConfig(concurrency=4))
                states = [
                    state(calling("read"), number, messages=[{"role": "user", "content": str(number)}])
                    for number in range(9)
                ]
                done: list[ReplayedStep] = []
                answered = asyncio.Event()

                def note(step: ReplayedStep) -> None:
                    done.append(step)
                    answered.set()

                running = asyncio.create_task(replayer.replay_all(states, on_step=note))
                await answered.wait()
                await endpoint.until_in_flight(4)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                assert ledger.spend().held_usd == 0
                assert pool.counts()["t"] == Counter({"ok": 1})
                left = {repr(task.get_coro()) for task in asyncio.all_tasks()}
                assert not [name for name in left if "StepReplayer" in name or "TeacherPool" in name]
    assert [step.state.step for step in done] == [0]


async def test_what_a_callback_raises_ends_the_replay(tmp_path: Path) -> None:
    def full(step: ReplayedStep) -> None:
        raise OSError("no space left")

    async with Endpoint(lambda question, count: READ) as endpoint:
        ledger = Ledger(tmp_path / "ledger.sqlite", budget_usd=10.0)
        async with TeacherPool([teacher(endpoint.url)], ledger) as pool:
            replayer = StepReplayer(pool, ReplayConfig())
            with pytest.raises(OSError, match="no space"):
                await replayer.replay_all([state(calling("read"))], on_step=full)
            ledger.close()
            with pytest.raises(LedgerError):
                await replayer.replay(state(calling("read")))
