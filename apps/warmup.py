"""Make the tiny policy: `python -m apps.warmup --output assets/tiny_policy`.

Trains a tokenizer and a Qwen3 of about one million parameters on synthetic micro-task traces; a second
process makes the batches. About fifteen minutes on two cores. The defaults and the seed give the committed
weights again, up to the floating-point order of the machine.

Two more recipes go on from a policy (`--start`), for experiments with hints, about ten minutes each:
`obedient`, from the tiny policy, follows demonstrations; `novice`, from that one, still does, and without one
it is hardly ever right.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

RECIPES = ("default", "obedient", "novice")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apps.warmup", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must be new or empty")
    parser.add_argument("--seed", type=int, default=0, help="fixes data order and initialisation")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="policy to go on from")
    parser.add_argument("--recipe", choices=RECIPES, default="default", help="what is practised")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps to train, for a try")
    options = parser.parse_args(argv)
    if options.output.exists() and any(options.output.iterdir()):
        parser.error(f"--output {options.output}: the folder is not empty; name another one")
    if options.start is not None and not (options.start / "config.json").is_file():
        parser.error(f"--start {options.start}: there is no policy; name a folder with a config.json")
    if options.threads < 1 or options.scale <= 0:
        parser.error("--threads and --scale must be positive")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    import torch
    from rich.progress import Progress

    from forge_composer.warmup.training import WarmupConfig, train

    torch.set_num_threads(options.threads)
    match options.recipe:
        case "obedient":
            config = WarmupConfig.obedient(options.seed)
        case "novice":
            config = WarmupConfig.novice(options.seed)
        case _:
            config = WarmupConfig(seed=options.seed)
    phases = tuple((max(1, round(steps * options.scale)), skill) for steps, skill in config.phases)
    config = dataclasses.replace(config, phases=phases)
    with Progress() as progress:
        task = progress.add_task("warming up", total=config.steps)

        def report(step: int, loss: float, seconds: float) -> None:
            progress.update(task, completed=step + 1, description=f"loss {loss:.3f}, {seconds:.0f} s")

        train(config, options.output, report, start=options.start)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"{options.output}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
