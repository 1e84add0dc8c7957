"""The policy trainer mesh: one `TrainerActor` a rank around `PolicyTrainer`, and its client.

Every endpoint is a collective: it is called on all ranks at once, never on a slice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, endpoint

from forge_composer.actors.calls import call_all
from forge_composer.config import Config
from forge_composer.types import ScoreRequest
from forge_composer.weights.manifest import WeightManifest

if TYPE_CHECKING:
    from forge_composer.batching.packing import GlobalBatch
    from forge_composer.training.policy_trainer import PolicyTrainer
    from forge_composer.weights.transport import WeightSender


class TrainerActor(Actor):
    """One rank. Endpoints are synchronous: a collective blocks its own thread, not an event loop."""

    def __init__(self) -> None:
        self.trainer: PolicyTrainer | None = None
        self.sender: WeightSender | None = None
        self.dtype: Any = None

    @property
    def _ready(self) -> PolicyTrainer:
        if self.trainer is None:
            raise RuntimeError("TrainerActor.setup has not run")
        return self.trainer

    @endpoint
    def setup(self, config: Config, device: str) -> dict[str, float]:
        """Build the trainer: process group, sharded model, optimizer; rank 0 gets the weight sender."""
        import torch

        if device == "cpu":
            torch.set_num_threads(config.runtime.threads)
        from forge_composer.training.policy_trainer import PolicyTrainer
        from forge_composer.weights.transport import make_sender

        self.trainer = PolicyTrainer(
            config.trainer,
            config.model,
            config.loss,
            temperature=config.generator.sampling.temperature,
            max_completion_tokens=config.rollout.max_completion_tokens,
            total_steps=config.loop.steps,
            seed=config.seed,
            output_dir=config.output_dir,
            device=device,
            dpo_reference=config.replay.buffer.reference,
        )
        name = config.generator.dtype
        if name == "auto":
            name = "float32" if device == "cpu" else "bfloat16"
        self.dtype = getattr(torch, name)
        if int(os.environ["RANK"]) == 0:
            self.sender = make_sender(
                config.weights.transport,
                fallback_dir=config.output_dir / "weights",
                device=device,
                colocate=config.runtime.colocate,
                workers=config.generator.replicas * config.generator.tp,
                host=os.environ["MASTER_ADDR"],
            )
        return {"parameters": float(self.trainer.num_parameters)}

    @endpoint
    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """One optimizer step; metrics are the same on every rank."""
        return self._ready.train_step(batch)

    @endpoint
    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Log-probabilities of tokens 1..n-1 of each sequence."""
        return self._ready.score(list(requests))

    @endpoint
    def publish(self, version: int) -> WeightManifest | None:
        """Gather the weights and hand them to the transport; the manifest comes from rank 0."""
        state = self._ready.hf_state_dict(self.dtype)
        if self.sender is None or state is None:
            return None
        return self.sender.publish(version, state.items())

    @endpoint
    def save_checkpoint(self, step: int) -> None:
        """Write a distributed checkpoint."""
        self._ready.save_checkpoint(step)

    @endpoint
    def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self._ready.export_hf(folder)

    @endpoint
    def close(self) -> None:
        """Leave the process group; remove published weights."""
        if self.sender is not None:
            self.sender.close()
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = self.sender = None


class TrainerClient:
    """The trainer mesh as one `Trainer` (`forge_composer.services`)."""

    def __init__(self, mesh: Any, config: Config) -> None:
        self.config = config
        self.actors = mesh.spawn("trainer", TrainerActor)
        self.mesh = mesh

    async def setup(self, device: str) -> dict[str, float]:
        """Set the rank variables and build the trainer on all ranks."""
        from monarch.spmd import setup_torch_elastic_env_async

        await setup_torch_elastic_env_async(self.mesh)
        values = await self._call("setup", self.config, device, timeout=self.config.runtime.start_timeout_s)
        ready: dict[str, float] = values[0]
        return ready

    async def _call(self, name: str, *args: Any, timeout: float | None = None) -> list[Any]:
        limit = timeout or self.config.trainer.timeout_s
        return await call_all(self.actors, name, *args, timeout=limit)

    async def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """One optimizer step on one global batch."""
        metrics: dict[str, float] = (await self._call("train_step", batch))[0]
        return metrics

    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Log-probabilities of tokens 1..n-1 of each sequence."""
        scores: list[list[float]] = (await self._call("score", list(requests)))[0]
        return scores

    async def publish(self, version: int) -> WeightManifest:
        """Publish the current weights as `version`."""
        manifests = [value for value in await self._call("publish", version) if value is not None]
        manifest: WeightManifest = manifests[0]
        return manifest

    async def save_checkpoint(self, step: int) -> None:
        """Write a distributed checkpoint."""
        await self._call("save_checkpoint", step)

    async def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._call("export_hf", folder)

    async def close(self) -> None:
        """End the process group and remove published weights."""
        await self._call("close", timeout=self.config.runtime.stop_timeout_s)
