"""The scripted judge behind the real client, over HTTP: it names a body, right as often as its skill says."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from forge_composer.config.hints import HintsConfig, JudgeConfig
from forge_composer.envs.micro_tasks import make_task
from forge_composer.hints import texts
from forge_composer.hints.pipeline import HintPipeline
from forge_composer.hints.sources import make_sources
from forge_composer.teachers.local.server import TeacherServer
from forge_composer.teachers.local.settings import ScriptedTeacher, TeacherServerConfig
from tests.hints.micro_rollouts import SUBMIT, environment, group_of, play, write

SHOWN = texts.DEMONSTRATION.format(body="")


def judge(skill: float) -> TeacherServerConfig:
    teacher = ScriptedTeacher(name="scripted/judge", family="judge", skill=skill)
    return TeacherServerConfig(teachers=(teacher,), latency_scale=0.0, report_cost=False)


async def hints(skill: float, tasks: int) -> list[tuple[int, str]]:
    """Task and hint of one failing rollout of each task."""
    found = []
    env, rng = environment(), random.Random("judge")
    async with TeacherServer(judge(skill)) as server:
        config = HintsConfig(
            sources=("judge",), judge=JudgeConfig(base_url=server.url, model="scripted/judge")
        )
        pipeline = HintPipeline(config, make_sources(config), seed=0)
        for index in range(tasks):
            task = make_task("easy", "train", index)
            (wrong,) = task.plausible_wrong_bodies(rng, 1)
            rollout = play(env, [write(wrong) + SUBMIT], task_index=index, group_id=index, index=0)
            assert rollout.reward == 0.0
            targets = (await pipeline.targets_for(group_of(rollout))).targets
            found += [(index, target.hint) for target in targets]
    return found


@pytest.mark.parametrize(("skill", "share"), [(1.0, 1.0), (0.0, 0.0)])
def test_a_judge_names_a_body(skill: float, share: float) -> None:
    found = asyncio.run(hints(skill, tasks=8))
    assert [index for index, _ in found] == list(range(8))
    right = Counter(
        hint.removeprefix(SHOWN) == make_task("easy", "train", index).reference_body for index, hint in found
    )
    assert right[True] == share * 8
    assert all(hint.startswith(SHOWN) and len(hint) > len(SHOWN) for _, hint in found)
