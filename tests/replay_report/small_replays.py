"""Small replays for tests: configs with scripted teachers, traces, and entries of a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from forge_composer.replay_report.micro_traces import write_traces
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.teachers.ledger import CallRecord
from forge_composer.teachers.local.settings import DEFAULT_TEACHERS
from forge_composer.teachers.prices import CostSource

NAMES = ("strong", "medium", "weak")
LOCAL = "http://local/v1"


def teacher(name: str, url: str = LOCAL, **fields: Any) -> dict[str, Any]:
    """A table [[teachers]] for a scripted teacher, at its own price."""
    scripted = DEFAULT_TEACHERS[NAMES.index(name)]
    price = {"input": scripted.input_usd_per_million, "output": scripted.output_usd_per_million}
    return {
        "name": name,
        "model": scripted.name,
        "family": name,
        "base_url": url,
        "price": price,
        "concurrency": 4,
        "sampling": {"max_tokens": 256},
        "retry": {"backoff_s": 0.001, "backoff_max_s": 0.01},
        **fields,
    }


def config_of(folder: Path, *, url: str = LOCAL, steps: int = 8, **tables: Any) -> dict[str, Any]:
    """A config with three teachers and a trace file of so many steps beside it.

    Steps of one or two traces have few different answers, so that chance agrees as well: p's limit is lax.
    """
    traces = folder / "traces.jsonl"
    if not traces.exists():
        write_traces(traces, steps=steps)
    config: dict[str, Any] = {
        "traces": [str(traces)],
        "output_dir": str(folder / "out"),
        "replay": {"traces": "all", "steps": "all", "limits": {"pairs_per_trace": 1.0, "p_value": 0.999}},
        "teachers": [teacher(name, url) for name in NAMES],
    }
    if url == LOCAL:
        config["local_teachers"] = {"latency_scale": 0.0}
    for key, value in tables.items():
        config[key] = config[key] | value if isinstance(config.get(key), dict) else value
    return config


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "replay.toml"
    path.write_text(tomli_w.dumps(config), encoding="utf-8")
    return path


def entry(
    number: int,
    *,
    teacher: str = "a",
    request: str | None = None,
    trace: str = "t",
    step: str = "0",
    at: float = 0.0,
    seconds: float | None = 1.0,
    kind: ReplyKind | None = ReplyKind.OK,
    cost: int | None = 10,
    bound: int = 100,
    sample: int = 0,
) -> CallRecord:
    """An entry of a ledger; `cost` and `bound` in nano-USD."""
    return CallRecord(
        id=number,
        teacher=teacher,
        request=request or f"{teacher}/{trace}/{step}/{sample}",
        trace=trace,
        step=step,
        sample=sample,
        reserved_at=at,
        bound_nano_usd=bound,
        kind=kind,
        cost_nano_usd=cost,
        cost_source=None if kind is None else CostSource.PROVIDER,
        seconds=seconds,
        status=200,
        prompt_tokens=7,
        cached_tokens=2,
        completion_tokens=3,
        answered=kind is ReplyKind.OK,
    )
