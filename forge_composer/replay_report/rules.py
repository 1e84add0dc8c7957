"""What is wrong with settings whose fields are right one by one."""

from __future__ import annotations

from collections.abc import Iterator

from forge_composer.config.errors import Problem
from forge_composer.config.teachers import doubled_names, too_few_families
from forge_composer.replay_report.settings import ReplaySettings
from forge_composer.teachers.local.served import local_problems


def contradictions(settings: ReplaySettings, source: str) -> list[Problem]:
    """All problems; `source` is the file, for messages."""
    return [Problem(source, *problem) for rule in (_teachers, _local, _pairs) for problem in rule(settings)]


_Found = Iterator[tuple[str, str, str, str]]
"""Field, value, what is wrong, remedy."""


def _teachers(settings: ReplaySettings) -> _Found:
    if not settings.teachers:
        yield "teachers", "", "there is no teacher to ask", "add a table [[teachers]] for each"
        return
    for name in doubled_names(settings.teachers):
        yield "teachers", name, "two teachers have this name", "give each its own; the ledger goes by it"
    needed = settings.replay.min_quorum
    if problem := too_few_families(settings.teachers, needed):
        remedy = "add teachers of other families, or lower quorum and min_quorum"
        yield "replay.min_quorum", str(needed), problem, remedy


def _local(settings: ReplaySettings) -> _Found:
    for field, wrong, remedy in local_problems(settings.teachers, settings.local_teachers):
        yield field, _value(settings, field), wrong, remedy


def _value(settings: ReplaySettings, field: str) -> str:
    _, _, rest = field.partition("teachers.")
    index, _, name = rest.partition(".")
    return str(getattr(settings.teachers[int(index)], name)) if name else ""


def _pairs(settings: ReplaySettings) -> _Found:
    """What needs an environment or a generator, of which there is none here."""
    replay = settings.replay
    if replay.outcome_gate != "off":
        wrong = "pairs are not played here: there is no environment"
        yield (
            "replay.outcome_gate",
            replay.outcome_gate,
            wrong,
            'set it to "off"; a training run has the gate',
        )
    if replay.audit_fraction > 0:
        wrong = "pairs are not played here: there is no environment"
        yield "replay.audit_fraction", str(replay.audit_fraction), wrong, "set it to 0"
    if replay.rendered == "drop":
        wrong = "the policy is not sampled here, so that every chosen side is rendered and would be dropped"
        yield "replay.rendered", "drop", wrong, 'set it to "keep"'
