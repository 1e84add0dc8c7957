"""`python -m apps.replay_teachers`: what it writes and says, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from apps.replay_teachers import main
from forge_composer.preferences.export import PairReader
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.ledger import Ledger, read_calls
from forge_composer.teachers.local.server import TeacherServer
from forge_composer.teachers.local.settings import TeacherServerConfig
from forge_composer.teachers.opened import LEDGER
from tests.replay_report.small_replays import config_of, write_config


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(config: Path, *arguments: object) -> int:
    return main(["--config", str(config), *map(str, arguments)])


def test_tables_numbers_page_and_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, config_of(tmp_path, steps=10, name="<mine>"))
    numbers, trl = tmp_path / "deep/numbers.json", tmp_path / "trl.jsonl"
    assert run(config, "--json", numbers, "--trl", trl) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    content = json.loads(numbers.read_text(encoding="utf-8"))
    for key in ("calls", "errors", "wall_s", "bound_s", "cost_usd", "pairs", "latency_p50_s", "agreement"):
        assert isinstance(content[key], int | float)
    assert (content["calls"], content["errors"]) == (30, 0)
    assert content["latency_p50_s"] <= content["latency_p95_s"] <= content["latency_p99_s"]
    assert content["verdict"]["holds"] is True
    assert [check["result"] for check in content["verdict"]["checks"]] == ["pass"] * 5
    assert re.search(r"calls +30 of 30, 0 out of the ledger", said.out)
    assert "All limits are held." in said.out
    assert "are scripted" in said.out
    pairs = list(PairReader(tmp_path / "out/pairs.jsonl"))
    assert len(pairs) == content["pairs"] == len(trl.read_text().splitlines())
    assert all(pair.tokens is None and len(pair.votes) == 3 for pair in pairs)
    page = (tmp_path / "out/replay.html").read_text(encoding="utf-8")
    assert "<title>&lt;mine&gt;</title>" in page
    assert page.count('class="plotly-graph-div"') == 4
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="http', page)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        LEDGER, f"{LEDGER}.lock", "pairs.jsonl", "replay.html",
    ]  # fmt: skip


@pytest.mark.slow
def test_pairs_are_tokenised_for_a_policy(tmp_path: Path, checkout: Path) -> None:
    config = write_config(tmp_path, config_of(tmp_path, steps=6))
    run(config, "--policy", checkout / "assets/tiny_policy")
    pairs = list(PairReader(tmp_path / "out/pairs.jsonl"))
    assert pairs
    for pair in pairs:
        assert pair.tokens is not None
        assert pair.tokens.chosen_ids != pair.tokens.rejected_ids
        assert pair.tokens.chosen_ids[-1] == pair.tokens.rejected_ids[-1]  # both end their turn


def test_a_limit_that_is_not_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, config_of(tmp_path, steps=4))
    assert run(config, "--replay.limits.usd_per_trace", "0.0001") == 1
    assert "A limit is not held." in capsys.readouterr().out
    content = json.loads((tmp_path / "out/replay.json").read_text())
    assert {check["name"]: check["result"] for check in content["verdict"]["checks"]}[
        "usd_per_trace"
    ] == "fail"


def test_missing_calls_say_what_budget_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, config_of(tmp_path, steps=6))
    assert run(config, "--replay.budget.run_usd", "0.01") == 1
    said = capsys.readouterr().out
    assert "The verdict is open" in said
    assert re.search(r"\d+ of 18 calls are missing \(over budget \d+\)\.", said)
    likely = re.search(r"replay\.budget\.run_usd is 0\.01, .* About ([0-9.]+) would do", said)
    assert likely is not None
    assert run(config, "--replay.budget.run_usd", likely[1]) == 0


def test_bad_lines_do_not_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, config_of(tmp_path, steps=4))
    with (tmp_path / "traces.jsonl").open("a") as stream:
        stream.write('{"torn": \n[1]\n')
    run(config)
    said = capsys.readouterr().out
    traces = tmp_path / "traces.jsonl"
    assert f"left out: {traces}:2: " in said
    assert f"left out: {traces}:3: not a JSON object" in said
    content = json.loads((tmp_path / "out/replay.json").read_text())
    assert (content["bad_lines"], content["calls"]) == (2, 12)
    assert f"{traces}:3: not a JSON object" in (tmp_path / "out/replay.html").read_text(encoding="utf-8")


def refused(capsys: pytest.CaptureFixture[str], config: Path, *arguments: object) -> str:
    assert run(config, *arguments) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "calls" not in said.out
    return said.err


def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = config_of(tmp_path, steps=3)
    config = write_config(tmp_path, base)
    assert "did you mean replay.quorum?" in refused(capsys, config, "--replay.qorum", 3)
    assert "no trace at" in refused(capsys, config, "--traces", tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "no trace could be read" in refused(capsys, config, "--traces", tmp_path / "empty.jsonl")
    assert "try --replay.steps all" in refused(capsys, config, "--replay.steps", "entropy")
    assert "is a folder" in refused(capsys, config, "--json", tmp_path)
    assert "one file" in refused(capsys, config, "--json", tmp_path / "x", "--page", tmp_path / "x")
    with Ledger(tmp_path / "out" / LEDGER, budget_usd=1.0):
        assert "in use by another run" in refused(capsys, config)
    assert "names no traces" in refused(capsys, write_config(tmp_path, base | {"traces": []}))
    base["teachers"][0]["api_key_env"] = "NO_SUCH_KEY"
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert "NO_SUCH_KEY is not set" in refused(capsys, write_config(tmp_path, base))
    assert not (tmp_path / "out/replay.json").exists()


# -- as a process of its own ------------------------------------------------------------------------


@contextmanager
def started(checkout: Path, config: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "apps.replay_teachers", "--config", str(config), *arguments]
    process = subprocess.Popen(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def many_at_once(folder: Path, server: TeacherServer, **replay: Any) -> Path:
    """A config with which about twenty calls are in flight."""
    config = config_of(folder, url=server.url, steps=40, replay={"concurrency": 8} | replay)
    for teacher in config["teachers"]:
        teacher["concurrency"] = 7
    return write_config(folder, config)


@pytest.mark.slow
async def test_sigkill_in_the_middle_and_a_resume(tmp_path: Path, checkout: Path) -> None:
    ledger = tmp_path / "out" / LEDGER
    async with TeacherServer(TeacherServerConfig(latency_scale=0.05)) as server:
        budget = {"run_usd": 0.5, "per_trace_usd": 0.5}
        config = many_at_once(tmp_path, server, budget=budget)
        with started(checkout, config) as process:
            while server.counts.total() < 40:
                assert process.poll() is None
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        entries = read_calls(ledger)
        flying = [entry for entry in entries if entry.kind is None]
        answered = {(entry.teacher, entry.request) for entry in entries if entry.answered}
        assert 10 <= len(flying) <= 21
        assert server.peak >= len(flying) - 3
        billed = sum(server.billed_usd.values())
        assert sum(entry.counted_nano_usd for entry in entries) >= 1e9 * billed - 1
        with started(checkout, config) as process:
            said, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0, said
    with sqlite3.connect(ledger) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    after = read_calls(ledger)
    again = Counter((entry.teacher, entry.request) for entry in after)
    assert all(again[key] == 1 for key in answered)  # no answered call is repeated
    assert len(again) == 120
    kinds = Counter(entry.kind for entry in after)
    assert kinds == {ReplyKind.OK: 120, ReplyKind.LOST: len(flying)}
    content = json.loads((tmp_path / "out/replay.json").read_text())
    assert (content["calls"], content["cached_calls"]) == (120, len(answered))
    assert (content["errors"], content["unknown_bills"]) == (0, len(flying))
    total = sum(entry.counted_nano_usd for entry in after) / 1e9
    assert content["cost_usd"] == pytest.approx(total)
    assert sum(server.billed_usd.values()) - 1e-9 <= total <= budget["run_usd"]


@pytest.mark.slow
async def test_ctrl_c_reports_what_there_is(tmp_path: Path, checkout: Path) -> None:
    async with TeacherServer(TeacherServerConfig(latency_scale=0.05)) as server:
        config = many_at_once(tmp_path, server)
        with started(checkout, config) as process:
            while server.counts.total() < 40:
                assert process.poll() is None
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            said, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 130, said
        assert "Traceback" not in said
        assert "The replay was stopped before it was done." in said
        content = json.loads((tmp_path / "out/replay.json").read_text())
        assert content["interrupted"] is True
        assert 0 < content["calls"] < 120 == content["calls"] + content["missing"]
        assert list(PairReader(tmp_path / "out/pairs.jsonl"))
        with started(checkout, config) as process:
            said, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0, said
    again = Counter((entry.teacher, entry.request) for entry in read_calls(tmp_path / "out" / LEDGER))
    assert len(again) == 120
    content = json.loads((tmp_path / "out/replay.json").read_text())
    assert (content["calls"], content["missing"], content["errors"]) == (120, 0, 0)


@pytest.mark.slow
def test_the_offline_config(tmp_path: Path, checkout: Path) -> None:
    numbers = tmp_path / "numbers.json"
    arguments = ("--output_dir", str(tmp_path / "out"), "--json", str(numbers))
    began = time.monotonic()
    with started(checkout, Path("configs/replay_offline.toml"), *arguments) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    content = json.loads(numbers.read_text())
    assert (content["steps"], content["calls"], content["errors"]) == (50, 150, 0)
    assert content["pairs_per_trace"] >= 5
    assert 0 < content["bound_s"] <= content["wall_s"] < time.monotonic() - began
