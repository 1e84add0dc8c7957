"""From a finished group to its targets: routing, faults, hints, limits, weights."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from forge_composer.config.hints import HintsConfig, HintSourceName
from forge_composer.hints.filters import clip
from forge_composer.hints.records import Target
from forge_composer.hints.sources import HintRequest, HintSource
from forge_composer.hints.targets import Fault, action_key, faults
from forge_composer.types import Rollout, RolloutGroup


@dataclass(slots=True)
class HintResult:
    """The targets of a group in order of rollout and turn, and counts by name.

    - targets: `kind/KIND` and `source/SOURCE`
    - turns that went wrong and are no target: `no_hint` (no source had anything to say), `duplicate` (the
      same hint for the same action of the same rollout), `over_limit` (`max_targets_per_rollout`)
    - rollouts that are not distilled: `skipped/success` (routing), `skipped/no_reward` (never graded),
      `skipped/no_weight` (a group of weight 0)
    - hints that a judge owed: `judge_failed/REASON`
    """

    targets: list[Target] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: HintResult) -> None:
        """Append another result."""
        self.targets += other.targets
        self.counts.update(other.counts)


@dataclass(slots=True, frozen=True)
class _Job:
    """A rollout that is to be distilled."""

    rollout: Rollout
    succeeded: bool
    successes: list[Rollout]
    weight: float


class HintPipeline:
    """Finds targets and has hints written for them. The same group and seed give the same result, as far as
    the sources are deterministic: random choices depend on the seed, the rollout's id and the turn alone."""

    def __init__(self, config: HintsConfig, sources: Mapping[HintSourceName, HintSource], seed: int) -> None:
        """Take the sources in the order in which they are asked (`make_sources`)."""
        self.config, self.sources, self.seed = config, sources, seed

    async def targets_for(self, group: RolloutGroup) -> HintResult:
        """The targeted turns of a group with their hints. Rollouts are handled side by side, the turns of one
        in order."""
        result = HintResult()
        jobs = self._jobs(group, result)
        for found in await asyncio.gather(*(self._of_rollout(job) for job in jobs)):
            result.add(found)
        return result

    def _jobs(self, group: RolloutGroup, result: HintResult) -> list[_Job]:
        """Routing and weights: the rollouts to distil. The others are counted in `result`."""
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        successes = [rollout for rollout in scored if self._succeeded(rollout)]
        weight = 1.0
        if self.config.weight_by_success and scored:
            rate = len(successes) / len(scored)
            weight = math.sqrt(rate * (1.0 - rate))
        jobs = []
        for rollout in group.rollouts:
            succeeded = self._succeeded(rollout)
            if rollout.reward is None:
                result.counts["skipped/no_reward"] += 1
            elif succeeded and self.config.routing == "failed":
                result.counts["skipped/success"] += 1
            elif weight == 0.0:
                result.counts["skipped/no_weight"] += 1
            else:
                jobs.append(_Job(rollout, succeeded, successes, weight))
        return jobs

    async def _of_rollout(self, job: _Job) -> HintResult:
        """The targets of one rollout."""
        result = HintResult()
        most = 1 if self.config.scope == "rollout" else self.config.max_targets_per_rollout
        said: set[tuple[str, str]] = set()
        for number, found in self._faulty_turns(job):
            if len(result.targets) == most:
                result.counts["over_limit"] += 1
                continue
            target = await self._target(job, number, found, result.counts)
            if target is None:
                result.counts["no_hint"] += 1
                continue
            what = (target.hint, action_key(job.rollout.turns[number].action))
            if what in said:
                result.counts["duplicate"] += 1
                continue
            said.add(what)
            result.targets.append(target)
            result.counts[f"kind/{target.kind}"] += 1
            result.counts[f"source/{target.source}"] += 1
        return result

    def _faulty_turns(self, job: _Job) -> Iterator[tuple[int, list[Fault]]]:
        found = faults(job.rollout, succeeded=job.succeeded, style_rules=self.config.style_rules)
        wanted = [fault for fault in found if fault.kind not in self.config.ignore]
        for number, of_turn in itertools.groupby(wanted, key=lambda fault: fault.turn):
            yield number, list(of_turn)

    async def _target(
        self, job: _Job, number: int, found: list[Fault], counts: Counter[str]
    ) -> Target | None:
        """The target for the first fault of a turn that somebody has a hint for."""
        rollout, limit = job.rollout, self.config.max_hint_chars
        rng = random.Random(f"hints/{self.seed}/{rollout.rollout_id}/{number}")
        asked_judge = False
        for fault in found:
            request = HintRequest(fault, rollout, job.successes, rng, limit, counts)
            for name, source in self.sources.items():
                if name == "judge":  # once a turn: it answers slowly, and what it reads is the same
                    if asked_judge:
                        continue
                    asked_judge = True
                hint = clip(await source.write(request) or "", limit)
                if hint:
                    return Target(rollout.rollout_id, number, fault.kind, hint, name, job.weight)
        return None

    def _succeeded(self, rollout: Rollout) -> bool:
        return rollout.reward is not None and rollout.reward >= self.config.success_threshold
