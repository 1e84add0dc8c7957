"""Groups of rollouts on one task, and the advantages of their members."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from forge_composer.config.schema import GRPOConfig, RolloutConfig
from forge_composer.rollout.advantages import group_advantages
from forge_composer.rollout.episode import EpisodeRunner, EpisodeSpec, derived_seed
from forge_composer.rollout.lockstep import LockstepGate
from forge_composer.services import Sampler
from forge_composer.types import Rollout, RolloutGroup, RolloutStatus


@dataclass(slots=True, frozen=True)
class GroupSpec:
    """Which group to run: `size` episodes of one task, with seeds derived from `seed` and the ids.

    `name` is the prefix of the rollouts' ids; it does not enter the seeds.
    """

    name: str
    group_id: int
    task_index: int
    split: str
    size: int
    seed: int
    temperature: float
    start_version: int

    def episodes(self) -> list[EpisodeSpec]:
        """The group's episodes, in order of their index."""
        return [
            EpisodeSpec(
                rollout_id=f"{self.name}-{self.group_id:06d}-{index:03d}",
                group_id=self.group_id,
                index=index,
                task_index=self.task_index,
                split=self.split,
                seed=derived_seed(self.seed, self.split, self.group_id, index),
                temperature=self.temperature,
            )
            for index in range(self.size)
        ]


async def run_group(
    spec: GroupSpec,
    runner: EpisodeRunner,
    sampler: Sampler,
    *,
    retries: int,
    record: Callable[[Rollout], None],
) -> RolloutGroup:
    """Run a group's episodes side by side; void ones are run again, up to `retries` times each.

    Every attempt goes to `record` as it ends. If the sampler is a `LockstepGate`, the caller has announced
    `spec.size` participants to it; each leaves as it ends.
    """
    gate = sampler if isinstance(sampler, LockstepGate) else None

    async def one(episode: EpisodeSpec) -> Rollout:
        attempt = 0
        while True:
            rollout = await runner.run(episode, sampler)
            record(rollout)
            if rollout.status is not RolloutStatus.FAILED or attempt == retries:
                return rollout
            attempt += 1
            episode = dataclasses.replace(episode, rollout_id=f"{episode.rollout_id}.{attempt}")

    async def one_and_leave(episode: EpisodeSpec) -> Rollout:
        with gate.leaving() if gate is not None else nullcontext():
            return await one(episode)

    async with asyncio.TaskGroup() as tasks:
        futures = [tasks.create_task(one_and_leave(episode)) for episode in spec.episodes()]
    rollouts = [future.result() for future in futures]
    task_id = next((rollout.task_id for rollout in rollouts if rollout.task_id), "")
    return RolloutGroup(spec.group_id, task_id, spec.start_version, rollouts)


def shaped_reward(rollout: Rollout, config: RolloutConfig) -> float | None:
    """The reward that advantages are made from; None if the rollout could not be scored."""
    if rollout.reward is None or not rollout.truncated or config.truncated != "penalise":
        return rollout.reward
    return rollout.reward - config.truncation_penalty


def advantages_of(group: RolloutGroup, rollout: RolloutConfig, grpo: GRPOConfig) -> list[float | None]:
    """Advantage of each rollout of the group; None where the rollout is not to be trained on.

    Unscorable rollouts are outside the baseline. Under `truncated = "mask"` a truncated rollout takes part
    in the baseline and is not trained on.
    """
    rewards = [shaped_reward(member, rollout) for member in group.rollouts]
    advantages = group_advantages(rewards, std=grpo.advantage_std, leave_one_out=grpo.leave_one_out)
    if rollout.truncated == "mask":
        return [
            None if member.truncated else advantage
            for member, advantage in zip(group.rollouts, advantages, strict=True)
        ]
    return advantages
