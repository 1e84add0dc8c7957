"""The commands before anything is spawned: plans, and configs that are refused."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest


def command(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "apps.grpo_composer", *arguments],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["cpu", "cpu_sync", "a100x8", "h200x1", "slurm_4x8"])
def test_plans_print_on_any_machine(checkout: Path, name: str) -> None:
    answer = command(checkout, "--config", f"configs/{name}.toml", "--plan")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for section in ("Meshes", "Batch", "Memory per trainer", "Memory per generator", "Problems"):
        assert section in answer.stdout
    if name == "a100x8":
        assert "8: trainer GPUs 0-3, generators GPUs 4-7" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--trainer.nproc", "3"], ["trainer.nproc", "3", "set trainer.nproc = 2"]),
        (["--trainer.optimiser.lr", "1"], ["trainer.optimiser", "trainer.optimizer"]),
        (["--rollout.group_size", "1"], ["rollout.group_size", "every advantage is 0"]),
        (["--model.path", "no/such/folder"], ["model.path", "no such folder"]),
        (["--generator.max_model_len", "64"], ["generator.max_model_len", "64"]),
        (["--trainer.optimizer.lr", "fast"], ["trainer.optimizer.lr", "fast"]),
    ],
)
def test_bad_configs_are_refused_at_once(checkout: Path, arguments: list[str], parts: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = command(checkout, "--config", "configs/cpu.toml", *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # processor seconds
    assert answer.returncode == 2
    assert "nothing was started" in answer.stderr
    for part in parts:
        assert part in answer.stderr
