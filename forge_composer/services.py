"""What the loop asks of the parts that live in other processes.

The domain is written against these protocols; `forge_composer.actors` implements them with Monarch
meshes. Anything that satisfies a protocol can stand in a notebook: an engine in the same process,
a server behind HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from forge_composer.batching.packing import GlobalBatch
    from forge_composer.batching.preference_rows import TokenPair
    from forge_composer.buffers.rollout_buffer import BatchTicket
    from forge_composer.preferences.records import PreferencePair
    from forge_composer.preferences.replay import ReplayedStep
    from forge_composer.preferences.steps import StepState
    from forge_composer.types import (
        Completion,
        EpisodeStart,
        EpisodeStep,
        ParsedAction,
        RolloutGroup,
        SamplingRequest,
        ScoreRequest,
    )
    from forge_composer.weights.manifest import WeightManifest


class Sampler(Protocol):
    """Anything that completes a prompt."""

    async def generate(self, request: SamplingRequest) -> Completion:
        """Sample one completion."""
        ...


class Generators(Sampler, Protocol):
    """The vLLM replicas, seen as one service."""

    async def generate_batch(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample several completions, admitted together and in order: the same batch gives the same ids."""
        ...

    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[list[float]]]:
        """Log-probabilities of tokens 1..n-1 of each sequence, from every replica: [replica][sequence]."""
        ...

    async def update(self, manifest: WeightManifest) -> float:
        """Load a published policy version into every replica, in place; returns the seconds it took."""
        ...


class Environments(Protocol):
    """The OpenEnv environment workers, seen as one service. An episode is known by its rollout's id."""

    async def start(self, rollout_id: str, *, index: int, split: str, seed: int) -> EpisodeStart:
        """Reset a session to the given task."""
        ...

    async def step(self, rollout_id: str, action: ParsedAction, *, finish: bool) -> EpisodeStep:
        """Carry out one assistant turn; `finish` grades the episode after it."""
        ...

    async def end(self, rollout_id: str) -> None:
        """Give the session back, also after an error."""
        ...


class Trainer(Protocol):
    """The policy trainer mesh, seen as one trainer."""

    async def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """One optimizer step on one global batch; returns its metrics."""
        ...

    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Log-probabilities of tokens 1..n-1 of each sequence under the current weights."""
        ...

    async def publish(self, version: int) -> WeightManifest:
        """Make the current weights available to the generators as `version`."""
        ...

    async def save_checkpoint(self, step: int) -> None:
        """Write a distributed checkpoint."""
        ...

    async def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        ...


class GroupBuffer(Protocol):
    """The rollout-group buffer (`forge_composer.buffers.rollout_buffer`), near or far."""

    async def admit(self, most: int) -> list[int]:
        """Wait for free slots; returns 1 to `most` new group ids, or none once the buffer is closed."""
        ...

    async def put(self, group: RolloutGroup) -> None:
        """Hand in a finished group."""
        ...

    async def take_batch(self, version: int) -> BatchTicket:
        """Wait for the next global batch for the trainer at `version`."""
        ...

    async def release(self, group_ids: Sequence[int]) -> None:
        """Free the slots of trained groups, after the generators have the weights they led to."""
        ...

    async def close(self) -> None:
        """Wake every waiter; nothing is admitted any more."""
        ...


class TeacherReplay(Protocol):
    """The teachers, asked about recorded steps."""

    async def replay(self, state: StepState) -> ReplayedStep:
        """Ask every teacher about one step. What a teacher does is a kind of reply, never an error."""
        ...

    async def totals(self) -> dict[str, float]:
        """Replies and money so far: `replies`, `cached`, `not_sent`, `errors`, `cost_usd`."""
        ...


class PairStore(Protocol):
    """The buffer of preference pairs (`forge_composer.buffers.pair_buffer`), near or far."""

    async def put(self, pairs: Sequence[PreferencePair]) -> None:
        """Take pairs in; the oldest go where there is no room."""
        ...

    async def unscored(self, most: int) -> list[PreferencePair]:
        """Pairs without a reference; each is handed out once."""
        ...

    async def set_references(self, references: Mapping[str, tuple[float, float]]) -> None:
        """Summed log-probabilities (nats) of the chosen and the rejected side, by pair id."""
        ...

    async def sample(self, version: int, most: int) -> list[TokenPair]:
        """Fresh pairs with a reference, for the optimizer step of a policy version."""
        ...

    async def stats(self) -> dict[str, float]:
        """Counts, by name."""
        ...

    async def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        ...

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        ...
