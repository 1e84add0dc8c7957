"""Runs a function of this folder on several gloo ranks and brings back what each returned."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_ranks(target: str, world: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Call `module:function(*args)` in `world` processes with the rank variables set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "args").write_bytes(pickle.dumps((target, args)))
        processes = []
        for rank in range(world):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)]),
            }
            command = [sys.executable, __file__, folder, str(rank)]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        try:
            errors = [process.communicate(timeout=timeout)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, error) in enumerate(zip(processes, errors, strict=True)):
            assert process.returncode == 0, f"rank {rank}:\n{error[-4000:]}"
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), sys.argv[2]
    target, args = pickle.loads((folder / "args").read_bytes())
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(*args)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
