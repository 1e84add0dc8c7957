"""Does a hint help? Targeted turns are taken again, with it and without it, and played to their end.

Both episodes of a target leave the same state of the same task with the same sampling seed, and differ in the
prompt of the targeted turn alone. The seed is a new one, and the turn without the hint is sampled anew as
well: a target is a turn that went wrong, so that almost anything does better than the record of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.records import Misaligned, Target
from forge_composer.rollout.episode import EpisodeRunner, derived_seed
from forge_composer.rollout.fork import Fork, SampledTurn, fork_failure, run_fork
from forge_composer.rollout.lockstep import LockstepGate
from forge_composer.services import Sampler
from forge_composer.types import Rollout


@dataclass(slots=True, frozen=True)
class Comparison:
    """The two episodes of a target; both have a reward."""

    target: Target
    with_hint: Rollout
    without: Rollout

    @property
    def gain(self) -> float:
        """Reward with the hint minus reward without it; above 0 where the teacher is better."""
        assert self.with_hint.reward is not None
        assert self.without.reward is not None
        return self.with_hint.reward - self.without.reward


@dataclass(slots=True)
class RegradeResult:
    """What a sample of targets showed, in the order of the targets.

    `unusable` counts the targets that gave no comparison, by reason: `misaligned` (no teacher context),
    `no_room` (the hinted prompt leaves no token for the turn), `not_deterministic` (the environment did not
    repeat what was recorded), `failed` (anything else: environment, generator, time). `errors` has the first
    message of each reason.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    unusable: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def tried(self) -> int:
        """Targets of the sample."""
        return len(self.comparisons) + self.unusable.total()

    @property
    def teacher_better(self) -> int:
        """Targets whose episode with the hint had the higher reward."""
        return sum(pair.gain > 0 for pair in self.comparisons)

    @property
    def student_better(self) -> int:
        """Targets whose episode without the hint had the higher reward."""
        return sum(pair.gain < 0 for pair in self.comparisons)

    @property
    def equal(self) -> int:
        """Targets with equal rewards."""
        return sum(pair.gain == 0 for pair in self.comparisons)

    def metrics(self) -> dict[str, float]:
        """Counts, and over the usable targets the mean rewards and the share whose teacher is better.

        What nothing was there to measure is left out.
        """
        numbers: dict[str, float] = {
            "regrade/tried": self.tried,
            "regrade/unusable": self.unusable.total(),
            "regrade/teacher_better": self.teacher_better,
            "regrade/student_better": self.student_better,
            "regrade/equal": self.equal,
        }
        numbers |= {f"regrade/unusable/{reason}": self.unusable[reason] for reason in sorted(self.unusable)}
        usable = len(self.comparisons)
        if usable:
            numbers |= {
                "regrade/teacher_better_share": self.teacher_better / usable,
                "regrade/reward_with_hint": _mean([pair.with_hint for pair in self.comparisons]),
                "regrade/reward_without": _mean([pair.without for pair in self.comparisons]),
            }
        return {name: float(value) for name, value in numbers.items()}

    def drop(self, reason: str, message: str) -> None:
        """Count a target that gave no comparison."""
        self.unusable[reason] += 1
        self.errors.setdefault(reason, message)


class Regrader:
    """Compares teacher and student on a sample of targets.

    Which targets are in the sample, and the seeds of their episodes, depend on `seed` and the target alone.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        contexts: TeacherContexts,
        *,
        fraction: float,
        at_most: int | None = None,
        seed: int,
        max_concurrent: int,
    ) -> None:
        """See the class.

        Args:
            runner: plays the episodes, under its limits.
            contexts: those that the targets are distilled with.
            fraction: share of the targets that are tried, 0 to 1; each is drawn on its own.
            at_most: most targets of one batch, whatever the fraction gives.
            seed: the run's.
            max_concurrent: most episodes at once, at least 2. Under a `LockstepGate` all of them need an
                environment session at the same time.

        Raises:
            ValueError: a number is out of its range.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction = {fraction:g}: expected 0 to 1")
        if at_most is not None and at_most < 0:
            raise ValueError(f"at_most = {at_most}: expected at least 0")
        if max_concurrent < 2:
            raise ValueError(f"max_concurrent = {max_concurrent}: a target needs two episodes at once")
        self.runner, self.contexts, self.seed = runner, contexts, seed
        self.fraction, self.at_most, self.max_concurrent = fraction, at_most, max_concurrent

    def choose(self, targets: Sequence[Target]) -> list[Target]:
        """The sample, in the order of the targets."""
        draws = [random.Random(f"regrade/{self.seed}/{t.rollout_id}/{t.turn}").random() for t in targets]
        drawn = sorted((draw, index) for index, draw in enumerate(draws) if draw < self.fraction)
        return [targets[index] for index in sorted(index for _, index in drawn[: self.at_most])]

    async def measure(
        self, targets: Sequence[Target], rollouts: Iterable[Rollout], sampler: Sampler
    ) -> RegradeResult:
        """Try a sample of the targets.

        Args:
            targets: of one batch.
            rollouts: the recorded ones that the targets are about, others too.
            sampler: the policy. For a run that must repeat exactly, a `LockstepGate` of its own: the episodes
                join it and leave it here, a wave of at most `max_concurrent` at a time.

        Raises:
            KeyError: a target's rollout is not there.
            ValueError: it was not recorded by an `EpisodeRunner`.
        """
        recorded = {rollout.rollout_id: rollout for rollout in rollouts}
        result = RegradeResult()
        pairs = []
        for target in self.choose(targets):
            forks = self._forks(recorded[target.rollout_id], target, result)
            if forks is not None:
                pairs.append((target, forks))
        size = self.max_concurrent // 2
        for first in range(0, len(pairs), size):
            wave = pairs[first : first + size]
            ended = await self._run([fork for _, forks in wave for fork in forks], sampler)
            for (target, _), with_hint, without in zip(wave, ended[::2], ended[1::2], strict=True):
                _compare(target, with_hint, without, result)
        return result

    def _forks(self, rollout: Rollout, target: Target, result: RegradeResult) -> tuple[Fork, Fork] | None:
        """The episode with the hint and the one without; None, counted in `result`, if there are none."""
        where = f"rollout {target.rollout_id}, turn {target.turn}"
        aligned = self.contexts.build(rollout, target)
        if isinstance(aligned, Misaligned):
            result.drop("misaligned", f"{where}: {aligned.reason}")
            return None
        hinted = aligned.teacher_ids[: -len(rollout.turns[target.turn].completion_ids)]
        # The longer prompt may leave fewer tokens for the turn: both sides get as many.
        room = self.runner.limits.max_model_len - len(hinted)
        if room <= 0:
            limit = self.runner.limits.max_model_len
            result.drop("no_room", f"{where}: {len(hinted)} tokens with the hint, of at most {limit}")
            return None
        seed = derived_seed("regrade", self.seed, target.rollout_id, target.turn)
        name = f"{target.rollout_id}+{target.turn}"
        return (
            Fork(rollout, target.turn, SampledTurn(tuple(hinted), room), f"{name}.hint", seed),
            Fork(rollout, target.turn, SampledTurn(None, room), f"{name}.plain", seed),
        )

    async def _run(self, forks: Sequence[Fork], sampler: Sampler) -> list[Rollout]:
        """Run forks side by side."""
        gate = sampler if isinstance(sampler, LockstepGate) else None
        if gate is not None:
            gate.join(len(forks))

        async def one(fork: Fork) -> Rollout:
            with gate.leaving() if gate is not None else nullcontext():
                return await run_fork(fork, self.runner, sampler)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(fork)) for fork in forks]
        return [task.result() for task in running]


def _compare(target: Target, with_hint: Rollout, without: Rollout, result: RegradeResult) -> None:
    for rollout in (with_hint, without):
        reason = fork_failure(rollout)
        if reason is not None:
            result.drop(reason, f"{rollout.rollout_id}: {rollout.error}")
            return
    result.comparisons.append(Comparison(target, with_hint, without))


def _mean(rollouts: Sequence[Rollout]) -> float:
    return math.fsum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts)
