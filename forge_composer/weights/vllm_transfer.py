"""Weights over vLLM's own weight-transfer API: CUDA IPC on shared GPUs, NCCL between GPUs.

That API lets the trainer drive the engine through a client. Here the client only writes down what it is
told; this goes into the manifest, and the replica plays it to its engine. The tensors never leave the GPUs.

With NCCL the transfer itself happens when the replicas load: `publish` returns with the broadcast waiting in
a thread, and the next `publish` waits for it to end. All replicas must load every version.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from forge_composer.weights.manifest import TensorInfo, WeightManifest, WeightTransportError
from forge_composer.weights.message import newer
from forge_composer.weights.transport import UpdatableEngine, WeightReceiver, WeightSender


def _require_cuda(device: str) -> None:
    if device != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            'weights.transport = "vllm" moves weights between CUDA devices, and there is none in use '
            f'(device {device!r}); use "shared_memory" (one host) or "message"'
        )


class _Recorder:
    """A weight-sync client in the shape that vLLM asks for, which keeps what it is told."""

    def __init__(self) -> None:
        self.init: dict[str, Any] | None = None
        self.updates: list[dict[str, Any]] = []
        self.told_init = threading.Event()
        self.told_update = threading.Event()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init = init_info
        self.told_init.set()

    def start_weight_update(self) -> None:
        self.updates = []

    def update_weights(self, update_info: Any) -> None:
        self.updates.append(update_info)
        self.told_update.set()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


class VllmSender(WeightSender):
    """The trainer's end; holds a copy of the last version on the GPU, which the transfer reads."""

    def __init__(self, *, device: str, backend: Literal["ipc", "nccl"], workers: int, host: str) -> None:
        """`workers` counts the vLLM processes that receive; `host` is this machine as they reach it.

        Raises:
            ValueError: this is not a CUDA run.
        """
        _require_cuda(device)
        self._backend = backend
        self._workers = workers
        self._host = host
        self._recorder = _Recorder()
        self._weights: list[tuple[str, Tensor]] = []
        self._engine: Any = None
        self._version: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
        self._sending: Future[None] | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """See `WeightSender.publish`."""
        self._version = newer(version, self._version)
        if self._sending is not None:
            self._sending.result()
        self._weights = [(name, tensor.detach().cuda().clone()) for name, tensor in named_tensors]
        if not self._weights:
            raise ValueError("weights: there is nothing to publish")
        torch.cuda.synchronize()
        tensors = tuple(TensorInfo.of(name, tensor) for name, tensor in self._weights)
        self._sending = self._thread.submit(self._send)
        if self._backend == "ipc":
            self._sending.result()
            updates = self._recorder.updates
        else:
            while not self._recorder.told_init.wait(0.1):
                if self._sending.done():
                    self._sending.result()
            names, shapes = [t.name for t in tensors], [list(t.shape) for t in tensors]
            updates = [{"names": names, "shapes": shapes, "dtype_names": [t.dtype for t in tensors]}]
        return WeightManifest(
            version=version,
            transport="vllm",
            tensors=tensors,
            nbytes=sum(tensor.numel() * tensor.element_size() for _, tensor in self._weights),
            transfer={"backend": self._backend, "init": self._recorder.init, "updates": updates},
        )

    def _send(self) -> None:
        """In the transfer thread: drive vLLM's trainer engine, which is made at the first version."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self._engine is None:
            self._engine = WeightTransferTrainerFactory.trainer_init(
                self._init_info(), client=self._recorder, source=_source(self._weights_now)
            )
        self._engine.send_weights()

    def _weights_now(self) -> list[tuple[str, Tensor]]:
        return self._weights

    def _init_info(self) -> Any:
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return NCCLTrainerInitInfo(
            master_address=self._host, master_port=port, world_size=1 + self._workers, rank=0
        )

    def close(self) -> None:
        """Drop the copy on the GPU; a broadcast that nobody receives is abandoned."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._weights = []


def _source(weights: Any) -> Any:
    """vLLM's `WeightSource` over a function that returns the named tensors."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(weights())

    return Source()


class VllmReceiver(WeightReceiver):
    """A replica's end. Its engine must be made with `weight_transfer` set to the same backend."""

    def __init__(self, *, device: str, first_worker: int = 0) -> None:
        """`first_worker` is the number of vLLM processes in the replicas before this one.

        Raises:
            ValueError: this is not a CUDA run.
        """
        _require_cuda(device)
        self._first_worker = first_worker
        self._connected = False

    async def load_into(self, engine: UpdatableEngine, manifest: WeightManifest) -> float:
        """See `WeightReceiver.load_into`."""
        if manifest.transfer is None:
            raise WeightTransportError(
                f"weights of version {manifest.version}: the manifest ({manifest.transport}) is not for "
                "vLLM's weight transfer; trainer and generators must use the same weights.transport"
            )
        init = None if self._connected else dict(manifest.transfer["init"])
        if init is not None and "rank_offset" in init:
            init["rank_offset"] += self._first_worker
        seconds = await engine.transfer_weights(manifest.version, init, manifest.transfer["updates"])
        self._connected = True
        return seconds
