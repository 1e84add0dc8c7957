"""The SDPO channel in the loop: targets, rest, guard, re-grading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_composer.config.load import load
from forge_composer.config.schema import Config
from forge_composer.hints.channel import FeedbackChannel
from forge_composer.hints.guard import CollapseError
from forge_composer.hints.records import Target
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rollout.episode import EpisodeRunner, TokenLimits
from forge_composer.types import RolloutGroup
from tests.hints.test_samples import members
from tests.rendering.chat_fixtures import make_renderer


class Notes:
    """Keeps what the channel records and says."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int]] = []
        self.warnings: list[str] = []

    def record(self, step: int, targets: Any) -> None:
        self.recorded.append((step, len(targets)))


def make_channel(
    checkout: Path, renderer: ChatRenderer, *overrides: str, broken: bool = False
) -> tuple[FeedbackChannel, Notes]:
    arguments = ["--loss.sdpo.weight", "1.0", "--trainer.seq_len", "4000", "--loop.steps", "4", *overrides]
    config: Config = load(checkout / "configs" / "cpu.toml", arguments)
    notes = Notes()
    environments: Any = None  # no episode runs without re-grading
    limits = TokenLimits(64, 4000, 4000, 4000)
    runner = EpisodeRunner(renderer, environments, config.rollout, limits)
    generators: Any = None
    channel = FeedbackChannel(config, runner, generators, record=notes.record, warn=notes.warnings.append)
    if broken:
        channel.builder.pipeline.targets_for = _empty_hint  # type: ignore[method-assign]
    return channel, notes


async def _empty_hint(group: RolloutGroup) -> Any:
    from forge_composer.hints.pipeline import HintResult

    target = Target(group.rollouts[0].rollout_id, 0, "test_failed", "  ", "template")
    return HintResult([target, target])


def a_group(renderer: ChatRenderer) -> RolloutGroup:
    return RolloutGroup(0, "t", 0, members(renderer, ("a", "b", 0.0), ("c", "right", 1.0)))


async def test_targets_are_attached_recorded_and_counted(checkout: Path) -> None:
    """Two failed turns, each with the sibling's body as its hint; the step is counted from 1."""
    renderer = make_renderer()
    channel, notes = make_channel(checkout, renderer)
    samples, metrics = await channel.add_targets([], [a_group(renderer)], step=2)
    assert [len(sample.targets) for sample in samples] == [2]
    assert metrics["targets/all"] == metrics["targets/source/sibling"] == 2.0
    assert metrics["targets/hint_chars_mean"] == len("Hint: this body is right:\nright")
    assert notes.recorded == [(3, 2)]
    assert notes.warnings == []


async def test_a_hint_that_says_nothing_is_told_once(checkout: Path) -> None:
    renderer = make_renderer()
    channel, notes = make_channel(checkout, renderer, broken=True)
    for step in range(2):
        samples, metrics = await channel.add_targets([], [a_group(renderer)], step)
        assert samples == []
        assert metrics["targets/misaligned/no hint"] == 2.0
        assert metrics["targets/all"] == 0.0
    assert len(notes.warnings) == 1
    assert "no hint" in notes.warnings[0]


async def test_no_hint_is_written_in_a_step_that_rests(checkout: Path) -> None:
    """The last step of a decay to 0, and every step once the guard has switched the channel off."""
    renderer = make_renderer()
    schedule = ["--loss.sdpo.schedule.decay", "linear", "--loss.sdpo.schedule.decay_steps", "2"]
    channel, notes = make_channel(checkout, renderer, *schedule)
    assert [channel.rests(step) for step in range(4)] == [False, False, False, True]
    assert await channel.add_targets([], [a_group(renderer)], step=3) == ([], {})
    channel.guard.scale = 0.0
    assert channel.rests(0)
    assert notes.recorded == []


def test_the_guard_sees_steps_and_evaluations(checkout: Path) -> None:
    renderer = make_renderer()
    channel, notes = make_channel(checkout, renderer, "--hints.guard.window", "1")
    metrics = {"sdpo/jsd": 0.1}
    channel.watch(metrics)
    assert metrics["sdpo/guard_scale"] == 1.0
    channel.watch(metrics := {"sdpo/jsd": 0.4})
    assert (metrics["sdpo/guard_scale"], channel.scale) == (0.5, 0.5)
    channel.watch_evaluation(members(renderer, ("a", "b", 1.0)))
    channel.watch_evaluation(members(renderer, ("a", "b", 0.0)))
    assert channel.scale == 0.25
    assert len(notes.warnings) == 2


def test_the_guard_can_stop_the_run(checkout: Path) -> None:
    channel, _ = make_channel(
        checkout, make_renderer(), "--hints.guard.window", "1", "--hints.guard.action", "stop"
    )
    channel.watch({"train/entropy": 1.0})
    with pytest.raises(CollapseError):
        channel.watch({"train/entropy": 9.0})
