"""Run folders and experiments made up for tests, and a stand-in for the training command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_composer.compare.curves import Curve, RunResult
from forge_composer.compare.experiment import Experiment

ROLLOUTS = 10
"""Rollouts of a step in made-up runs; a step takes 2 seconds."""


def experiment(**changes: Any) -> Experiment:
    """Two arms, eight seeds, no smoothing."""
    tree: dict[str, Any] = {
        "base": "base.toml",
        "seeds": list(range(8)),
        "baseline": "grpo",
        "arms": [{"name": "grpo"}, {"name": "sdpo"}],
        "success": {"smoothing": 1, "threshold": 0.5},
    }
    return Experiment.model_validate_json(json.dumps(tree | changes))


def result(
    seed: int, values: Sequence[float], *, held_out: float | None = None, tasks: int = 100
) -> RunResult:
    """A run whose steps have these values."""
    steps = np.arange(1, len(values) + 1, dtype=np.float64)
    curve = Curve(ROLLOUTS * steps, 2 * steps, np.asarray(values, dtype=np.float64))
    return RunResult(seed, curve, held_out, tasks if held_out is not None else 0, 0)


def flat(values: Sequence[float]) -> list[RunResult]:
    """One run a seed, constant at these values."""
    return [result(seed, [value] * 5, held_out=value) for seed, value in enumerate(values)]


def write_run(
    folder: Path,
    values: Sequence[float],
    *,
    config: str = "",
    status: str | None = "completed",
    held_out: float = 0.5,
    more: Mapping[str, float] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> None:
    """Files of a run as the recorder leaves them; `status` None for one that was killed."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    records: list[dict[str, Any]] = [evaluation(0, 0.1)]
    for step, value in enumerate(values, start=1):
        records.append(
            {
                "kind": "step",
                "step": step,
                "reward/success_rate": value,
                "rollout/count": float(ROLLOUTS),
                "time/step_s": 2.0,
                **(more or {}),
            }
        )
    records.append(evaluation(len(values), held_out))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if status is not None:
        content = {"status": status, "reason": None, "rollouts": ROLLOUTS * len(values) + 32}
        (folder / "summary.json").write_text(json.dumps(content | dict(summary or {})))


def evaluation(step: int, rate: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "eval/reward_success_rate": rate,
        "eval/count": 16.0,
        "eval/scored": 16.0,
    }
