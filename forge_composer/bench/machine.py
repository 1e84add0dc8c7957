"""What a measurement ran on: the device, the versions, the load beside it, and how fast it copies memory."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_COPY_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}
"""Size of the copied buffer: several times the last cache."""


def describe_machine(device: torch.device) -> dict[str, object]:
    """Name of the device, cores, threads, versions, date, load, settings of the C library's allocator."""
    return {
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "liger_kernel": version("liger_kernel"),
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
    }


def device_name(device: torch.device) -> str:
    """As the driver gives it, or the processor's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def version(distribution: str) -> str | None:
    """Of an installed distribution; None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class Stopwatch:
    """Milliseconds that a piece of work takes on one device.

    On CUDA the time is taken between two events on the stream. A large buffer is written first: that empties
    the second-level cache, and keeps the device busy while the host queues the work, so that the host's time
    counts only where it is longer than that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush: Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(_COPY_BYTES["cuda"], dtype=torch.uint8, device=device)

    def __call__(self, work: Callable[[], object]) -> float:
        """Run `work` once; what it returns is released after the time is taken."""
        if self._flush is None:
            start = time.perf_counter()
            result = work()
            elapsed = 1e3 * (time.perf_counter() - start)
            del result
            return elapsed
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        self._flush.zero_()
        begin.record()
        result = work()
        end.record()
        end.synchronize()
        del result
        return float(begin.elapsed_time(end))


class CopyBandwidth:
    """Bytes a second, read and written together, of the fastest plain copy seen so far."""

    def __init__(self, device: torch.device, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)
        self._best_ms = float("inf")

    def sample(self) -> None:
        """Copy once."""
        elapsed = self._stopwatch(lambda: self._target.copy_(self._source))
        self._best_ms = min(self._best_ms, elapsed)

    @property
    def bytes_per_s(self) -> float:
        """Of the fastest copy; 0 before the first."""
        return 2 * self._source.numel() / (self._best_ms / 1e3)
