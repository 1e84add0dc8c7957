"""Make the tiny policy: `python -m apps.warmup --output assets/tiny_policy`.

Trains a tokenizer and a Qwen3 of about one million parameters on synthetic micro-task traces; a second
process makes the batches. About fifteen minutes on two cores. The defaults and the seed give the committed
weights again, up to the floating-point order of the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apps.warmup", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must be new or empty")
    parser.add_argument("--seed", type=int, default=0, help="fixes data order and initialisation")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps to train, for a try")
    options = parser.parse_args(argv)
    if options.output.exists() and any(options.output.iterdir()):
        parser.error(f"--output {options.output}: the folder is not empty; name another one")
    if options.threads < 1 or options.scale <= 0:
        parser.error("--threads and --scale must be positive")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    import torch
    from rich.progress import Progress

    from forge_composer.warmup.training import WarmupConfig, train

    torch.set_num_threads(options.threads)
    config = WarmupConfig(seed=options.seed)
    phases = tuple((max(1, round(steps * options.scale)), skill) for steps, skill in config.phases)
    config = dataclasses.replace(config, phases=phases)
    with Progress() as progress:
        task = progress.add_task("warming up", total=config.steps)

        def report(step: int, loss: float, seconds: float) -> None:
            progress.update(task, completed=step + 1, description=f"loss {loss:.3f}, {seconds:.0f} s")

        train(config, options.output, report)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"{options.output}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
