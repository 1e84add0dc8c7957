"""What this machine has, found without loading torch."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from typing import Literal

from forge_composer.config.schema import Config


def is_remote(config: Config) -> bool:
    """True if the meshes run on other machines than the controller."""
    return config.runtime.launcher in ("slurm", "kubernetes")


def resolve_device(config: Config) -> Literal["cpu", "cuda"]:
    """The device of trainer and generators; `auto` takes CUDA when this machine has it."""
    if config.runtime.device != "auto":
        return config.runtime.device
    return "cuda" if visible_gpus() else "cpu"


def visible_gpus() -> int:
    """CUDA devices that torch can use here: 0 with a CPU build of torch, else those that are visible."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        return 0
    count = _driver_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, _listed(visible))


def _listed(visible: str) -> int:
    """Devices in CUDA_VISIBLE_DEVICES: CUDA stops reading at the first negative number."""
    named = 0
    for item in visible.split(","):
        if not item.strip() or item.strip().startswith("-"):
            break
        named += 1
    return named


@functools.cache
def _driver_gpus() -> int:
    """GPUs that the driver lists. NVML makes no CUDA context, so processes may still be forked after it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint()
        return int(count.value) if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
