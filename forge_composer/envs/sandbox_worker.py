"""The sandbox's own program: a fork server that runs each job in a confined child process.

Started by `forge_composer.envs.sandbox` as `python -I -S -B sandbox_worker.py ...`; imports the standard
library only and nothing of this package. It never touches a job's data: the child reads its request from
the shared request pipe and writes its results to the shared result pipe, so that no memory of the fork
server, which every child inherits, holds anything of an earlier job.

    request pipe (fd 0)   4-byte big-endian length, JSON {"source", "function", "calls"}; read by the child
    result pipe           JSON lines of the child; the first is {"ready": true}, written when confined
    status pipe (fd 1)    one JSON line of the fork server after each job: how the child ended

Before any foreign code the child gives up what it can: resource limits, uid, no_new_privs, and last a
seccomp filter that allows memory management, clocks, reading and writing descriptors that are open, and
exit. Everything else fails with EPERM: no files, no sockets, no processes, no signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
from typing import Any, NoReturn

PRELOADED = (
    *("array", "bisect", "calendar", "cmath", "collections", "collections.abc", "copy", "dataclasses"),
    *("datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "itertools"),
    *("math", "numbers", "operator", "pprint", "random", "re", "reprlib", "statistics", "string", "struct"),
    *("textwrap", "time", "typing", "unicodedata"),
    *("encodings.ascii", "encodings.idna", "encodings.latin_1", "encodings.utf_8"),
)
"""Standard modules that a solution may import; nothing can be loaded from disk once confined."""

MAX_RESULT_CHARS = 20_000
MAX_ERROR_CHARS = 300

# name: (x86_64, aarch64)
ALLOWED_SYSCALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine name: seccomp's AUDIT_ARCH value, column of ALLOWED_SYSCALLS."""

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_RET_KILL_PROCESS, _RET_ERRNO_EPERM, _RET_ALLOW = 0x80000000, 0x00050001, 0x7FFF0000
_LOAD_WORD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_NET = 0x04000000, 0x08000000, 0x10000000, 0x40000000
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def main() -> None:
    """Serve jobs until the request pipe closes, which it does when the parent dies."""
    result_fd, cpu_s, wall_s, memory = int(sys.argv[1]), *map(float, sys.argv[2:5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if platform.machine() not in ARCHITECTURES:
        raise SystemExit(f"no system-call table for {platform.machine()}")
    for name in PRELOADED:
        __import__(name)
    json.loads(json.dumps({"warm": [1.5, "up"]}))
    program = _filter_program()
    _leave_namespaces()
    gc.collect()
    gc.freeze()
    gc.disable()
    own_pid = os.getpid()
    requests = select.poll()
    requests.register(0, select.POLLIN)
    while True:
        events = requests.poll()
        if not events[0][1] & select.POLLIN:
            return
        child = os.fork()
        if child == 0:
            _child(own_pid, result_fd, cpu_s, int(memory), program)
        os.write(1, json.dumps(_wait(child, wall_s)).encode() + b"\n")


def _wait(child: int, wall_s: float) -> dict[str, Any]:
    """Wait for the child, at most `wall_s` seconds; it is dead and reaped afterwards."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(0, 0)  # the parent's death shows as a hang-up
    ended = dict(poll.poll(wall_s * 1000))
    if handle not in ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    os.close(handle)
    if 0 in ended:
        raise SystemExit
    return {
        "timeout": handle not in ended,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
    }


def _child(server_pid: int, result_fd: int, cpu_s: float, memory: int, program: _FilterProgram) -> NoReturn:
    """Read the job, confine this process, run the job, end."""
    try:
        job = _read_job()
        _confine(server_pid, result_fd, cpu_s, memory, program)
        _emit({"ready": True})
        _run(job)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _emit({"failed": _describe(error)})
    os._exit(0)


def _read_job() -> dict[str, Any]:
    size = struct.unpack(">I", _read_exactly(4))[0]
    job: dict[str, Any] = json.loads(_read_exactly(size))
    return job


def _read_exactly(count: int) -> bytes:
    parts = []
    while count > 0:
        part = os.read(0, count)
        if not part:
            raise EOFError("the request ended early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _confine(server_pid: int, result_fd: int, cpu_s: float, memory: int, program: _FilterProgram) -> None:
    """Give up every right that a pure function does not need. The result pipe becomes descriptor 3."""
    null = os.open(os.devnull, os.O_RDWR)
    saved = os.dup(result_fd)
    for target in (0, 1, 2):
        os.dup2(null, target)
    os.dup2(saved, 3)
    os.closerange(4, 1 << 16)
    for name, limit in (
        (resource.RLIMIT_CPU, math.ceil(cpu_s) + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 4),
    ):
        resource.setrlimit(name, (limit, limit))
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        os._exit(1)  # it died before it was asked to take this process along
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # cannot be undone: the filter allows no handler, no timer
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _prctl(option: int, argument: int, pointer: int = 0) -> None:
    result = _libc.prctl(
        ctypes.c_int(option),
        ctypes.c_ulong(argument),
        ctypes.c_ulong(pointer),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _filter_program() -> _FilterProgram:
    """The allow-list as a BPF program; a foreign architecture's system call kills the process."""
    audit_arch, column = ARCHITECTURES[platform.machine()]
    code = [
        (_LOAD_WORD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, audit_arch),
        (_RETURN, 0, 0, _RET_KILL_PROCESS),
        (_LOAD_WORD, 0, 0, 0),
    ]
    for numbers in ALLOWED_SYSCALLS.values():
        code += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _RET_ALLOW)]
    code.append((_RETURN, 0, 0, _RET_ERRNO_EPERM))
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = _FilterProgram(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    program.keep_alive = buffer
    return program


def _leave_namespaces() -> None:
    """An empty network and own IPC on top of the filter, where the kernel lets us; else nothing is lost."""
    wanted = _NEW_NET | _NEW_IPC | _NEW_UTS
    if _libc.unshare(wanted) != 0:
        _libc.unshare(wanted | _NEW_USER)


def _run(job: dict[str, Any]) -> None:
    """Define the module and make the calls, one result line each."""
    scope: dict[str, Any] = {"__name__": "task"}
    try:
        code = compile(job["source"], "<task>", "exec")
    except SyntaxError as error:
        _emit({"syntax": _text(error.msg), "line": error.lineno})
        return
    except BaseException as error:  # too deep, too large, null bytes
        _emit({"syntax": _describe(error), "line": None})
        return
    if not job["calls"]:
        return
    exec(code, scope)
    function = scope[job["function"]]
    for arguments in job["calls"]:
        try:
            line = _value_line(function(*arguments))
        except BaseException as error:
            line = json.dumps({"error": _describe(error)})
        _write(line)


def _value_line(value: Any) -> str:
    problem = _not_json(value, 0)
    if problem is not None:
        raise TypeError(f"returned {problem}")
    line = json.dumps({"value": value})
    if len(line) > MAX_RESULT_CHARS:
        raise ValueError("the returned value is too large")
    return line


def _not_json(value: Any, depth: int) -> str | None:
    """Why a value has no exact JSON form, or None. Exact types only: a subclass may lie about itself."""
    kind = type(value)
    if kind in (str, int, bool, type(None)):
        return None
    if kind is float:
        return None if math.isfinite(value) else f"{value!r}"
    if depth > 20:
        return "a value nested too deeply"
    if kind is list:
        return next((p for item in value if (p := _not_json(item, depth + 1)) is not None), None)
    if kind is dict:
        if any(type(key) is not str for key in value):
            return "a dict with keys that are no strings"
        return next((p for item in value.values() if (p := _not_json(item, depth + 1)) is not None), None)
    return f"a value of type {_text(kind.__name__)}"


def _describe(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero`, whatever the exception's own methods do."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    name = type(error).__name__
    return _text(f"{name}: {text}" if text else name)


def _text(text: str | None) -> str:
    return str(text or "")[:MAX_ERROR_CHARS]


def _emit(record: dict[str, Any]) -> None:
    _write(json.dumps(record))


def _write(line: str) -> None:
    left = line.encode() + b"\n"
    while left:
        left = left[os.write(3, left) :]


if __name__ == "__main__":
    main()
