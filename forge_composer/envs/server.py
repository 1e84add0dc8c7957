"""A local OpenEnv server as a child process, and the command line to host one anywhere.

    python -m forge_composer.envs.server --environment feature_deletion --port 8000 \\
        --options-json '{"difficulty": "medium"}'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from openenv.core.containers.runtime import RuntimeProvider

from forge_composer.config.schema import EnvironmentConfig

_OPTION_FIELDS = (
    "difficulty",
    "train_tasks",
    "hidden_tests",
    "reward",
    "sandbox_cpu_s",
    "sandbox_wall_s",
    "sandbox_memory_mib",
)
_SPARE_SESSIONS = 8
"""Beyond a worker's own: sessions that are just being replaced."""


class ServerStartError(RuntimeError):
    """The environment server did not come up; the message ends with its log."""


class LocalServer(RuntimeProvider):  # type: ignore[misc]  # openenv ships no types
    """One OpenEnv server on 127.0.0.1. It ends with this process, however this process ends.

    An OpenEnv `RuntimeProvider`, so `EnvClient(provider=LocalServer(...))` works as well.
    """

    def __init__(self, config: EnvironmentConfig, *, log_file: Path | None = None) -> None:
        self.config = config
        self.log_file = log_file
        self.url: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process is not None else None

    def start(self, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        """Start the server and wait until it answers; returns its base URL.

        Raises:
            ServerStartError: it ended or did not answer in time.
        """
        if self._process is not None:
            raise RuntimeError("the environment server runs already")
        for _ in range(3):  # another process may take a free port between our look and the server's bind
            chosen = port or free_port()
            self._spawn(chosen, env_vars or {})
            try:
                self.wait_for_ready(float(kwargs.get("timeout_s", 120.0)))
            except ServerStartError as error:
                self.stop()
                if port is None and "address already in use" in str(error):
                    continue
                raise
            assert self.url is not None
            return self.url
        raise ServerStartError("no free port on 127.0.0.1 could be bound in three attempts")

    def _spawn(self, port: int, env_vars: dict[str, str]) -> None:
        options = (
            {name: getattr(self.config, name) for name in _OPTION_FIELDS}
            if self.config.name == "feature_deletion"
            else {}
        )
        command = [sys.executable, "-m", "forge_composer.envs.server"]
        command += ["--environment", self.config.name, "--port", str(port), "--end-with-parent"]
        command += ["--max-sessions", str(self.config.sessions_per_worker + _SPARE_SESSIONS)]
        command += ["--options-json", json.dumps(options)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _search_path()} | env_vars
        log: Any = subprocess.DEVNULL
        if self.log_file is not None:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            log = self.log_file.open("ab")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to us, and we stop the server in order
            )
        finally:
            if self.log_file is not None:
                log.close()
        self.url = f"http://127.0.0.1:{port}"

    def wait_for_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until the server answers on /health.

        Raises:
            ServerStartError: it ended or did not answer in time.
        """
        if self._process is None:
            raise ServerStartError("the environment server was not started")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerStartError(
                    f"environment server {self.config.name!r} ended with status "
                    f"{self._process.returncode}{self._log_tail()}"
                )
            # http_proxy settings are for the outside; this is the loopback interface
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                opener.open(f"{self.url}/health", timeout=2) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise ServerStartError(
            f"environment server {self.config.name!r} did not answer in {timeout_s:g} s{self._log_tail()}"
        )

    def stop(self) -> None:
        """End the server; does nothing when it does not run."""
        process, self._process, self.url = self._process, None, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(3.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _log_tail(self) -> str:
        if self.log_file is None:
            return "; give log_file to see why"
        text = self.log_file.read_text(errors="replace")[-2000:]
        return f"; the end of {self.log_file}:\n{text}"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _search_path() -> str:
    """Our import path for the child: the config may name an environment that only we can import."""
    return os.pathsep.join(entry for entry in sys.path if entry) or os.getcwd()


def main(arguments: list[str] | None = None) -> int:
    """Host an environment until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m forge_composer.envs.server", description=__doc__)
    parser.add_argument("--environment", default="feature_deletion", help="name or package.module:Class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-sessions", type=int, default=64)
    parser.add_argument("--options-json", default="{}", help="options of the environment, a JSON object")
    parser.add_argument("--end-with-parent", action="store_true", help="end when standard input closes")
    given = parser.parse_args(arguments)
    from forge_composer.envs import hosting
    from forge_composer.envs.sandbox import SandboxUnavailableError

    if given.end_with_parent:
        hosting.end_with_parent()
    try:
        options = json.loads(given.options_json)
        if not isinstance(options, dict):
            raise ValueError("expected a JSON object")
    except ValueError as error:
        parser.error(f"--options-json {given.options_json!r}: {error}")
    try:
        app = hosting.build_app(given.environment, options, max_sessions=given.max_sessions)
    except (hosting.EnvironmentNameError, SandboxUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    hosting.serve(app, host=given.host, port=given.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
