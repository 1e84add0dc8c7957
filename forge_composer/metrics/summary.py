"""`summary.json`: a run in one object, and the line that closes it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_composer._files import write_whole
from forge_composer.metrics.aggregate import LAG_PREFIX
from forge_composer.metrics.sinks import finite_or_none

EDGE = 10
"""Steps at each end of the run that its reward is averaged over."""

LOGPROB_DIFF = "logprob_diff_max"
"""Metrics of this name, in any section, are differences between trainer and generator."""


class SummaryBuilder:
    """Collects what `summary.json` needs while the run goes on; keeps numbers, not rollouts."""

    def __init__(self, *, max_policy_lag: int) -> None:
        """`max_policy_lag` is the configured limit, which the summary states beside what was seen."""
        self.max_policy_lag = max_policy_lag
        self._rewards: list[float] = []
        self._lags: Counter[int] = Counter()
        self._logprob_diff: float | None = None
        self._evaluations: list[dict[str, float | int | None]] = []
        self._steps = 0
        self._rollouts = 0
        self._batch_rollouts = 0.0
        self._step_seconds = 0.0
        self._teacher_calls = 0
        self._teacher_cost_usd = 0.0

    def rollout(self) -> None:
        """Count one finished rollout."""
        self._rollouts += 1

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one optimizer step."""
        self._steps = max(self._steps, step)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        for key, value in metrics.items():
            if key.startswith(LAG_PREFIX):
                self._lags[int(key.removeprefix(LAG_PREFIX))] += int(value)
            elif key.rpartition("/")[2] == LOGPROB_DIFF:
                # NaN is worse than any number and must not get lost in a maximum.
                worst = self._logprob_diff
                keep = worst is not None and (math.isnan(worst) or worst >= value)
                self._logprob_diff = worst if keep else value
        self._batch_rollouts += metrics.get("rollout/count", 0.0)
        self._step_seconds += metrics.get("time/step_s", 0.0)
        if "teachers/replies" in metrics:  # totals of the run so far
            asked = metrics["teachers/replies"] - metrics["teachers/cached"] - metrics["teachers/not_sent"]
            self._teacher_calls = int(asked)
            self._teacher_cost_usd = metrics["teachers/cost_usd"]

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one evaluation (`aggregate.evaluation_metrics`)."""
        self._evaluations.append(
            {
                "step": step,
                "mean": _number(metrics.get("eval/reward_mean")),
                "low": _number(metrics.get("eval/reward_low")),
                "high": _number(metrics.get("eval/reward_high")),
                "success_rate": _number(metrics.get("eval/reward_success_rate")),
                "n": int(metrics.get("eval/scored", 0)),
            }
        )

    def build(self, *, wall_s: float, **more: Any) -> dict[str, Any]:
        """The summary. `more` is added as it is (status, reason, paths).

        `rollouts` counts every finished rollout, evaluation and retries too; `rollouts_per_s` is that of
        training: rollouts of the batches over the wall time of the steps.
        """
        evaluations = self._evaluations
        nothing: dict[str, float | int | None] = {"mean": None, "low": None, "high": None}
        before = evaluations[0] if evaluations else nothing
        after = evaluations[-1] if len(evaluations) > 1 else nothing
        return {
            "steps": self._steps,
            "wall_s": wall_s,
            "reward_first10": _mean(self._rewards[:EDGE]),
            "reward_last10": _mean(self._rewards[-EDGE:]),
            "eval_before": before["mean"],
            "eval_before_interval": [before["low"], before["high"]],
            "eval_after": after["mean"],
            "eval_after_interval": [after["low"], after["high"]],
            "evaluations": evaluations,
            "max_policy_lag": self.max_policy_lag,
            "policy_lag_seen_max": max(self._lags, default=None),
            "policy_lag_histogram": {str(lag): count for lag, count in sorted(self._lags.items())},
            "logprob_diff_max": _number(self._logprob_diff),
            "rollouts": self._rollouts,
            "rollouts_per_s": self._batch_rollouts / self._step_seconds if self._step_seconds > 0 else None,
            "teacher_calls": self._teacher_calls,
            "teacher_cost_usd": self._teacher_cost_usd,
        } | more


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Write the summary as JSON, whole or not at all."""
    write_whole(Path(path), json.dumps(summary, indent=2, allow_nan=False) + "\n")


def closing_line(summary: Mapping[str, Any], folder: str | Path) -> str:
    """One line: reward before and after, and where everything is."""
    parts = []
    first, last = summary["reward_first10"], summary["reward_last10"]
    if first is not None and last is not None:
        parts.append(f"reward {first:.3f} -> {last:.3f} (first and last {EDGE} steps)")
    if summary["eval_before"] is not None and summary["eval_after"] is not None:
        parts.append(f"held-out {_interval(summary, 'eval_before')} -> {_interval(summary, 'eval_after')}")
    parts.append(f"{summary['steps']} steps, {summary['rollouts']} rollouts in {duration(summary['wall_s'])}")
    return f"{'; '.join(parts)}; everything is in {folder}"


def duration(seconds: float) -> str:
    """Seconds in words: `48 s`, `5 min 12 s`, `2 h 3 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _interval(summary: Mapping[str, Any], name: str) -> str:
    low, high = summary[f"{name}_interval"]
    return f"{summary[name]:.3f} [{low:.3f}, {high:.3f}]"


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _number(value: float | None) -> float | None:
    return None if value is None else finite_or_none(value)
