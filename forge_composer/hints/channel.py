"""The SDPO channel as the controller sees it: targets for a batch, and what a guard leaves of its weight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from forge_composer.config.schema import Config
from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.guard import CollapseGuard
from forge_composer.hints.records import Target
from forge_composer.hints.regrade import Regrader
from forge_composer.hints.samples import TargetedSampleBuilder
from forge_composer.losses.schedule import scheduled_share
from forge_composer.rollout.episode import EpisodeRunner
from forge_composer.rollout.lockstep import LockstepGate
from forge_composer.services import Generators
from forge_composer.types import Rollout, RolloutGroup, TrainingSample


class FeedbackChannel:
    """Targets, alpha's share, metrics and warnings; there only with `loss.sdpo.weight` above 0."""

    def __init__(
        self,
        config: Config,
        runner: EpisodeRunner,
        generators: Generators,
        *,
        record: Callable[[int, Sequence[Target]], None],
        warn: Callable[[str], None],
    ) -> None:
        """Take the parts.

        Args:
            config: the run's.
            runner: plays the episodes of a re-grading, and knows the policy's chat template.
            generators: sample for it.
            record: called with a step and its targets.
            warn: tells the user.

        Raises:
            ValueError: the judge's key is not in the environment.
        """
        self.config = config
        contexts = TeacherContexts(runner.renderer, config.hints.position, max_tokens=config.trainer.seq_len)
        self.builder = TargetedSampleBuilder(config.hints, contexts, config.seed)
        self.guard = CollapseGuard(config.hints.guard)
        self.generators = generators
        self.regrader: Regrader | None = None
        if config.hints.regrade_fraction > 0:
            environment = config.environment
            self.regrader = Regrader(
                runner,
                contexts,
                fraction=config.hints.regrade_fraction,
                seed=config.seed,
                max_concurrent=environment.workers * environment.sessions_per_worker,
            )
        self._record, self._warn = record, warn
        self._told: set[str] = set()

    @property
    def scale(self) -> float:
        """What the guard leaves of alpha."""
        return self.guard.scale

    def rests(self, step: int) -> bool:
        """Whether the schedule or the guard leaves nothing of alpha in a step (from 0)."""
        schedule = self.config.loss.sdpo.schedule
        return self.scale * scheduled_share(schedule, step, self.config.loop.steps) == 0.0

    async def add_targets(
        self, samples: list[TrainingSample], groups: Sequence[RolloutGroup], step: int
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """The samples with the groups' targets, and metrics; in a step that rests, the samples as they are.

        Args:
            samples: what GRPO trains on in the step.
            groups: whose failed turns are targeted, also those without variance.
            step: the optimizer step, from 0.
        """
        if self.rests(step):
            return samples, {}
        found = await self.builder.add(samples, groups)
        self._record(step + 1, found.targets)
        for name in sorted(found.counts):
            if name.startswith("misaligned/"):
                self._warn_once(name, f"targets dropped, {name}: see forge_composer.hints.context")
        metrics = {f"targets/{name}": float(count) for name, count in sorted(found.counts.items())}
        metrics["targets/all"] = float(len(found.targets))
        if found.targets:
            metrics["targets/hint_chars_mean"] = sum(len(t.hint) for t in found.targets) / len(found.targets)
        return found.samples, metrics | await self._regrade(found.targets, groups)

    async def _regrade(self, targets: Sequence[Target], groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Whether the hints of a sample of the targets help."""
        if self.regrader is None:
            return {}
        began = time.perf_counter()
        synchronous = self.config.loop.max_policy_lag == 0
        sampler = LockstepGate(self.generators) if synchronous else self.generators
        rollouts = (rollout for group in groups for rollout in group.rollouts)
        result = await self.regrader.measure(targets, rollouts, sampler)
        for reason, message in sorted(result.errors.items()):
            self._warn_once(f"regrade/{reason}", f"targets not re-graded, {reason}: {message}")
        return result.metrics() | {"time/regrade_s": time.perf_counter() - began}

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._warn(message)

    def watch(self, metrics: dict[str, float]) -> None:
        """Let the guard see a step's metrics; adds to them.

        Raises:
            CollapseError: the guard stops the run.
        """
        if warning := self.guard.step(metrics):
            self._warn(warning)
        metrics["sdpo/guard_scale"] = self.scale

    def watch_evaluation(self, rollouts: Sequence[Rollout]) -> None:
        """Let the guard see an evaluation; as `watch`."""
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        if rewards and (warning := self.guard.evaluation(math.fsum(rewards) / len(rewards))):
            self._warn(warning)
