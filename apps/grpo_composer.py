"""Train a policy: `python -m apps.grpo_composer --config configs/cpu.toml`.

Exit status: 0 trained; 1 the run failed (the reason is printed); 2 the config is wrong; 130 interrupted.
With `--plan` nothing is started: the meshes, processes and problems are printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from apps._cli import load_or_exit, parse_args
from forge_composer.config import Config

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    line = parse_args(argv, prog="python -m apps.grpo_composer", description="Train a policy.")
    config = load_or_exit(line)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.runtime.threads))
    return asyncio.run(_run(config))


async def _run(config: Config) -> int:
    """The run, with Ctrl-C and SIGTERM turned into an orderly end; a second one ends at once."""
    from forge_composer.actors.run import Run

    loop = asyncio.get_running_loop()
    run = Run(config)
    task = asyncio.create_task(run.train())

    def interrupt() -> None:
        if task.cancelling():
            os._exit(EXIT_INTERRUPTED)  # children end with this process
        run.recorder.warn("interrupted: stopping the processes; a second Ctrl-C ends at once")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        status = EXIT_INTERRUPTED
    except Exception:  # its reason is in the summary and on the terminal already
        status = EXIT_FAILED
    else:
        status = 0
    with contextlib.suppress(Exception):
        await run.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
