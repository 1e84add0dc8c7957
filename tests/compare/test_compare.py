"""The command from end to end, with a stand-in for training: results, resuming, failures, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from apps.compare import main
from forge_composer.compare.runs import FolderInUseError, locked

STUB = (sys.executable, str(Path(__file__).with_name("stub_train.py")))
DRIVER = """
import sys
from apps.compare import main
sys.exit(main(sys.argv[2:], command=(sys.executable, sys.argv[1])))
"""
"""The command with the stand-in, as a process that can be interrupted."""

EXPERIMENT = """
name = "stub"
base = "configs/cpu_sync.toml"
seeds = [{seeds}]
baseline = "grpo"
[success]
threshold = 0.5
smoothing = 1
[[arms]]
name = "grpo"
overrides.loop.steps = 4
[[arms]]
name = "sdpo"
[arms.overrides]
loop.steps = 4
loss.sdpo.weight = {weight}
"""


@pytest.fixture
def folder(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the comparison `e.toml` writes; the stand-in finds the package."""
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    write_experiment(tmp_path)
    return tmp_path / "e"


def write_experiment(tmp_path: Path, seeds: str = "0, 1", weight: float = 0.5) -> Path:
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT.format(seeds=seeds, weight=weight))
    return path


def run(folder: Path, *options: str) -> int:
    return main([f"{folder}.toml", *options], command=STUB)


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return content


def started(folder: Path) -> list[str]:
    return (folder / "runs" / "started.txt").read_text().split()


def test_from_end_to_end(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment(tmp_path, seeds="0, 1, 2, 3, 4, 5")
    assert run(folder, "--parallel", "2") == 0
    content = results(folder)
    grpo, sdpo = content["arms"]
    assert (grpo["name"], grpo["seeds"]) == ("grpo", [0, 1, 2, 3, 4, 5])
    assert grpo["rollouts_to_threshold"]["reached"] == 0
    assert grpo["rollouts_to_threshold"]["values"] == [None] * 6
    # 0.8 times 1/4 to 4/4 passes 0.5 at the third of four steps of 16 rollouts.
    assert sdpo["rollouts_to_threshold"]["mean"] == sdpo["rollouts_to_threshold"]["low"] == 48
    assert sdpo["rollouts_to_threshold"]["high"] == sdpo["rollouts_to_threshold"]["median"] == 48
    assert sdpo["held_out"]["mean"] == pytest.approx(0.8)
    assert sdpo["runs"][0]["rollouts"] == [16, 32, 48, 64]
    found = {row["endpoint"]: row for row in content["comparisons"]}
    assert found["area"]["p"] == 2 / 64
    assert found["area"]["significant"]
    assert found["rollouts_to_threshold"]["difference"]["mean"] == 48 - 64
    assert content["missing"] == []
    output = capsys.readouterr().out
    assert "sdpo is better than grpo here" in output
    tables = (folder / "results.md").read_text()
    assert "| sdpo | 6 |" in tables
    assert "| not reached within 64 rollouts | 0 of 6 |" in tables
    assert "**sdpo is better than grpo here" in tables
    page = (folder / "results.html").read_text()
    assert "sdpo is better than grpo here" in page
    assert "Plotly.newPlot" in page
    assert 'src="http' not in page


def test_seeds_are_the_outer_loop(folder: Path) -> None:
    assert run(folder) == 0
    assert started(folder) == ["grpo/seed-0", "sdpo/seed-0", "grpo/seed-1", "sdpo/seed-1"]


def test_finished_runs_are_not_run_again_and_others_are_moved_aside(folder: Path) -> None:
    assert run(folder) == 0
    killed = folder / "runs" / "sdpo" / "seed-1"
    (killed / "summary.json").unlink()
    (killed / "half.txt").write_text("kept")
    failed = folder / "runs" / "grpo" / "seed-1"
    (failed / "summary.json").write_text('{"status": "failed", "reason": "x"}')
    before = results(folder)
    assert run(folder) == 0
    assert started(folder)[4:] == ["grpo/seed-1", "sdpo/seed-1"]
    aside = killed.with_name("seed-1.unfinished-1")
    assert (aside / "half.txt").read_text() == "kept"
    assert aside.with_name("seed-1.unfinished-1.log").exists()
    assert results(folder) == before
    (killed / "summary.json").unlink()
    assert run(folder) == 0
    assert killed.with_name("seed-1.unfinished-2").is_dir()


def test_more_seeds_can_be_added_later(tmp_path: Path, folder: Path) -> None:
    assert run(folder) == 0
    write_experiment(tmp_path, seeds="0, 1, 2")
    assert run(folder) == 0
    assert started(folder)[4:] == ["grpo/seed-2", "sdpo/seed-2"]
    assert results(folder)["arms"][0]["seeds"] == [0, 1, 2]


def test_finished_runs_of_another_config_are_refused(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder) == 0
    write_experiment(tmp_path, weight=0.7)
    assert run(folder) == 2
    message = capsys.readouterr().err
    assert "loss.sdpo.weight = 0.5 there, 0.7 here" in message
    assert len(started(folder)) == 4


def test_a_failed_run_is_left_out_and_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_FAIL", "sdpo/seed-0")
    assert run(folder) == 1
    assert len(started(folder)) == 4  # the others went on
    content = results(folder)
    assert content["missing"] == [{"arm": "sdpo", "seed": 0, "status": None, "reason": None}]
    assert content["arms"][1]["seeds"] == [1]
    assert content["notes"][0].startswith("1 of 4 runs are not finished")
    assert "sdpo, seed 0: failed (exit status 1)" in capsys.readouterr().out
    log = folder / "runs" / "sdpo" / "seed-0.log"
    assert "the stub was told to fail" in log.read_text()


def test_bad_arms_are_refused_before_anything_runs(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_experiment(tmp_path)
    path.write_text(path.read_text().replace("sdpo.weight", "sdpo.wieght"))
    assert run(folder) == 2
    message = capsys.readouterr().err
    assert "arm sdpo: loss.sdpo.wieght" in message
    assert "nothing was started" in message
    assert not folder.exists()


def test_a_metric_that_runs_lack_costs_no_second_run(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_experiment(tmp_path)
    right = path.read_text()
    path.write_text(right.replace("[success]", '[success]\nmetric = "reward/succes"'))
    assert run(folder) == 2
    assert "there are reward/success_rate" in capsys.readouterr().err
    path.write_text(right)
    assert run(folder) == 0
    assert len(started(folder)) == 4


def test_other_places_for_the_results(tmp_path: Path, folder: Path) -> None:
    places = {name: tmp_path / "out" / f"x.{name}" for name in ("json", "page")}
    options = ["--output_dir", str(tmp_path / "here"), "--parallel", "4"]
    assert run(folder, *options, "--json", str(places["json"]), "--page", str(places["page"])) == 0
    assert places["json"].exists()
    assert places["page"].exists()
    assert places["json"].with_suffix(".md").exists()
    assert (tmp_path / "here" / "runs" / "grpo" / "seed-0").is_dir()
    assert not folder.exists()


def test_a_folder_holds_one_comparison_at_a_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(folder / "runs"):
        assert run(folder) == 2
        assert "in use by another comparison" in capsys.readouterr().err
        with pytest.raises(FolderInUseError), locked(folder / "runs"):
            pass
    with locked(folder / "runs"):
        pass


def spawn(tmp_path: Path, sleeping: str) -> subprocess.Popen[str]:
    """The command as a process, and the stand-in of one run waiting to be interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, STUB[1], str(tmp_path / "e.toml")],
        env={**os.environ, "STUB_SLEEP": sleeping},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "e" / "runs" / sleeping / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_ctrl_c_stops_the_run_and_compares_what_there_is(tmp_path: Path, folder: Path) -> None:
    process = spawn(tmp_path, "sdpo/seed-1")
    os.killpg(process.pid, signal.SIGINT)  # to the whole foreground group, as a terminal does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert (folder / "runs" / "interrupts.txt").read_text().split() == ["sdpo/seed-1"]  # once
    assert json.loads((folder / "runs/sdpo/seed-1/summary.json").read_text())["status"] == "interrupted"
    content = results(folder)
    assert [arm["seeds"] for arm in content["arms"]] == [[0, 1], [0]]
    assert content["missing"][0]["status"] == "interrupted"
    assert "No difference between sdpo and grpo is shown" in output
    assert run(folder) == 0
    assert results(folder)["missing"] == []


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path, folder: Path) -> None:
    process = spawn(tmp_path, "grpo/seed-0")
    process.send_signal(signal.SIGINT)
    interrupts = folder / "runs" / "interrupts.txt"
    while not interrupts.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "grpo, seed 0: failed (signal 9)" in output
    assert started(folder) == ["grpo/seed-0"]
    assert "no seed is finished in both" in output


def test_a_run_that_outlived_its_comparison_keeps_the_folder(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = spawn(tmp_path, "grpo/seed-0")
    orphan = int((folder / "runs" / "grpo" / "seed-0" / "pid").read_text())
    process.kill()
    process.communicate(timeout=60)
    try:
        assert run(folder) == 2
        assert "by a run that one left behind" in capsys.readouterr().err
    finally:
        os.kill(orphan, signal.SIGKILL)
    while psutil.pid_exists(orphan) and psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert run(folder) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_runs(tmp_path: Path, checkout: Path) -> None:
    path = tmp_path / "real.toml"
    small = (
        "loop = {steps = 2, groups_per_step = 2, eval_tasks = 8}\n"
        "rollout.group_size = 4\ntrainer.scheduler.warmup_steps = 0"
    )
    path.write_text(
        'base = "configs/cpu_sync.toml"\nseeds = [0]\nbaseline = "grpo"\n'
        f'[[arms]]\nname = "grpo"\n[arms.overrides]\n{small}\n'
        f'[[arms]]\nname = "sdpo"\n[arms.overrides]\n{small}\nloss.sdpo.weight = 0.5\n'
    )
    answer = subprocess.run(
        [sys.executable, "-m", "apps.compare", str(path)],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    content = results(tmp_path / "real")
    for arm in content["arms"]:
        assert arm["seeds"] == [0]
        assert arm["runs"][0]["rollouts"] == [8, 16]
        assert arm["held_out"]["n"] == 1
    assert "the smallest two-sided exact p is 2/2 = 1" in content["verdict"][0]
