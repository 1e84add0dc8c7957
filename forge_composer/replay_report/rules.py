"""What is wrong with settings whose fields are right one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forge_composer.config.errors import Problem
from forge_composer.replay_report.settings import LOCAL_URL, ReplaySettings


def contradictions(settings: ReplaySettings, source: str) -> list[Problem]:
    """All problems; `source` is the file, for messages."""
    return [Problem(source, *problem) for rule in (_teachers, _local, _pairs) for problem in rule(settings)]


_Found = Iterator[tuple[str, str, str, str]]
"""Field, value, what is wrong, remedy."""


def _teachers(settings: ReplaySettings) -> _Found:
    if not settings.teachers:
        yield "teachers", "", "there is no teacher to ask", "add a table [[teachers]] for each"
        return
    names = Counter(teacher.name for teacher in settings.teachers)
    for name in sorted(name for name, count in names.items() if count > 1):
        yield "teachers", name, "two teachers have this name", "give each its own; the ledger goes by it"
    families = {teacher.family_name for teacher in settings.teachers}
    needed = settings.replay.min_quorum
    if len(families) < needed:
        yield (
            "replay.min_quorum",
            str(needed),
            f"the teachers are of {len(families)} model families, so that no step could give a pair",
            "add teachers of other families, or lower quorum and min_quorum",
        )


def _local(settings: ReplaySettings) -> _Found:
    local = {
        index: teacher
        for index, teacher in enumerate(settings.teachers)
        if teacher.base_url.rstrip("/") == LOCAL_URL
    }
    if settings.local_teachers is None:
        for index in local:
            remedy = "add the table [local_teachers], or name a real endpoint"
            yield f"teachers.{index}.base_url", LOCAL_URL, "no scripted teachers are served", remedy
        return
    served = [teacher.name for teacher in settings.local_teachers.teachers]
    for index, teacher in local.items():
        if teacher.model not in served:
            wrong, remedy = "no scripted teacher has this name", f"there are {', '.join(served)}"
            yield f"teachers.{index}.model", teacher.model, wrong, remedy
    if not local:
        remedy = f'set base_url = "{LOCAL_URL}" for a teacher, or leave the table out'
        yield "local_teachers", "", "scripted teachers are served, and none is asked", remedy


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
