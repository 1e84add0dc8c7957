"""The tables of a report as cells of text, for terminal and page; and what is to be said in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from forge_composer.metrics.summary import duration
from forge_composer.replay_report.missing import Need
from forge_composer.replay_report.report import Report
from forge_composer.replay_report.teachers import percentiles
from forge_composer.teachers.kinds import ReplyKind

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns, rows."""
_NONE = "–"
_WORDS = {
    True: "All limits are held.",
    False: "A limit is not held.",
    None: "The verdict is open: calls are missing, or there was nothing to measure.",
}


def tables(report: Report) -> list[Table]:
    """All tables, the verdict first."""
    return [
        ("Verdict", ("limit", "measured", "", "limit", "result"), list(_checks(report))),
        ("Replay", ("measure", "value"), list(_overview(report))),
        ("Teachers", _TEACHER_COLUMNS, list(_teachers(report))),
        ("Agreement", ("teachers", "steps", "same action", "kappa"), list(_agreement(report))),
        ("Steps", ("outcome", "steps"), list(_outcomes(report))),
    ]


def verdict(report: Report) -> str:
    """The verdict in a sentence."""
    return _WORDS[report.holds]


def _checks(report: Report) -> Iterator[tuple[str, ...]]:
    for check in report.checks:
        sign = "≥" if check.at_least else "≤"
        yield check.title, _number(check.value), sign, f"{check.limit:g}", check.result


def _overview(report: Report) -> Iterator[tuple[str, ...]]:
    gathered, account, latency = report.gathered, report.account, report.latency
    yield "traces", f"{len(gathered.traces):,} of {gathered.read:,} read"
    yield "steps", f"{len(gathered.states):,} of {gathered.read_steps:,}"
    yield "calls", f"{report.calls:,} of {report.planned:,}, {report.cached:,} out of the ledger"
    yield "errors", f"{report.errors:,}{_kinds(report)}"
    yield "requests", f"{account.requests:,}, {account.retries:,} of them retries"
    yield "wall time", f"{report.wall_s:.2f} s; the concurrency permits {report.bound_s:.2f} s"
    if latency is not None:
        yield (
            "latency of a step",
            f"p50 {latency.p50:.3f} s, p95 {latency.p95:.3f} s, p99 {latency.p99:.3f} s",
        )
    yield "cost", f"{_usd(account.cost_usd)}, {_usd(report.usd_per_trace)} a trace"
    yield (
        "tokens",
        f"{account.prompt_tokens:,} in ({account.cached_tokens:,} cached), {account.completion_tokens:,} out",
    )
    yield "pairs", f"{len(report.pairs.made):,}, {_number(report.pairs.per_trace)} a trace"
    yield from _found(report)
    projection = report.projection
    hours = _NONE if projection.hours is None else duration(3600 * projection.hours)
    yield f"{projection.traces:,} such traces", f"{_usd(projection.usd)}, {hours}"


def _kinds(report: Report) -> str:
    kinds = {kind: count for kind, count in report.kinds.most_common() if kind != ReplyKind.OK}
    return f" ({', '.join(f'{kind} {count}' for kind, count in kinds.items())})" if kinds else ""


def _found(report: Report) -> Iterator[tuple[str, ...]]:
    measured, chance = report.opinions.report, report.opinions.chance
    if measured is not None:
        yield "teachers agree", f"on {measured.agreement_rate:.1%} of {measured.steps:,} steps"
        yield "against the student", f"on {measured.disagreement_rate:.1%} of those"
        yield "entropy of a step's votes", f"{measured.entropy:.3f} nats"
    if chance is not None:
        yield (
            "useful pairs against chance",
            f"{chance.observed:,} to {chance.expected:.1f}, p = {chance.p_value:.3g}",
        )


_TEACHER_COLUMNS = (
    "teacher", "family", "calls", "errors", "retries", "p50 s", "p95 s", "cost", "share", "against student",
)  # fmt: skip


def _teachers(report: Report) -> Iterator[tuple[str, ...]]:
    total = report.account.cost_usd
    for numbers in report.teachers:
        found = percentiles(numbers.latencies)
        yield (
            numbers.name,
            numbers.family,
            f"{numbers.calls:,}",
            f"{numbers.errors:,}",
            f"{numbers.account.retries:,}",
            _NONE if found is None else f"{found.p50:.3f}",
            _NONE if found is None else f"{found.p95:.3f}",
            _usd(numbers.account.cost_usd),
            f"{numbers.account.cost_usd / total:.1%}" if total else _NONE,
            _NONE if numbers.disagreement is None else f"{numbers.disagreement:.1%}",
        )


def _agreement(report: Report) -> Iterator[tuple[str, ...]]:
    for pair in report.opinions.pairs:
        yield f"{pair.one} – {pair.other}", f"{pair.steps:,}", f"{pair.rate:.1%}", f"{pair.kappa:.3f}"


def _outcomes(report: Report) -> Iterator[tuple[str, ...]]:
    yield "pair", f"{len(report.pairs.made):,}"
    for reason, count in report.pairs.skipped.most_common():
        yield str(reason).replace("_", " "), f"{count:,}"
    if left := len(report.gathered.states) - len(report.asked.steps):
        yield "not asked about", f"{left:,}"


def notes(report: Report) -> list[str]:
    """What a reader has to know beside the numbers."""
    return [*_missing(report), *_doubts(report)]


def _missing(report: Report) -> Iterator[str]:
    calls = report.missing.calls
    if not calls:
        return
    reasons = ", ".join(f"{kind.replace('_', ' ')} {count:,}" for kind, count in calls.most_common())
    yield (
        f"{calls.total():,} of {report.planned:,} calls are missing ({reasons}). "
        "Started again, the command makes those only."
    )
    if ReplyKind.OVER_BUDGET in calls:
        for name, need in (("run_usd", report.missing.run), ("per_trace_usd", report.missing.trace)):
            if need is not None and need.likely > need.limit:
                yield _advice(name, need)


def _advice(name: str, need: Need) -> str:
    return (
        f"replay.budget.{name} is {need.limit:g}, of which {need.used:.6f} are used. About {need.likely:.4f} "
        f"would do; {need.surely:.4f} surely, as it covers the bound of every missing call."
    )


def _doubts(report: Report) -> Iterator[str]:
    gathered, account = report.gathered, report.account
    if report.asked.interrupted:
        yield "The replay was stopped before it was done."
    if account.unknown_bills:
        yield (
            f"{account.unknown_bills:,} requests were in flight when a process ended or was stopped; their "
            f"bills are not known and count at their bound, {_usd(account.unknown_usd)} in all."
        )
    if gathered.bad_lines:
        yield f"{len(gathered.bad_lines):,} documents could not be read and were left out."
    if gathered.warnings:
        yield f"{gathered.warnings:,} traces hold something that the reader passed over."
    if report.settings.local_teachers is not None:
        yield "Teachers of this replay are scripted: they look the task up, and say nothing about real ones."


def _usd(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"
