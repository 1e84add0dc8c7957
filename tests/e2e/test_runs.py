"""Whole runs through the command line: real meshes, real engines, real servers, the committed tiny policy."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_composer.metrics.sinks import read_metrics, without_times
from forge_composer.preferences.export import PairReader
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.teachers.ledger import read_calls
from forge_composer.traces.store import TraceReader
from forge_composer.traces.verify import verify_rollout

SMALL = (
    "--loop.steps", "3", "--loop.groups_per_step", "3", "--rollout.group_size", "4",
    "--loop.eval_tasks", "12", "--metrics.display", "plain",
)  # fmt: skip
ALL_CHANNELS = (
    "--loop.max_policy_lag", "0",
    "--loss.sdpo.weight", "0.5", "--loss.sdpo.balance", "grad_norm", "--loss.sdpo.measure_after_every", "2",
    "--hints.regrade_fraction", "0.5", "--replay.audit_fraction", "0.2",
)  # fmt: skip
LIMIT_S = 280
STARTED: list[subprocess.Popen[str]] = []

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(checkout: Path, folder: Path, *overrides: str, config: str = "cpu_sync") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "apps.grpo_composer", "--config", f"configs/{config}.toml"]
    command += ["--output_dir", str(folder), *SMALL, *overrides]
    process = subprocess.Popen(
        command,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ),
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A failed test leaves no run behind that would disturb the next; children end with their client."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    STARTED.clear()


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    return output


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def sync_run(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sync"
    process = start(checkout, folder, *ALL_CHANNELS, config="cpu_composer")
    output = finish(process)
    assert process.returncode == 0, output
    return folder


def test_a_run_leaves_what_is_promised(sync_run: Path) -> None:
    for name in ("config.toml", "summary.json", "metrics.jsonl", "report.html", "traces/train.jsonl"):
        assert (sync_run / name).stat().st_size > 0, name
    summary = summary_of(sync_run)
    assert (summary["status"], summary["steps"]) == ("completed", 3)
    assert summary["policy_lag_seen_max"] == summary["max_policy_lag"] == 0
    assert 0 <= summary["eval_before"] <= 1
    assert 0 <= summary["eval_after"] <= 1
    assert summary["rollouts"] >= 3 * 12 + 2 * 12


def test_generator_and_trainer_agree_on_every_step(sync_run: Path) -> None:
    """float32: at most 1e-3 on sampled tokens, and 1e-4 right after each update."""
    steps = [record for record in read_metrics(sync_run / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert 0 < record["train/logprob_diff_max"] < 1e-3
        assert 0 < record["weights/logprob_diff_max"] < 1e-4


def test_failed_turns_are_distilled(sync_run: Path) -> None:
    """Every step has targets, all aligned; each is written down; the hint moves the teacher."""
    steps = [record for record in read_metrics(sync_run / "metrics.jsonl") if record["kind"] == "step"]
    written = [json.loads(line) for line in (sync_run / "targets.jsonl").read_text().splitlines()]
    for record in steps:
        assert record["targets/all"] > 0
        assert sum(target["step"] == record["step"] for target in written) == record["targets/all"]
        assert not [name for name in record if name.startswith("targets/misaligned")]
        assert record["batch/tokens_distilled"] > 0
        assert 1e-5 < record["sdpo/jsd"] < 0.7
        assert record["sdpo/loss"] > 0


def test_hints_are_measured(sync_run: Path) -> None:
    """Half of the targets are played again from their turn, all comparable; the balance sets the next alpha;
    the divergence falls with the step."""
    steps = [record for record in read_metrics(sync_run / "metrics.jsonl") if record["kind"] == "step"]
    assert sum(record["regrade/tried"] for record in steps) >= 3
    assert [record["regrade/unusable"] for record in steps] == [0.0] * 3
    assert steps[0]["sdpo/alpha"] == 0.5
    for before, after in itertools.pairwise(steps):
        assert after["sdpo/alpha"] == pytest.approx(0.5 * before["sdpo/grad_ratio"])
    assert ["sdpo/jsd_after" in record for record in steps] == [False, True, False]
    assert steps[1]["sdpo/jsd_change"] < 0


def test_failed_steps_are_replayed_and_paired(sync_run: Path) -> None:
    """Each step trains on pairs; they are all written down with their votes, and every call is in the
    ledger."""
    steps = [record for record in read_metrics(sync_run / "metrics.jsonl") if record["kind"] == "step"]
    pairs = list(PairReader(sync_run / "pairs.jsonl"))
    assert len(pairs) == steps[-1]["replay/pairs"] == steps[-1]["pairs/inserted"]
    assert sum(pair.source == "student" for pair in pairs) == steps[-1]["replay/pairs_student"]
    for record in steps:
        assert record["dpo/pairs"] == record["batch/pairs"] > 0
        assert record["dpo/beta"] == pytest.approx(0.1)
    assert steps[0]["dpo/margin"] == 0.0  # the reference is the policy as the pairs came in
    assert steps[-1]["replay/audit_pairs"] > 0
    for pair in pairs:
        assert pair.tokens is not None
        assert len(pair.families) >= 2
        assert {vote.kind for vote in pair.votes} == {"ok"}
    calls = read_calls(sync_run / "ledger.sqlite")
    summary = summary_of(sync_run)
    assert summary["teacher_calls"] == len(calls) > 0
    assert summary["teacher_cost_usd"] == pytest.approx(sum(call.counted_nano_usd for call in calls) / 1e9)


def test_every_trace_parses_and_renders_to_its_token_ids(sync_run: Path, checkout: Path) -> None:
    reader = TraceReader(sync_run / "traces")
    rollouts = list(reader)
    assert len(rollouts) >= 60
    assert not reader.torn
    renderer = ChatRenderer.from_folder(checkout / "assets" / "tiny_policy")
    assert [mismatch for rollout in rollouts for mismatch in verify_rollout(rollout, renderer)] == []


def test_the_export_is_the_trained_policy(sync_run: Path, checkout: Path) -> None:
    """The final folder loads, has the shapes of the first, and other weights."""
    from safetensors.torch import load_file

    before = load_file(checkout / "assets" / "tiny_policy" / "model.safetensors")
    after = load_file(sync_run / "checkpoints" / "final_hf" / "model.safetensors")
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert all((before[name] != after[name]).any() for name in before if "proj" in name)


def test_the_same_seed_gives_the_same_metrics(sync_run: Path, checkout: Path, tmp_path: Path) -> None:
    process = start(checkout, tmp_path / "again", *ALL_CHANNELS, config="cpu_composer")
    output = finish(process)
    assert process.returncode == 0, output
    first, second = (
        [without_times(record) for record in read_metrics(folder / "metrics.jsonl")]
        for folder in (sync_run, tmp_path / "again")
    )
    assert first == second


def test_an_asynchronous_run_keeps_the_lag_bound(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "async"
    process = start(checkout, folder, "--loop.max_policy_lag", "2", "--loop.steps", "5", config="cpu")
    output = finish(process)
    assert process.returncode == 0, output
    summary = summary_of(folder)
    assert 0 < summary["policy_lag_seen_max"] <= 2
    assert set(summary["policy_lag_histogram"]) <= {"0", "1", "2"}
    assert summary["logprob_diff_max"] < 1e-3


def test_interrupt_stops_cleanly(checkout: Path, tmp_path: Path) -> None:
    """SIGINT in step 3: out within 20 s, no process left, traces readable; a second run starts."""
    folder = tmp_path / "interrupted"
    process = start(checkout, folder, "--loop.steps", "50")
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count('"kind": "step"') < 2:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 5
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert time.monotonic() - began < 20, output
    assert process.returncode == 130, output
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert summary_of(folder)["status"] == "interrupted"
    reader = TraceReader(folder / "traces")
    assert len(list(reader)) >= 24
    assert not reader.torn
    assert not list(Path("/dev/shm").glob("forge*")), "published weights were left in shared memory"


def test_a_run_that_cannot_learn_says_why_and_stops(checkout: Path, tmp_path: Path) -> None:
    """Temperature near 0: every group has equal rewards."""
    folder = tmp_path / "barren"
    process = start(
        checkout, folder, "--generator.sampling.temperature", "0.001", "--loop.max_untrainable_batches", "2",
        "--loop.eval_tasks", "0", "--loop.steps", "50",
    )  # fmt: skip
    output = finish(process)
    assert process.returncode == 1, output
    summary = summary_of(folder)
    assert summary["status"] == "failed"
    assert "nothing to train on" in summary["reason"] or "without variance" in summary["reason"]
