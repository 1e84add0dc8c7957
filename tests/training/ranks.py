"""Runs a function on several ranks, each a process with its place in a gloo group in the environment."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["forge_composer.training.policy_trainer"])  # torch is imported once


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(worker: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """`worker(*args)` on every rank; what each returned (numpy arrays and plain values), by rank."""
    port = free_port()
    readers, processes = [], []
    for rank in range(world_size):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        environment = rank_environment(rank, world_size, port)
        process = _CONTEXT.Process(target=_run, args=(writer, environment, worker, args), daemon=True)
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        return _collect(readers, timeout_s)
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(readers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        pending = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = wait(pending, timeout_s)
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(len(readers))) - set(results))} did not answer")
        for reader in ready:
            error, result = reader.recv()  # type: ignore[union-attr]
            if error:
                raise AssertionError(f"a rank failed:\n{error}")
            results[readers.index(reader)] = result  # type: ignore[arg-type]
    return [results[rank] for rank in range(len(readers))]


def _run(writer: Connection, environment: dict[str, str], worker: Callable[..., Any], args: Any) -> None:
    os.environ.update(environment)
    try:
        import torch

        torch.set_num_threads(1)
        writer.send(("", worker(*args)))
    except BaseException:
        writer.send((traceback.format_exc(), None))
    writer.close()
