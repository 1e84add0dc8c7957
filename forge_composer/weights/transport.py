"""The interface of weight transport, and which implementation a run uses.

The trainer's first rank owns a `WeightSender`, each generator replica a `WeightReceiver`. What passes between
them is a `WeightManifest`, in a message of the actor system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge_composer.weights.manifest import Transport, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor


class UpdatableEngine(Protocol):
    """What a receiver needs of the generation engine."""

    async def load_weights(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Put new weights in place; returns seconds."""
        ...

    async def transfer_weights(
        self, version: int, init: dict[str, Any] | None, updates: list[dict[str, Any]]
    ) -> float:
        """The same through vLLM's weight-transfer API."""
        ...


class WeightSender(ABC):
    """The trainer's end. One owner; `close()` leaves nothing behind."""

    @abstractmethod
    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """Make tensors (Hugging Face names, whole and not sharded) available as a policy version.

        The tensors may change as soon as this returns.

        Raises:
            ValueError: no tensors, a name twice, or a version that is not newer than the last.
        """

    @abstractmethod
    def close(self) -> None:
        """Take back everything that is published. May be called more than once."""


class WeightReceiver(ABC):
    """A generator's end."""

    @abstractmethod
    async def load_into(self, engine: UpdatableEngine, manifest: WeightManifest) -> float:
        """Bring the published version into the engine; returns the seconds that the engine stood still.

        Raises:
            WeightTransportError: the weights are gone, torn, or not those of the manifest. The engine keeps
                the weights that it has.
        """


class TensorReceiver(WeightReceiver):
    """A receiver that hands out tensors, for the engine or for anything else."""

    @abstractmethod
    def open(self, manifest: WeightManifest) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """The version's CPU tensors, valid within the context only; verified before the first is handed out.

        Raises:
            WeightTransportError: as `load_into`.
        """

    async def load_into(self, engine: UpdatableEngine, manifest: WeightManifest) -> float:
        """Open and load."""
        with self.open(manifest) as tensors:
            return await engine.load_weights(manifest.version, tensors)


def make_sender(
    kind: Transport,
    *,
    fallback_dir: Path,
    device: str = "cpu",
    colocate: bool = False,
    workers: int = 1,
    host: str = "127.0.0.1",
) -> WeightSender:
    """The trainer's end of the configured transport (`weights.transport`).

    `fallback_dir` is where files go if shared memory will not do. The rest is for `vllm`: `colocate` chooses
    CUDA IPC (trainer and replica on one GPU) instead of NCCL, for which `workers` counts the processes of all
    replicas (replicas x tp) and `host` is this machine as they reach it.

    Raises:
        ValueError: the transport does not work on this device.
    """
    match kind:
        case "shared_memory":
            from forge_composer.weights.shared_memory import SharedMemorySender

            return SharedMemorySender(fallback=fallback_dir)
        case "message":
            from forge_composer.weights.message import MessageSender

            return MessageSender()
        case "vllm":
            from forge_composer.weights.vllm_transfer import VllmSender

            return VllmSender(
                device=device, backend="ipc" if colocate else "nccl", workers=workers, host=host
            )


def make_receiver(kind: Transport, *, device: str = "cpu", first_worker: int = 0) -> WeightReceiver:
    """A generator's end of the configured transport.

    `first_worker` is the number of vLLM processes in the replicas before this one (`vllm` over NCCL).

    Raises:
        ValueError: the transport does not work on this device.
    """
    match kind:
        case "shared_memory":
            from forge_composer.weights.shared_memory import SharedMemoryReceiver

            return SharedMemoryReceiver()
        case "message":
            from forge_composer.weights.message import MessageReceiver

            return MessageReceiver()
        case "vllm":
            from forge_composer.weights.vllm_transfer import VllmReceiver

            return VllmReceiver(device=device, first_worker=first_worker)
