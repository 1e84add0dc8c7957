"""Replays against the local server over real HTTP: faults, budgets, interruptions, resumes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forge_composer.preferences.replay import ReplayedStep
from forge_composer.replay_report.as_json import to_json
from forge_composer.replay_report.gather import gather
from forge_composer.replay_report.load import load_settings
from forge_composer.replay_report.pairs import make_pairs
from forge_composer.replay_report.report import Report, make_report
from forge_composer.replay_report.run import ask_teachers
from forge_composer.replay_report.settings import ReplaySettings
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.ledger import read_calls
from forge_composer.teachers.local.server import TeacherServer
from forge_composer.teachers.local.settings import FAULT_KINDS, FaultPlan, FaultRates, TeacherServerConfig
from forge_composer.teachers.opened import LEDGER
from tests.replay_report.small_replays import NAMES, config_of, teacher, write_config

QUICK = TeacherServerConfig(latency_scale=0.0)


def settings_of(folder: Path, **changes: Any) -> ReplaySettings:
    return load_settings(write_config(folder, config_of(folder, **changes)))


async def replay(settings: ReplaySettings, **options: Any) -> Report:
    gathered = gather(settings.traces, settings.format, settings.replay)
    asked = await ask_teachers(settings, gathered.states, **options)
    pairs = await make_pairs(asked.steps, gathered.traces, settings, None)
    return make_report(settings, gathered, asked, pairs)


def served(server: TeacherServer) -> int:
    return sum(server.counts.values())


async def test_a_whole_replay_and_a_second_one_that_calls_nobody(tmp_path: Path) -> None:
    async with TeacherServer(QUICK) as server:
        settings = settings_of(tmp_path, url=server.url, steps=9)
        first = to_json(await replay(settings))
        assert served(server) == 27
        assert (first["calls"], first["errors"], first["cached_calls"], first["missing"]) == (27, 0, 0, 0)
        assert first["cost_usd"] == pytest.approx(sum(server.billed_usd.values()), abs=1e-9)
        assert first["cost_usd"] == pytest.approx(sum(each["cost_usd"] for each in first["teachers"]))
        assert sum(each["cost_share"] for each in first["teachers"]) == pytest.approx(1.0)
        assert first["usd_per_trace"] == pytest.approx(first["cost_usd"] / first["traces"])
        assert first["pairs"] + sum(first["steps_without_pair"].values()) == 9
        assert sum(first["pairs_by_trace"].values()) == first["pairs"] > 0
        assert 0 < first["bound_s"] <= first["wall_s"]
        second = to_json(await replay(settings))
        assert served(server) == 27
    changing = {"cached_calls", "wall_s", "wall_this_start_s", "teachers", "projection"}
    assert {k: v for k, v in first.items() if k not in changing} == {
        k: v for k, v in second.items() if k not in changing
    }
    assert second["cached_calls"] == 27


async def test_projection_and_agreement_by_hand(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, steps=9, projection_traces=100)
    report = await replay(settings)
    numbers = to_json(report)
    traces = numbers["traces"]
    assert numbers["projection"]["calls"] == round(27 / traces * 100)
    assert numbers["projection"]["usd"] == pytest.approx(numbers["cost_usd"] / traces * 100)
    assert numbers["projection"]["hours"] == pytest.approx(numbers["bound_s"] / traces * 100 / 3600)
    votes = {
        name: [vote.action for step in report.asked.steps for vote in step.votes if vote.teacher == name]
        for name in NAMES
    }
    for pair in numbers["agreement_table"]["teacher_pairs"]:
        one, other = (votes[name] for name in pair["teachers"])
        assert pair["rate"] == pytest.approx(sum(map(str.__eq__, one, other)) / 9)
    students = [step.student for step in report.asked.steps]
    for each in numbers["teachers"]:
        against = sum(vote != student for vote, student in zip(votes[each["name"]], students, strict=True))
        assert each["student_disagreement"] == pytest.approx(against / 9)
    latencies = sorted(max(vote.latency_s for vote in step.votes) for step in report.asked.steps)
    assert numbers["latency_p50_s"] == pytest.approx(latencies[4])


async def test_rate_limits_are_in_the_projection(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=2)
    config["teachers"][0]["requests_per_minute"] = 120
    settings = load_settings(write_config(tmp_path, config))
    report = await replay(settings)
    # 2 steps of 1 trace: 2,000 calls of this teacher for 1,000 traces, at 120 a minute.
    assert report.projection.hours == pytest.approx(2000 / 120 / 60)


def storm(share: float) -> TeacherServerConfig:
    """Every kind of fault equally often, on this share of the answers."""
    rates = dict.fromkeys(FAULT_KINDS, share / len(FAULT_KINDS))
    faults = FaultPlan(default=FaultRates(**rates, retry_after_s=0.01, hang_s=0.4))
    return TeacherServerConfig(latency_scale=0.0, faults=faults)


async def weathered(tmp_path: Path, steps: int) -> tuple[Report, TeacherServer]:
    retry = {"attempts": 12, "backoff_s": 0.001, "backoff_max_s": 0.01}
    async with TeacherServer(storm(0.3)) as server:
        teachers = [
            teacher(name, server.url, timeout_s=0.3, retry=retry, breaker={"failures": 1000})
            for name in NAMES
        ]
        settings = settings_of(tmp_path, url=server.url, steps=steps, teachers=teachers)
        return await replay(settings), server


def check_storm(report: Report, server: TeacherServer, calls: int) -> None:
    """Every reply is accounted for, once: what the server sent, what the ledger has, what the report says."""
    entries = read_calls(report.settings.output_dir / LEDGER)
    kinds = Counter(entry.kind for entry in entries)
    sent = Counter[str]()
    for (_, outcome), count in server.counts.items():
        sent[outcome] += count
    assert kinds[ReplyKind.OK] == sent["ok"] + sent["bad_usage"]
    assert kinds[ReplyKind.REFUSAL] == sent["refusal"]
    assert kinds[ReplyKind.BAD_ARGUMENTS] == sent["bad_arguments"]
    assert kinds[ReplyKind.RATE_LIMITED] == sent["rate_limit"]
    assert kinds[ReplyKind.SERVER_ERROR] == pytest.approx(sent["server_error"], abs=sent["wrong_schema"])
    assert None not in kinds
    answers = Counter((entry.teacher, entry.request) for entry in entries if entry.answered)
    assert set(answers.values()) == {1}  # nothing was asked again after it was answered
    assert report.calls == calls == len({(entry.teacher, entry.request) for entry in entries})
    assert report.kinds[ReplyKind.OK] == kinds[ReplyKind.OK]  # every good reply is used, once
    assert not report.missing.calls
    assert report.account.cost_usd >= sum(server.billed_usd.values()) - 1e-9
    assert report.account.requests == len(entries) > calls


async def test_fault_storm(tmp_path: Path) -> None:
    report, server = await weathered(tmp_path, steps=20)
    check_storm(report, server, 60)


@pytest.mark.slow
async def test_fault_storm_of_150_calls(tmp_path: Path) -> None:
    report, server = await weathered(tmp_path, steps=50)
    check_storm(report, server, 150)
    seen = {outcome for _, outcome in server.counts}
    assert set(FAULT_KINDS) - {"hang", "disconnect"} <= seen


async def test_a_budget_of_60_percent_and_a_resume_with_more(tmp_path: Path) -> None:
    whole = await replay(settings_of(tmp_path, steps=12, output_dir=str(tmp_path / "whole")))
    need = whole.account.cost_usd
    async with TeacherServer(QUICK) as server:
        budget = {"run_usd": 0.6 * need, "per_trace_usd": 5.0}
        replay_table = {"budget": budget, "traces": "all", "steps": "all"}
        part = await replay(settings_of(tmp_path, url=server.url, steps=12, replay=replay_table))
        before = served(server)
        assert before == part.calls < 36
        assert 0.2 * need < part.account.cost_usd <= 0.6 * need
        assert part.missing.calls == {"over_budget": 36 - before}
        assert part.holds is not True
        assert {check.name: check.result for check in part.checks}["latency_p95_s"] == "undecided"
        advice = part.missing.run
        assert advice is not None
        assert advice.limit == pytest.approx(0.6 * need)
        assert advice.used == pytest.approx(part.account.cost_usd)
        assert need < advice.likely <= advice.surely

        replay_table["budget"] = budget | {"run_usd": advice.surely}
        rest = await replay(settings_of(tmp_path, url=server.url, steps=12, replay=replay_table))
        assert served(server) == 36  # the rest, and the rest only
        assert (rest.calls, rest.cached, rest.missing.calls.total()) == (36, before, 0)
        assert rest.account.cost_usd == pytest.approx(need)
        assert [pair.pair_id for pair in rest.pairs.made] == [pair.pair_id for pair in whole.pairs.made]


async def test_the_budget_of_a_trace_is_named(tmp_path: Path) -> None:
    budget = {"run_usd": 5.0, "per_trace_usd": 0.02}
    table = {"budget": budget, "traces": "all", "steps": "all"}
    report = await replay(settings_of(tmp_path, steps=8, replay=table))
    assert report.missing.calls["over_budget"] > 0
    assert report.missing.run is not None
    assert report.missing.trace is not None
    assert report.missing.run.likely < report.missing.run.limit
    assert report.missing.trace.likely > report.missing.trace.limit == 0.02


async def test_dead_teachers_are_errors_and_the_rest_goes_on(tmp_path: Path) -> None:
    """One of three is not there: two families are left, and they still give pairs."""
    config = config_of(tmp_path, steps=12)
    config["teachers"][2] |= {"base_url": "http://127.0.0.1:9/v1", "breaker": {"failures": 2, "bench_s": 60}}
    report = await replay(load_settings(write_config(tmp_path, config)))
    numbers = to_json(report)
    dead = numbers["teachers"][2]
    assert dead["kinds"].keys() <= {"connection", "benched"}
    assert dead["calls"] + dead["kinds"]["benched"] == 12
    assert numbers["missing_by_kind"] == {"benched": dead["kinds"]["benched"]}
    assert numbers["errors"] == dead["errors"] == dead["kinds"]["connection"] > 0
    assert numbers["pairs"] > 0
    assert numbers["verdict"]["holds"] is False
    assert numbers["projection"]["usd"] is not None


async def test_stopped_and_resumed(tmp_path: Path) -> None:
    async with TeacherServer(TeacherServerConfig(latency_scale=0.002)) as server:
        settings = settings_of(tmp_path, url=server.url, steps=16)
        stop = asyncio.Event()
        done: list[ReplayedStep] = []

        def note(step: ReplayedStep) -> None:
            done.append(step)
            if len(done) == 4:
                stop.set()

        part = await replay(settings, stop=stop, on_step=note)
        assert part.asked.interrupted
        assert 4 <= len(part.asked.steps) < 16
        assert part.missing.calls == {"not_asked": 48 - 3 * len(part.asked.steps)}
        assert part.holds is not True
        answered = {
            (entry.teacher, entry.request)
            for entry in read_calls(settings.output_dir / LEDGER)
            if entry.answered
        }
        rest = await replay(settings)
        entries = read_calls(settings.output_dir / LEDGER)
        again = Counter((entry.teacher, entry.request) for entry in entries)
        assert all(again[key] == 1 for key in answered)
        assert (rest.calls, rest.cached, rest.errors) == (48, len(answered), 0)
        assert rest.account.unknown_bills == part.account.unknown_bills
        assert rest.wall_s > part.wall_s * 0.5


async def test_equal_steps_are_asked_and_billed_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=3)
    line = (tmp_path / "traces.jsonl").read_bytes()
    (tmp_path / "traces.jsonl").write_bytes(line + line)
    async with TeacherServer(QUICK) as server:
        config |= {"teachers": [teacher(name, server.url) for name in NAMES]}
        del config["local_teachers"]
        report = await replay(load_settings(write_config(tmp_path, config)))
        assert served(server) == 9
        assert (report.calls, report.cached, report.account.requests) == (18, 9, 9)
        assert report.account.cost_usd == pytest.approx(sum(server.billed_usd.values()), abs=1e-8)
        assert report.pairs.skipped["duplicate"] == len(report.pairs.made) > 0
