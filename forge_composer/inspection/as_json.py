"""An inspection as a JSON document."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from forge_composer.inspection.records import Inspection, Summary, TargetView, TokenView, Unaligned


def to_json(inspection: Inspection) -> dict[str, Any]:
    """Everything that was found out; turns are counted from 0, as in `targets.jsonl`."""
    total = inspection.total
    return {
        "run": str(inspection.run),
        "model": str(inspection.model),
        "settings": dict(inspection.settings),
        "found": inspection.found,
        "order": inspection.order,
        "summary": {
            "all": None if total is None else dataclasses.asdict(total),
            "by_kind": _summaries(inspection.by_kind),
            "by_source": _summaries(inspection.by_source),
        },
        "misaligned": dict(Counter(unaligned.reason for unaligned in inspection.unaligned)),
        "targets": [_target(view) for view in inspection.shown],
        "misaligned_targets": [_unaligned(unaligned) for unaligned in inspection.unaligned],
        "notes": list(inspection.notes),
    }


def _summaries(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    return {name: dataclasses.asdict(summary) for name, summary in summaries.items()}


def _target(view: TargetView) -> dict[str, Any]:
    return {
        "step": view.step,
        **dataclasses.asdict(view.target),
        "task_id": view.task_id,
        "reward": view.reward,
        "jsd": view.jsd,
        "advantage": view.advantage,
        "inserted": view.context.inserted,
        "tokens": [_token(turn.number, token) for turn in view.turns for token in turn.tokens],
    }


def _token(turn: int, token: TokenView) -> dict[str, Any]:
    return {"turn": turn, **dataclasses.asdict(token), "advantage": token.advantage}


def _unaligned(unaligned: Unaligned) -> dict[str, Any]:
    return {"step": unaligned.step, **dataclasses.asdict(unaligned.target), "reason": unaligned.reason}
