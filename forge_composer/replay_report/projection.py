"""What many traces like these would cost and take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_composer.replay_report.calls import lower_bound_s
from forge_composer.replay_report.settings import ReplaySettings
from forge_composer.replay_report.teachers import TeacherNumbers
from forge_composer.teachers.ledger import CallRecord


@dataclass(slots=True, frozen=True)
class Projection:
    """Means of this replay, times the number of traces; None where nothing was measured.

    Attributes:
        traces: how many.
        calls: that it would take.
        usd: what they would cost.
        hours: what they would take at least, with the concurrency and the rate limits of the config.
    """

    traces: int
    calls: int | None
    usd: float | None
    hours: float | None


def project(
    settings: ReplaySettings,
    teachers: Sequence[TeacherNumbers],
    calls: Sequence[CallRecord],
    *,
    steps: int,
    traces: int,
) -> Projection:
    """Project a replay of `traces` traces with `steps` chosen steps to `projection_traces`.

    Means are over the calls that were made, so that a replay with missing calls projects the whole.
    """
    many = settings.projection_traces
    if not traces:
        return Projection(many, None, None, None)
    asked = steps * settings.replay.samples / traces * many  # of each teacher
    total = round(asked * len(settings.teachers))
    means = [teacher.usd_per_call for teacher in teachers]
    if any(not teacher.calls for teacher in teachers):
        return Projection(many, total, None, None)
    usd = sum(mean or 0.0 for mean in means) * asked
    share = sum(teacher.calls for teacher in teachers) / len(teachers)  # calls of each in this replay
    bound = lower_bound_s(calls, settings.concurrency, settings.replay.concurrency) / share * asked
    return Projection(many, total, usd, max(bound, _limited_s(settings, teachers, asked)) / 3600)


def _limited_s(settings: ReplaySettings, teachers: Sequence[TeacherNumbers], asked: float) -> float:
    """Seconds that the slowest teacher's rate limits ask for."""
    minutes = [0.0]
    for config, numbers in zip(settings.teachers, teachers, strict=True):
        sent = numbers.account
        if config.requests_per_minute:
            minutes.append(sent.requests / numbers.calls * asked / config.requests_per_minute)
        if config.tokens_per_minute:
            tokens = sent.prompt_tokens + sent.completion_tokens
            minutes.append(tokens / numbers.calls * asked / config.tokens_per_minute)
    return 60.0 * max(minutes)
