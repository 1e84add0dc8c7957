"""The script that measures a training step's memory, at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_fused_step_takes_less(checkout: Path, tmp_path: Path) -> None:
    """1,024 tokens of a vocabulary of 4,096: logits of 16 MiB in float32, against a budget of 2 MiB."""
    file = tmp_path / "memory.json"
    script = str(checkout / "benchmarks" / "train_step_memory.py")
    sizes = {"tokens": "1024", "vocab": "4096", "hidden": "64", "layers": "1", "budget_mib": "2"}
    arguments = [text for name, value in sizes.items() for text in (f"--{name}", value)]
    answer = subprocess.run(
        [sys.executable, script, *arguments, "--json", str(file)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    peaks = {(row["variant"], row["dtype"]): row["peak_extra_bytes"] for row in rows}
    assert len(peaks) == 10
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        logits = width * 1024 * 4096
        # Both steps need the rest; only one needs all logits and their gradient.
        assert peaks["grpo full", dtype] - peaks["grpo fused", dtype] > 1.5 * logits - 2 * 2**20
        assert peaks["sdpo eager", dtype] > peaks["sdpo full", dtype]
    losses = {(row["variant"], row["dtype"]): row["losses"] for row in rows}
    assert losses["grpo fused", "float32"] == pytest.approx(losses["grpo full", "float32"], rel=1e-4)
    assert losses["sdpo fused", "float32"] == pytest.approx(losses["sdpo eager", "float32"], rel=1e-4)
