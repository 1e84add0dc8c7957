"""Runs model-written Python functions outside of this process, confined (`sandbox_worker`).

A sandbox keeps a few fork servers; each job is one forked child with its own CPU, wall-clock, memory and
output limit and a system-call filter. Needs Linux 5.3 or newer on x86_64 or aarch64, and neither root nor
namespaces. A job costs a few milliseconds.

Grading by input/output replay: a job gets source and argument tuples and gives results; what was expected
never enters the child. A result line that the code forges is therefore worth no more than a returned value.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_composer.envs.grading import CallResult

_WORKER = Path(__file__).with_name("sandbox_worker.py")
_GRACE_S = 10.0
"""Beyond the wall limit: how long a fork server may take to answer before it counts as broken."""


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the code that was to run."""


class SandboxUnavailableError(SandboxError):
    """This machine cannot confine foreign code."""


@dataclass(slots=True, frozen=True)
class SandboxLimits:
    """Limits of one job."""

    cpu_s: float = 1.0
    """CPU seconds."""
    wall_s: float = 5.0
    """Wall-clock seconds."""
    memory_mib: int = 256
    """Address space, MiB."""
    output_bytes: int = 1 << 18
    """Most bytes of results."""


@dataclass(slots=True, frozen=True)
class SyntaxProblem:
    """The source does not compile. `line` counts in the source from 1."""

    message: str
    line: int | None


@dataclass(slots=True, frozen=True)
class JobResult:
    """What a job did: one result per call, or why there are none."""

    calls: list[CallResult]
    syntax: SyntaxProblem | None = None


class Sandbox:
    """A pool of fork servers. Thread-safe; at most `processes` jobs run at once, further ones wait."""

    def __init__(self, limits: SandboxLimits | None = None, *, processes: int = 2) -> None:
        self.limits = limits or SandboxLimits()
        self._free: queue.LifoQueue[_ForkServer] = queue.LifoQueue()
        self._servers = [_ForkServer(self.limits) for _ in range(processes)]
        self._closed = False
        for server in self._servers:
            self._free.put(server)

    def verify(self) -> None:
        """The positive control: a right function gives its value, and each forbidden act is refused.

        Raises:
            SandboxUnavailableError: this machine cannot confine foreign code, with the reason.
        """
        try:
            result = self.run(_PROBE, "probe", [(acts,) for acts in (["compute"], _FORBIDDEN)])
        except SandboxError as error:
            raise SandboxUnavailableError(f"{error}; {_REMEDY}") from error
        wanted = [[42], [True] * len(_FORBIDDEN)]
        if [call.value for call in result.calls] != wanted:
            got = [call.value if call.kind == "value" else call.error for call in result.calls]
            raise SandboxUnavailableError(f"the sandbox does not confine: {_FORBIDDEN}: {got}; {_REMEDY}")

    def run(self, source: str, function: str, calls: Sequence[Sequence[Any]]) -> JobResult:
        """Define a module and call one of its functions.

        Args:
            source: the module.
            function: name of the function in it.
            calls: argument tuples, plain JSON values; none only compiles the module.

        Returns:
            One result per call. After a time limit the calls left over are `lost`.

        Raises:
            SandboxError: the sandbox failed twice; nothing is known about the code.
        """
        request = json.dumps({"source": source, "function": function, "calls": calls}).encode()
        server = self._free.get()
        try:
            try:
                return self._attempt(server, request, len(calls))
            except SandboxError:
                return self._attempt(server, request, len(calls))
        finally:
            self._free.put(server)

    def _attempt(self, server: _ForkServer, request: bytes, calls: int) -> JobResult:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        try:
            output, status = server.job(request)
        except (OSError, ValueError) as error:
            server.stop()
            raise SandboxError(f"the sandbox process failed: {type(error).__name__}: {error}") from error
        except SandboxError:
            server.stop()
            raise
        return _read_output(output, status, calls, self.limits)

    def close(self) -> None:
        """End all fork servers; running jobs die with them."""
        self._closed = True
        for server in self._servers:
            server.stop()


class _ForkServer:
    """One fork server process; used by one thread at a time, started when first needed."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._result_fd = -1

    def job(self, request: bytes) -> tuple[bytes, dict[str, Any]]:
        """Run one job; returns the child's output and how it ended.

        Raises:
            SandboxError: the process does not answer or ended; it must be stopped.
            OSError: likewise.
        """
        process = self._ensure()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(struct.pack(">I", len(request)) + request)
        process.stdin.flush()
        status_fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(status_fd, select.POLLIN)
        poll.register(self._result_fd, select.POLLIN)
        output = bytearray()
        deadline = time.monotonic() + self.limits.wall_s + _GRACE_S
        while True:
            left_s = deadline - time.monotonic()
            ready = dict(poll.poll(max(left_s, 0) * 1000))
            if not ready:
                raise SandboxError("the sandbox process does not answer")
            if self._result_fd in ready:
                self._drain(output)
            if len(output) > self.limits.output_bytes:
                self.stop()  # the child dies with it
                return bytes(output), {"output": True}
            if status_fd in ready:
                line = process.stdout.readline()
                if not line:
                    raise SandboxError(f"the sandbox process ended ({process.poll()})")
                self._drain(output)  # the child is dead: all it wrote is in the pipe
                return bytes(output), json.loads(line)

    def _drain(self, output: bytearray) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(output) <= self.limits.output_bytes and (part := os.read(self._result_fd, 1 << 16)):
                output += part

    def _ensure(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            self._stop_locked()
            self._result_fd, write_fd = os.pipe()
            os.set_blocking(self._result_fd, False)
            limits = self.limits
            arguments = [write_fd, limits.cpu_s, limits.wall_s, limits.memory_mib << 20]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", str(_WORKER), *map(str, arguments)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(write_fd,),
                    cwd="/",
                    env={"LC_ALL": "C.UTF-8"},
                    start_new_session=True,
                )
            finally:
                os.close(write_fd)
            return self._process

    def stop(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._stop_locked()

    def _stop_locked(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process = None
        if self._result_fd >= 0:
            os.close(self._result_fd)
            self._result_fd = -1


def _read_output(output: bytes, status: dict[str, Any], calls: int, limits: SandboxLimits) -> JobResult:
    """Read what the child wrote. Nothing in it is trusted beyond being the function's own claim."""
    lines = output.split(b"\n")[:-1]
    records = [_record(line) for line in lines]
    if not records or records[0] != {"ready": True}:
        reason = records[0].get("failed") if records else status
        raise SandboxError(f"the sandbox could not confine the code: {reason}")
    records = records[1:]
    if records and "syntax" in records[0]:
        line_number = records[0].get("line")
        line = line_number if isinstance(line_number, int) else None
        return JobResult([], SyntaxProblem(_clean(records[0]["syntax"]), line))
    if len(records) > calls and not (len(records) == 1 and "failed" in records[0]):
        return JobResult([CallResult("lost", error="wrote to the result channel")] * calls)
    if records and "failed" in records[-1]:  # the module's own statements raised
        return JobResult([CallResult("raised", error=_clean(records[-1]["failed"]))] * calls)
    results = [_call_result(record) for record in records]
    if len(results) < calls:
        results.append(_interrupted(status, limits))
    results += [CallResult("lost", error="not run")] * (calls - len(results))
    return JobResult(results)


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    return record if isinstance(record, dict) else {"error": "wrote to the result channel"}


def _call_result(record: dict[str, Any]) -> CallResult:
    if "value" in record:
        return CallResult("value", value=record["value"])
    return CallResult("raised", error=_clean(record.get("error", "no result")))


def _clean(text: Any) -> str:
    """Text that can be encoded: half a surrogate pair becomes its escape."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def _interrupted(status: dict[str, Any], limits: SandboxLimits) -> CallResult:
    """Why the call during which the child ended has no result."""
    if status.get("timeout"):
        return CallResult("timeout", error=f"timed out after {limits.wall_s:g} s")
    if status.get("signal") in (signal.SIGPROF, signal.SIGXCPU):
        return CallResult("timeout", error=f"timed out after {limits.cpu_s:g} s")
    if status.get("output"):
        return CallResult("lost", error="too much output")
    if number := status.get("signal"):
        return CallResult("lost", error=f"the process died ({signal.Signals(number).name})")
    return CallResult("lost", error="the process ended")


_REMEDY = (
    "model-written code is not run without confinement; it needs Linux >= 5.3 on x86_64 or aarch64 with "
    "seccomp filters (CONFIG_SECCOMP_FILTER), or set environment.url to a server on such a machine"
)
_FORBIDDEN = ["open", "socket", "fork", "exec", "kill", "ptrace"]
_PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
acts = {
    "compute": lambda: 42,
    "open": lambda: libc.open(b"/etc/passwd", 0),
    "socket": lambda: libc.socket(2, 1, 0),
    "fork": lambda: libc.fork(),
    "exec": lambda: libc.execve(b"/bin/true", None, None),
    "kill": lambda: libc.kill(os.getpid(), 0),
    "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
}

def attempt(name):
    ctypes.set_errno(0)
    result = acts[name]()
    return result if name == "compute" else result == -1 and ctypes.get_errno() == 1

def probe(names):
    return [attempt(name) for name in names]
"""
