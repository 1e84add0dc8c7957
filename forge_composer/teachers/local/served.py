"""Scripted teachers that a command or a run serves itself: `base_url = "http://local/v1"` names them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from forge_composer.config.teachers import TeacherConfig
from forge_composer.teachers.local.settings import LOCAL_URL, TeacherServerConfig


def is_local(teacher: TeacherConfig) -> bool:
    """Whether the teacher is one of the scripted ones."""
    return teacher.base_url.rstrip("/") == LOCAL_URL


@asynccontextmanager
async def reachable(
    teachers: Sequence[TeacherConfig], server: TeacherServerConfig | None
) -> AsyncIterator[list[TeacherConfig]]:
    """The teachers with real addresses; the scripted ones are served as long as the block lasts."""
    if server is None:
        yield list(teachers)
        return
    from forge_composer.teachers.local.server import TeacherServer  # an HTTP server, only where it is needed

    async with TeacherServer(server) as running:
        yield [
            teacher.model_copy(update={"base_url": running.url}) if is_local(teacher) else teacher
            for teacher in teachers
        ]


def local_problems(
    teachers: Sequence[TeacherConfig], server: TeacherServerConfig | None
) -> Iterator[tuple[str, str, str]]:
    """What does not fit between teachers and server: field, what is wrong, remedy."""
    local = {index: teacher for index, teacher in enumerate(teachers) if is_local(teacher)}
    if server is None:
        for index in local:
            remedy = "add the table [local_teachers], or name a real endpoint"
            yield f"teachers.{index}.base_url", "no scripted teachers are served", remedy
        return
    served = [teacher.name for teacher in server.teachers]
    for index, teacher in local.items():
        if teacher.model not in served:
            remedy = f"there are {', '.join(served)}"
            yield f"teachers.{index}.model", "no scripted teacher has this name", remedy
    if not local:
        remedy = f'set base_url = "{LOCAL_URL}" for a teacher, or leave the table out'
        yield "local_teachers", "scripted teachers are served, and none is asked", remedy
