"""The rollout-group buffer: bounds policy lag and memory, and gives back-pressure.

With P groups a step and a largest lag of S versions there are B = (S + 1) P slots. A group takes a slot
before its first token is sampled (`admit`) and frees it when the generators hold the weights that it
helped to make (`release`), or at once if it turns out to teach nothing. Batches are taken in order of
admission. When a group is admitted under version v, at most B - 1 groups are ahead of it, so it is
trained at version v + floor((B - 1) / P) = v + S at the latest: the bound holds by construction, and
`take_batch` checks it all the same (a stale group is refused and counted).

The bound of this kind with a sliding window in place of strict order is TitanRL's (torchtitan 0.3.0,
`experiments/rl`); strict order keeps the full B slots busy and needs no tuning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from forge_composer.types import RolloutGroup


@dataclass(slots=True)
class BatchTicket:
    """The groups of one global batch, and what was left out on the way to it.

    `groups` can be trained on. `slots` are the ids to `release` after the update: those of `groups` and of
    the zero-variance groups that count towards the batch. The other fields count groups that were
    dropped since the last batch.
    """

    groups: list[RolloutGroup]
    slots: list[int]
    zero_variance: list[RolloutGroup] = field(default_factory=list)
    unscorable: list[RolloutGroup] = field(default_factory=list)
    stale: list[RolloutGroup] = field(default_factory=list)
    depth: int = 0
    """Finished groups that stay in the buffer."""
    closed: bool = False

    @property
    def resolved(self) -> list[RolloutGroup]:
        """Every group that left the buffer with this ticket."""
        return [*self.groups, *self.zero_variance, *self.unscorable, *self.stale]


class NoProgressError(RuntimeError):
    """Nothing trainable comes out of the rollouts; the message says what came instead."""


class RolloutBuffer:
    """Strictly ordered buffer of rollout groups. Safe for many coroutines of one event loop."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_policy_lag: int,
        zero_variance: Literal["drop", "resample"] = "drop",
        max_untrainable_groups: int = 80,
        distilled: bool = False,
    ) -> None:
        """Take the sizes.

        Args:
            groups_per_step: P.
            max_policy_lag: S, versions.
            zero_variance: whether groups with equal rewards count towards a batch.
            max_untrainable_groups: as many in a row raise `NoProgressError`.
            distilled: groups with equal rewards teach something too, and are no sign of a standstill.
        """
        self.groups_per_step = groups_per_step
        self.max_policy_lag = max_policy_lag
        self.zero_variance = zero_variance
        self.max_untrainable_groups = max_untrainable_groups
        self.distilled = distilled
        self.capacity = (max_policy_lag + 1) * groups_per_step
        self._next_id = 0
        self._order: list[int] = []  # admitted and not yet taken, oldest first
        self._taken: set[int] = set()  # taken and not yet released
        self._finished: dict[int, RolloutGroup] = {}
        self._changed = asyncio.Condition()
        self._closed = False
        self._barren: dict[str, int] = {}  # why groups were untrainable since the last trainable one

    @property
    def free(self) -> int:
        """Slots that `admit` can give out now."""
        return self.capacity - len(self._order) - len(self._taken)

    async def admit(self, most: int) -> list[int]:
        """Wait for a free slot and return 1 to `most` new group ids; an empty list once closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self.free > 0)
            if self._closed:
                return []
            ids = list(range(self._next_id, self._next_id + min(most, self.free)))
            self._next_id += len(ids)
            self._order.extend(ids)
            return ids

    async def put(self, group: RolloutGroup) -> None:
        """Hand in a finished group.

        Raises:
            KeyError: the id was never admitted, or the group was handed in before: training on a group
                twice is a fault of the caller.
        """
        async with self._changed:
            if group.group_id not in self._order or group.group_id in self._finished:
                raise KeyError(f"group {group.group_id} is not awaited")
            self._finished[group.group_id] = group
            self._changed.notify_all()

    async def take_batch(self, version: int) -> BatchTicket:
        """Wait for the next batch of P groups, in order of admission.

        Args:
            version: the trainer's version; groups with a token older than `version - max_policy_lag`
                are refused.

        Returns:
            The batch. Under `zero_variance="drop"` it may hold fewer than P groups, even none.

        Raises:
            NoProgressError: as many groups in a row as configured could not be trained on.
        """
        ticket = BatchTicket(groups=[], slots=[])
        async with self._changed:
            while len(ticket.slots) < self.groups_per_step:
                await self._changed.wait_for(lambda: self._closed or self._head_ready())
                if not self._head_ready():
                    ticket.closed = True
                    break
                self._sort_head(ticket, version)
                self._changed.notify_all()
            ticket.depth = len(self._finished)
        return ticket

    def _head_ready(self) -> bool:
        return bool(self._order) and self._order[0] in self._finished

    def _sort_head(self, ticket: BatchTicket, version: int) -> None:
        """Move the oldest group into the ticket; only groups that count keep their slot."""
        group = self._finished.pop(self._order.pop(0))
        rewards = group.rewards
        if len(rewards) < 2:
            ticket.unscorable.append(group)
            self._count_barren("unscorable")
        elif group.version_min < version - self.max_policy_lag:
            ticket.stale.append(group)
            self._count_barren("stale")
        elif max(rewards) == min(rewards):
            ticket.zero_variance.append(group)
            if self.zero_variance == "drop":
                self._keep_slot(ticket, group)
            if not self.distilled:
                self._count_barren(f"all rewards equal to {rewards[0]:g}")
        else:
            ticket.groups.append(group)
            self._keep_slot(ticket, group)
            self._barren.clear()

    def _keep_slot(self, ticket: BatchTicket, group: RolloutGroup) -> None:
        """The group counts towards the batch: its slot stays taken until `release`."""
        ticket.slots.append(group.group_id)
        self._taken.add(group.group_id)

    def _count_barren(self, why: str) -> None:
        self._barren[why] = self._barren.get(why, 0) + 1
        total = sum(self._barren.values())
        if total >= self.max_untrainable_groups:
            reasons = ", ".join(f"{count} x {why}" for why, count in sorted(self._barren.items()))
            raise NoProgressError(
                f"the last {total} rollout groups gave nothing to train on ({reasons}). "
                "Rewards that are all equal: change environment.difficulty, rollout.group_size or "
                "generator.sampling.temperature. Unscorable groups: see the errors in the traces."
            )

    async def release(self, group_ids: Sequence[int]) -> None:
        """Free the slots of a batch, all at once."""
        async with self._changed:
            self._taken.difference_update(group_ids)
            self._changed.notify_all()

    async def close(self) -> None:
        """Wake every waiter; `admit` returns nothing and `take_batch` what is finished already."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
