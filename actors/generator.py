"""Generator replicas: one `GeneratorActor` around one vLLM engine, and the service over all of them.

A rollout stays with the replica that served its first turn, where its prefix is cached; a new one goes to
the replica with the fewest requests in flight.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from forge_composer.actors.calls import call_one, each
from forge_composer.config import Config
from forge_composer.types import Completion, SamplingRequest, ScoreRequest
from forge_composer.weights.manifest import WeightManifest

if TYPE_CHECKING:
    from forge_composer.generation.engine import GenerationEngine
    from forge_composer.weights.transport import WeightReceiver

STICKY_ROLLOUTS = 65536
"""Rollouts whose replica is remembered."""


class GeneratorActor(Actor):
    """One vLLM engine in its own process."""

    def __init__(self) -> None:
        self.engine: GenerationEngine | None = None
        self.receiver: WeightReceiver | None = None
        self.timeout_s: float | None = None

    @property
    def _ready(self) -> GenerationEngine:
        if self.engine is None:
            raise RuntimeError("GeneratorActor.setup has not run")
        return self.engine

    @concurrent_endpoint
    async def setup(self, config: Config, device: str, index: int, first_gpu: int) -> float:
        """Start the engine; returns the seconds it took.

        `index` counts the replicas over all hosts. On CUDA, the i-th replica of a host takes `tp` GPUs from
        `first_gpu + i tp` on.
        """
        began = time.perf_counter()
        self.timeout_s = config.generator.timeout_s
        if device == "cuda":
            local = index % (config.generator.replicas // config.runtime.generator_hosts)
            _show_gpus(first_gpu + local * config.generator.tp, config.generator.tp)
        from forge_composer.generation.engine import GenerationEngine
        from forge_composer.weights.transport import make_receiver

        backend = "ipc" if config.runtime.colocate else "nccl"
        self.engine = GenerationEngine(
            config.model,
            config.generator,
            device=device,
            seed=config.seed,
            weight_transfer=backend if config.weights.transport == "vllm" else None,
        )
        await self.engine.start()
        self.receiver = make_receiver(
            config.weights.transport, device=device, first_worker=index * config.generator.tp
        )
        return time.perf_counter() - began

    @concurrent_endpoint
    async def generate(self, request: SamplingRequest) -> Completion:
        """Sample one completion; past its deadline the request is taken out of the engine."""
        async with asyncio.timeout(self.timeout_s):
            return await self._ready.generate(request)

    @concurrent_endpoint
    async def generate_batch(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample several completions, admitted together in the given order."""
        async with asyncio.timeout(self.timeout_s):
            return await self._ready.generate_batch(list(requests))

    @concurrent_endpoint
    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Log-probabilities of tokens 1..n-1 of each sequence."""
        return await self._ready.score(list(requests))

    @concurrent_endpoint
    async def update(self, manifest: WeightManifest) -> float:
        """Load a published version in place, between engine steps; returns the seconds it took."""
        if self.receiver is None:
            raise RuntimeError("GeneratorActor.setup has not run")
        return await self.receiver.load_into(self._ready, manifest)

    @concurrent_endpoint
    async def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            await self.engine.close()
        self.engine = None


def _show_gpus(first: int, count: int) -> None:
    """Let this process see only its own GPUs, among those the run may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(first + count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + count])


class GeneratorService:
    """All replicas as one `Generators` (`forge_composer.services`)."""

    def __init__(self, mesh: Any, config: Config) -> None:
        self.config = config
        self.replicas: list[Any] = each(mesh.spawn("generator", GeneratorActor))
        self._in_flight = [0] * len(self.replicas)
        self._replica_of: OrderedDict[str, int] = OrderedDict()

    async def setup(self, device: str) -> list[float]:
        """Start every engine; returns the seconds that each took."""
        runtime, trainer = self.config.runtime, self.config.trainer
        shared = runtime.colocate or runtime.launcher in ("slurm", "kubernetes")
        first_gpu = 0 if shared else trainer.nproc
        seconds: list[float] = await asyncio.gather(
            *(
                call_one(replica, "setup", self.config, device, i, first_gpu,
                         timeout=runtime.start_timeout_s)
                for i, replica in enumerate(self.replicas)
            )
        )  # fmt: skip
        return seconds

    def _route(self, rollout_id: str) -> int:
        """The replica of a rollout."""
        replica = self._replica_of.get(rollout_id)
        if replica is None:
            replica = min(range(len(self.replicas)), key=lambda i: (self._in_flight[i], i))
            self._replica_of[rollout_id] = replica
            if len(self._replica_of) > STICKY_ROLLOUTS:
                self._replica_of.popitem(last=False)
        return replica

    async def _call(self, replica: int, name: str, *args: Any, weight: int = 1) -> Any:
        self._in_flight[replica] += weight
        try:
            return await call_one(
                self.replicas[replica], name, *args, timeout=self.config.generator.timeout_s
            )
        finally:
            self._in_flight[replica] -= weight

    async def generate(self, request: SamplingRequest) -> Completion:
        """Sample one completion."""
        replica = self._route(request.request_id.rpartition("/")[0])
        completion: Completion = await self._call(replica, "generate", request)
        return completion

    async def generate_batch(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample several completions; request i goes to replica i mod R, so that a batch repeats exactly."""
        count = len(self.replicas)
        shares = [list(requests[first::count]) for first in range(count)]
        answers = await asyncio.gather(
            *(
                self._call(i, "generate_batch", share, weight=len(share))
                for i, share in enumerate(shares)
                if share
            )
        )
        completions: list[Completion] = [None] * len(requests)  # type: ignore[list-item]
        for first, answer in enumerate(answers):
            completions[first::count] = answer
        return completions

    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[list[float]]]:
        """Log-probabilities of each sequence from every replica."""
        calls = [self._call(i, "score", list(requests)) for i in range(len(self.replicas))]
        return list(await asyncio.gather(*calls))

    async def update(self, manifest: WeightManifest) -> float:
        """Load a published version into every replica; returns the slowest one's seconds."""
        calls = [self._call(i, "update", manifest, weight=0) for i in range(len(self.replicas))]
        seconds: list[float] = await asyncio.gather(*calls)
        return max(seconds)

    async def close(self) -> None:
        """End the engines."""
        limit = self.config.runtime.stop_timeout_s
        await asyncio.gather(*(call_one(replica, "close", timeout=limit) for replica in self.replicas))
