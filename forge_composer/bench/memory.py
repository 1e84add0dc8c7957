"""Peak memory of a piece of work, exact to the byte.

On CUDA the caching allocator keeps the figure itself. On CPU the resident size of the process is no measure:
the C library keeps freed pages, and pages count only once they are touched. There the profiler writes down
every allocation and release of torch's CPU allocator, inside operators and compiled code too; the largest
running sum is the peak. Not counted are buffers that libraries take from the system themselves (a matrix
product's packing space) and what threads of an operator allocate for themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_MEMORY_EVENT = "[memory]"


def peak_extra_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `work()` held at one time beyond what was allocated before it.

    A gradient that it returns is part of the peak, an input is not. On CPU, releasing something that was
    allocated earlier is not credited, so the figure is never too small.

    Args:
        work: is called once, in this thread; call it before, if first-call caches are not to count.
        device: where the work allocates.
    """
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(work, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded: Any = profiler.profiler
    changes: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes())
        for event in recorded.kineto_results.events()
        if event.name() == _MEMORY_EVENT
    ]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((size for _, size in changes), initial=0))


def _cuda_peak(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
