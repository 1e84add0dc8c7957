"""Serve the scripted teachers: `python -m apps.serve_teachers --port 8765`.

An OpenAI-compatible chat-completions server on this machine with three scripted solvers of the micro tasks,
for demos and tests without a key and without cost. They are scripted: they look the task up in the grammar.
Prints its base URL when it listens, and serves until Ctrl-C or SIGTERM.

Faults on purpose: `--faults FILE.toml` with `[default]` and `[models."NAME"]`, for example

    [default]
    rate_limit = 0.1
    retry_after_s = 0.2
    [models."scripted/weak"]
    hang = 0.05

Exit status: 0 stopped; 2 an option, a file or the port is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from apps._cli import EXIT_CONFIG
from forge_composer.teachers.local.server import TeacherServer
from forge_composer.teachers.local.settings import (
    ServerFileError,
    TeacherServerConfig,
    load_faults,
    load_server,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        server = TeacherServer(
            _config(options), host=options.host, port=options.port, api_key=_api_key(options.api_key_variable)
        )
        asyncio.run(_serve(server, until_stdin_closes=options.until_stdin_closes))
    except (ServerFileError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.serve_teachers",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML of the server: seed, [[teachers]], ..."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    parser.add_argument("--port", type=int, default=8765, help="port; 0 takes a free one; default 8765")
    parser.add_argument("--seed", type=int, metavar="N", help="fixes answers, latencies and faults")
    parser.add_argument("--latency-scale", type=float, metavar="X", help="factor on latencies; default 0.01")
    parser.add_argument("--faults", type=Path, metavar="FILE", help="TOML of fault rates")
    parser.add_argument("--no-cost", action="store_true", help="leave `usage.cost` out of the answers")
    parser.add_argument(
        "--api-key-variable", metavar="NAME", help="environment variable with the key that clients must send"
    )
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="also end when standard input is closed, as by a parent",
    )
    return parser


def _config(options: argparse.Namespace) -> TeacherServerConfig:
    config = TeacherServerConfig() if options.config is None else load_server(options.config)
    changes = dict(config)
    if options.seed is not None:
        changes["seed"] = options.seed
    if options.latency_scale is not None:
        changes["latency_scale"] = options.latency_scale
    if options.no_cost:
        changes["report_cost"] = False
    if options.faults is not None:
        changes["faults"] = load_faults(options.faults)
    return TeacherServerConfig.model_validate(changes)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(
            f"--api-key-variable {variable}: the environment variable is empty; set it, or leave it out"
        )
    return key


async def _serve(server: TeacherServer, *, until_stdin_closes: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), _read_stdin, stop)
    async with server:
        print(f"listening on {server.url}", flush=True)
        await stop.wait()


def _read_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


if __name__ == "__main__":
    sys.exit(main())
