"""`report.html`: the run's curves and its last rollouts, in one file that needs nothing else."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from forge_composer._files import write_whole
from forge_composer.metrics.aggregate import is_success, lookup
from forge_composer.metrics.sinks import read_metrics
from forge_composer.metrics.summary import duration
from forge_composer.report.charts import Chart, Mark, Series, histogram
from forge_composer.report.templates import fill_page
from forge_composer.traces.store import TraceReader
from forge_composer.types import Rollout

LAST_ROLLOUTS = 24
LONGEST_TEXT = 6000
"""Characters of a message that the page shows."""

_CHARTS: list[tuple[str, list[tuple[str, str]], str]] = [
    ("Loss", [("loss", "loss")], ""),
    ("Entropy", [("entropy", "entropy")], "nats, mean over trained tokens"),
    ("Gradient norm", [("gradient norm", "grad_norm")], "before clipping"),
    (
        "Trainer against generator",
        [("max", "logprob_diff_max"), ("mean", "logprob_diff_mean")],
        "|log-probability difference| on sampled tokens, nats",
    ),
    ("Policy lag", [("max", "lag/max"), ("mean", "lag/mean")], "versions, of the tokens trained on"),
    (
        "Where the trainer's time goes",
        [("train", "time/share_train"), ("sync", "time/share_sync"), ("wait", "time/share_wait")],
        "share of a step's wall time",
    ),
    (
        "Where the rollouts' time goes",
        [("generate", "time/share_generate"), ("environment", "time/share_environment")],
        "share of the rollouts' own time, which overlaps with training",
    ),
    (
        "Length of a rollout",
        [
            ("sampled tokens, mean", "rollout/completion_tokens_mean"),
            ("longest", "rollout/completion_tokens_max"),
        ],
        "",
    ),
    (
        "Ends",
        [("truncated", "rollout/truncated_share"), ("malformed turns", "rollout/malformed_share")],
        "share of rollouts, share of turns",
    ),
    (
        "Groups of a batch",
        [
            ("solved", "groups/solved"),
            ("unsolved", "groups/unsolved"),
            ("no variance", "groups/zero_variance"),
        ],
        "",
    ),
]
"""Title, (name, metric) of each line, note. A metric without a section is looked up in all of them."""


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run folder, from what is there; an unfinished run will do.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: the folder holds no `metrics.jsonl`.
    """
    folder = Path(run_dir)
    page = folder / "report.html"
    write_whole(page, render_report(folder), errors="replace")
    return page


def render_report(folder: Path) -> str:
    """The page as text."""
    metrics_file = folder / "metrics.jsonl"
    if not metrics_file.is_file():
        raise FileNotFoundError(f"{metrics_file} does not exist: {folder} is not the folder of a run")
    records = list(read_metrics(metrics_file))
    summary = _summary(folder / "summary.json")
    rollouts, notes = _last_rollouts(folder / "traces")
    return fill_page(
        "forge_composer.report",
        name=folder.resolve().name,
        tiles=_tiles(summary),
        charts=charts(records),
        lag=_lag_histogram(summary),
        summary=summary,
        rollouts=[_rollout_view(rollout) for rollout in rollouts],
        notes=notes,
    )


def charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The page's charts; those without data are left out."""
    steps = [record for record in records if record["kind"] == "step"]
    drawn = [_reward_chart(steps, records)]
    drawn += [
        Chart(title, [_series(steps, name, key) for name, key in lines], note=note)
        for title, lines, note in _CHARTS
    ]
    return [chart for chart in drawn if not chart.empty]


def _reward_chart(steps: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> Chart:
    marks = [
        Mark(
            x=record["step"],
            y=record["eval/reward_mean"],
            low=record["eval/reward_low"],
            high=record["eval/reward_high"],
            label=f"step {record['step']}: held-out reward {record['eval/reward_mean']:.3f} "
            f"[{record['eval/reward_low']:.3f}, {record['eval/reward_high']:.3f}]",
        )
        for record in records
        if record["kind"] == "eval" and record.get("eval/reward_mean") is not None
    ]
    lines = [
        _series(steps, "reward, training", "reward/mean"),
        _series(steps, "success rate, training", "reward/success_rate"),
    ]
    if lines[0].points == lines[1].points:  # a binary reward is its own success rate
        lines.pop()
    return Chart("Reward", lines, marks, marks_name="held-out tasks, 95% interval")


def _series(steps: Sequence[Mapping[str, Any]], name: str, key: str) -> Series:
    points: list[tuple[float, float | None]] = []
    for record in steps:
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        points.append((float(record["step"]), lookup(numbers, key)))
    return Series(name, points)


def _summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _tiles(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, small print) of the numbers at the top."""
    if not summary:
        return []
    tiles = [
        ("Reward", _change(summary["reward_first10"], summary["reward_last10"]), "first and last 10 steps"),
    ]
    before, after = summary["eval_before"], summary["eval_after"]
    if before is not None and after is not None:
        spans = (_span(summary[f"eval_{when}_interval"]) for when in ("before", "after"))
        tiles.append(("Held-out reward", _change(before, after), f"95% intervals {' and '.join(spans)}"))
    rate = summary["rollouts_per_s"]
    tiles += [
        ("Steps", str(summary["steps"]), f"in {duration(summary['wall_s'])}"),
        ("Rollouts", f"{summary['rollouts']:,}", f"{rate:.2f} a second while training" if rate else ""),
        ("Policy lag", _or_dash(summary["policy_lag_seen_max"]), f"limit {summary['max_policy_lag']}"),
        (
            "Log-probability difference",
            "–" if summary["logprob_diff_max"] is None else f"{summary['logprob_diff_max']:.1e}",
            "largest, trainer against generator",
        ),
    ]
    return tiles


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "–"
    return f"{before:.2f} → {after:.2f}"


def _span(interval: Sequence[float]) -> str:
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _lag_histogram(summary: Mapping[str, Any]) -> Markup | None:
    counts = summary.get("policy_lag_histogram")
    if not counts:
        return None
    return histogram("Lag of trained tokens", [(f"lag {lag}", float(n)) for lag, n in counts.items()])


def _last_rollouts(folder: Path) -> tuple[list[Rollout], list[str]]:
    """The latest rollouts of the traces, and what could not be read."""
    if not folder.is_dir():
        return [], []
    latest: deque[Rollout] = deque(maxlen=LAST_ROLLOUTS)
    notes: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        reader = TraceReader(path)
        try:
            latest.extend(reader)
        except ValueError as error:
            notes.append(str(error))
        notes += [str(torn) for torn in reader.torn]
    return sorted(latest, key=lambda rollout: -rollout.ended_at), notes


def _rollout_view(rollout: Rollout) -> dict[str, Any]:
    versions = sorted({v for turn in rollout.turns for v in turn.versions})
    return {
        "rollout": rollout,
        "success": is_success(rollout),
        "seconds": max(0.0, rollout.ended_at - rollout.started_at),
        "versions": "–"
        if not versions
        else f"{versions[0]}" + (f"–{versions[-1]}" if len(versions) > 1 else ""),
        "messages": [(message["role"], _shortened(message["content"])) for message in rollout.messages],
        "turns": [
            {
                "reasoning": _shortened(turn.action.reasoning),
                "text": _shortened(turn.action.text),
                "calls": [_call(call.name, call.arguments) for call in turn.action.tool_calls],
                "error": turn.action.error,
                "observations": [_shortened(text) for text in turn.observations],
                "feedback": turn.feedback,
                "tokens": len(turn.completion_ids),
                "finish": turn.finish_reason,
                "logprob": sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else None,
            }
            for turn in rollout.turns
        ],
    }


def _call(name: str, arguments: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    return name, [
        (key, _shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
        for key, value in arguments.items()
    ]


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}\n… {len(text) - LONGEST_TEXT:,} more characters"
