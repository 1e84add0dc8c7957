"""A report as JSON types; what was not measured is null."""

from __future__ import annotations

from typing import Any

from forge_composer.replay_report.calls import Account
from forge_composer.replay_report.missing import Need
from forge_composer.replay_report.report import Report
from forge_composer.replay_report.teachers import Percentiles, TeacherNumbers, percentiles

_MOST_BAD_LINES = 100
"""Bad lines that are listed; all are counted."""


def to_json(report: Report) -> dict[str, Any]:
    """Every number; docs/replay.md says what they mean."""
    return {
        "name": report.settings.name,
        **_traces(report),
        **_calls(report),
        **_time(report),
        **_money(report),
        **_opinions(report),
        **_pairs(report),
        "teachers": [_teacher(numbers, report) for numbers in report.teachers],
        "missing": report.missing.calls.total(),
        "missing_by_kind": dict(report.missing.calls),
        "budget": _budget(report),
        "projection": _projection(report),
        "verdict": {
            "holds": report.holds,
            "checks": [
                {
                    "name": check.name,
                    "value": check.value,
                    "limit": check.limit,
                    "is": "at least" if check.at_least else "at most",
                    "result": check.result,
                }
                for check in report.checks
            ],
        },
    }


def _traces(report: Report) -> dict[str, Any]:
    gathered = report.gathered
    return {
        "traces": len(gathered.traces),
        "traces_read": gathered.read,
        "steps": len(gathered.states),
        "steps_of_traces": gathered.read_steps,
        "bad_lines": len(gathered.bad_lines),
        "bad_lines_listed": [str(line) for line in gathered.bad_lines[:_MOST_BAD_LINES]],
        "interrupted": report.asked.interrupted,
    }


def _calls(report: Report) -> dict[str, Any]:
    return {
        "calls": report.calls,
        "calls_planned": report.planned,
        "errors": report.errors,
        "errors_by_kind": {kind: count for kind, count in report.kinds.items() if kind != "ok"},
        "cached_calls": report.cached,
        **_requests(report.account),
    }


def _requests(account: Account) -> dict[str, Any]:
    return {
        "requests": account.requests,
        "retries": account.retries,
        "tokens": {
            "prompt": account.prompt_tokens,
            "prompt_cached": account.cached_tokens,
            "completion": account.completion_tokens,
        },
    }


def _time(report: Report) -> dict[str, Any]:
    return {
        "wall_s": report.wall_s,
        "wall_this_start_s": report.asked.seconds,
        "bound_s": report.bound_s,
        **_percentiles(report.latency),
    }


def _money(report: Report) -> dict[str, Any]:
    account = report.account
    return {
        "cost_usd": account.cost_usd,
        "usd_per_trace": report.usd_per_trace,
        "unknown_bills": account.unknown_bills,
        "unknown_usd": account.unknown_usd,
    }


def _opinions(report: Report) -> dict[str, Any]:
    measured, chance = report.opinions.report, report.opinions.chance
    return {
        "agreement": measured and measured.agreement_rate,
        "agreement_table": measured
        and {
            "steps": measured.steps,
            "rate": measured.agreement_rate,
            "student_disagreement": measured.disagreement_rate,
            "useful_pairs": measured.useful_pairs,
            "entropy_nats": measured.entropy,
            "teacher_pairs": [
                {
                    "teachers": [pair.one, pair.other],
                    "steps": pair.steps,
                    "rate": pair.rate,
                    "kappa": pair.kappa,
                }
                for pair in report.opinions.pairs
            ],
        },
        "chance": chance
        and {
            "observed": chance.observed,
            "expected": chance.expected,
            "p_value": chance.p_value,
            "draws": chance.draws,
        },
    }


def _pairs(report: Report) -> dict[str, Any]:
    pairs = report.pairs
    return {
        "pairs": len(pairs.made),
        "pairs_per_trace": pairs.per_trace,
        "pairs_by_trace": pairs.by_trace,
        "pairs_with_tokens": sum(pair.tokens is not None for pair in pairs.made),
        "steps_without_pair": {str(reason): count for reason, count in pairs.skipped.items()},
    }


def _teacher(numbers: TeacherNumbers, report: Report) -> dict[str, Any]:
    total, account = report.account.cost_usd, numbers.account
    return {
        "name": numbers.name,
        "model": numbers.model,
        "family": numbers.family,
        "calls": numbers.calls,
        "errors": numbers.errors,
        "kinds": dict(numbers.kinds),
        "cached_calls": numbers.cached,
        **_requests(account),
        "cost_usd": account.cost_usd,
        "cost_share": account.cost_usd / total if total else None,
        **_percentiles(percentiles(numbers.latencies)),
        "student_disagreement": numbers.disagreement,
    }


def _percentiles(found: Percentiles | None) -> dict[str, float | None]:
    return {
        "latency_p50_s": None if found is None else found.p50,
        "latency_p95_s": None if found is None else found.p95,
        "latency_p99_s": None if found is None else found.p99,
    }


def _budget(report: Report) -> dict[str, Any]:
    budget = report.settings.replay.budget
    return {
        "run_usd": budget.run_usd,
        "per_trace_usd": budget.per_trace_usd,
        "needed_run_usd": _need(report.missing.run),
        "needed_per_trace_usd": _need(report.missing.trace),
    }


def _need(need: Need | None) -> dict[str, float] | None:
    return None if need is None else {"used": need.used, "likely": need.likely, "surely": need.surely}


def _projection(report: Report) -> dict[str, Any]:
    projection = report.projection
    return {
        "traces": projection.traces,
        "calls": projection.calls,
        "usd": projection.usd,
        "hours": projection.hours,
        "concurrency": report.settings.concurrency | {"steps": report.settings.replay.concurrency},
    }
