"""No hint tells what only the hidden tests know. Real environment, real sandbox, all sources."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from forge_composer.config.hints import HintsConfig
from forge_composer.envs.grading import failures
from forge_composer.envs.micro_tasks import MicroTask, make_task, trusted_results
from forge_composer.hints.filters import leaks
from forge_composer.hints.judge import judge_messages
from forge_composer.hints.pipeline import HintPipeline
from forge_composer.hints.sources import HintRequest, HintSource, make_sources
from forge_composer.types import Feedback, RolloutGroup
from tests.hints.micro_rollouts import (
    SUBMIT,
    environment,
    failing_scripts,
    group_of,
    play,
    shown_texts,
    write,
)

CONFIG = HintsConfig(max_targets_per_rollout=4, max_hint_chars=4000)


class RecordedJudge:
    """Answers with everything that a judge would be shown."""

    async def write(self, request: HintRequest) -> str | None:
        return judge_messages(request, 100_000)[1]["content"]


def hidden_values(task: MicroTask) -> list[Any]:
    return [value for case in task.hidden for value in (*case.arguments, case.expected)]


def failing_group(number: int, env: Any, rng: random.Random) -> tuple[MicroTask, RolloutGroup]:
    """Eight failing rollouts; in every other group a sibling that succeeds."""
    index = rng.randrange(4096)
    task = make_task("easy", "train", index)
    scripts = failing_scripts(task, rng)
    if number % 2:
        scripts.append([write(task.reference_body) + SUBMIT])
    rollouts = [
        play(env, script, task_index=index, group_id=number, index=i) for i, script in enumerate(scripts)
    ]
    return task, group_of(*rollouts)


async def hints_of(group: RolloutGroup) -> list[tuple[str, str, str]]:
    """Every hint that any source has for a failing rollout: source, rollout and text."""
    hints = []
    real = make_sources(CONFIG)
    sources: dict[Any, HintSource] = {**real, "judge": RecordedJudge()}
    for name, source in sources.items():
        alone = HintPipeline(CONFIG, {name: source}, seed=0)
        for target in (await alone.targets_for(group)).targets:
            hints.append((name, target.rollout_id, target.hint))
    return hints


def check(failing: int) -> None:
    env, rng = environment(), random.Random("leaks")
    counted: Counter[str] = Counter()
    rollouts = groups = could = 0
    while rollouts < failing:
        task, group = failing_group(groups, env, rng)
        groups += 1
        rollouts += sum(rollout.reward == 0.0 for rollout in group.rollouts)
        shown, hidden = shown_texts(group), hidden_values(task)
        could += bool(leaks(" ".join(map(repr, hidden)), shown, hidden))
        for source, rollout_id, hint in asyncio.run(hints_of(group)):
            counted[source] += 1
            assert leaks(hint, shown, hidden) == [], (source, rollout_id, hint)
    assert could == groups, "every task has hidden values that were not shown: the check can fail"
    assert counted["template"] >= failing // 4
    assert counted["feedback"] >= failing // 4
    assert counted["sibling"] >= failing // 4
    assert counted["judge"] >= failing


def test_hints_of_100_failing_rollouts_tell_nothing_hidden() -> None:
    check(100)


@pytest.mark.slow
def test_hints_of_1000_failing_rollouts_tell_nothing_hidden() -> None:
    check(1000)


async def test_report_on_hidden_tests_that_the_policy_did_not_see_is_not_repeated() -> None:
    """An environment that adds the hidden failures to its structured feedback, and not to its answers."""
    env, rng = environment(), random.Random("careless")
    task, group = failing_group(0, env, rng)
    wrong = task.plausible_wrong_bodies(rng, 1)[0]
    told = failures(task.function, task.hidden, trusted_results(task, wrong, task.hidden))
    assert told
    for rollout in group.rollouts:
        rollout.turns[0].feedback = [Feedback(r.kind, r.message, r.details) for r in told]
    shown, hidden = shown_texts(group), hidden_values(task)
    hints = await hints_of(group)
    assert hints
    assert all(leaks(hint, shown, hidden) == [] for _, _, hint in hints)
    assert any(leaks(r.message, shown, hidden) for r in told), "the check would have seen it"
