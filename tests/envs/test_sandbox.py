"""The sandbox: right values, limits, and everything that a cheating solution might try."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forge_composer.envs.grading import CallResult, Case, passed_count
from forge_composer.envs.sandbox import (
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(SandboxLimits(cpu_s=0.3, wall_s=3.0, memory_mib=256, output_bytes=1 << 16))
    box.verify()
    yield box
    box.close()


def run(sandbox: Sandbox, body: str, *calls: tuple) -> list[CallResult]:
    source = "import os, sys\n\ndef f(*args):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return sandbox.run(source, "f", list(calls) or [(1,)]).calls


def only_error(sandbox: Sandbox, body: str) -> str:
    (result,) = run(sandbox, body)
    assert result.kind != "value", result
    return result.error


def test_values_come_back_exactly(sandbox: Sandbox) -> None:
    values = [1, -3, 10**30, True, None, 2.5, "é\n'\"", [1, [2, "x"]], {"a": [None]}]
    results = run(sandbox, "return args[0]", *[(value,) for value in values])
    assert [(r.kind, r.value, type(r.value)) for r in results] == [("value", v, type(v)) for v in values]


def test_each_call_gets_its_own_arguments_and_result(sandbox: Sandbox) -> None:
    results = run(sandbox, "return 10 // args[0]", (5,), (0,), (3,))
    assert [r.kind for r in results] == ["value", "raised", "value"]
    assert results[0].value == 2
    assert results[1].error == "ZeroDivisionError: integer division or modulo by zero"
    assert results[2].value == 3


def test_syntax_problem_with_its_line(sandbox: Sandbox) -> None:
    result = sandbox.run("def f(a):\n    x = 1\n    return a +\n", "f", [(1,)])
    assert result.calls == []
    assert result.syntax is not None
    assert (result.syntax.message, result.syntax.line) == ("invalid syntax", 3)
    assert sandbox.run("def f(a):\n    return a\n", "f", []).syntax is None


def test_absurdly_nested_source_is_a_syntax_problem(sandbox: Sandbox) -> None:
    assert sandbox.run("x = " + "(" * 5000 + ")" * 5000, "f", []).syntax is not None
    assert sandbox.run("x = " + "-" * 100_000 + "1", "f", []).syntax is not None


def test_common_modules_can_be_imported(sandbox: Sandbox) -> None:
    body = "import math, re, collections, itertools, functools, string\nreturn math.gcd(12, args[0])"
    assert run(sandbox, body, (18,))[0].value == 6


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("(1, 2)", "TypeError: returned a value of type tuple"),
        ("{1}", "TypeError: returned a value of type set"),
        ("float('nan')", "TypeError: returned nan"),
        ("{1: 2}", "TypeError: returned a dict with keys that are no strings"),
        ("type('int', (int,), {})(1)", "TypeError: returned a value of type int"),
        ("object()", "TypeError: returned a value of type object"),
        ("'x' * 30000", "ValueError: the returned value is too large"),
    ],
)
def test_results_that_are_no_plain_json(sandbox: Sandbox, expression: str, said: str) -> None:
    assert only_error(sandbox, f"return {expression}") == said


def test_half_a_surrogate_pair_in_an_error_can_be_encoded(sandbox: Sandbox) -> None:
    assert only_error(sandbox, r"raise ValueError('\ud800')").encode() == rb"ValueError: \ud800"


@pytest.mark.hacks
def test_no_file_can_be_read_or_written(sandbox: Sandbox, tmp_path: Path) -> None:
    assert only_error(sandbox, "return open('/etc/passwd').read()").startswith("PermissionError")
    assert only_error(sandbox, f"open({str(tmp_path / 'x')!r}, 'w')").startswith("PermissionError")
    assert only_error(sandbox, "return os.listdir('/')").startswith("PermissionError")
    assert not (tmp_path / "x").exists()


@pytest.mark.hacks
def test_no_network_not_even_by_raw_system_call(sandbox: Sandbox) -> None:
    assert only_error(sandbox, "import socket").startswith("ModuleNotFoundError")
    body = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        return [libc.socket(2, 1, 0), ctypes.get_errno(), libc.syscall(41, 2, 1, 0), ctypes.get_errno()]
    """
    assert run(sandbox, body)[0].value == [-1, 1, -1, 1]


@pytest.mark.hacks
def test_no_process_is_started(sandbox: Sandbox) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert only_error(sandbox, "while True: os.fork()").startswith("PermissionError")
    assert only_error(sandbox, "os.execv('/bin/true', ['true'])").startswith("PermissionError")
    assert "can't start new thread" in only_error(
        sandbox, "import _thread\nreturn _thread.start_new_thread(print, ())"
    )
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


@pytest.mark.hacks
def test_parent_cannot_be_signalled_or_traced(sandbox: Sandbox) -> None:
    for target in (os.getpid(), -1, 1):
        assert only_error(sandbox, f"os.kill({target}, 9)").startswith("PermissionError")
    assert only_error(sandbox, "os.kill(os.getppid(), 9)").startswith("PermissionError")
    assert run(sandbox, "return args[0]", (7,))[0].value == 7


@pytest.mark.hacks
def test_infinite_loop_ends_at_the_cpu_limit(sandbox: Sandbox) -> None:
    results = run(sandbox, "while args[0]: pass\nreturn 5", (0,), (1,), (0,))
    assert [r.kind for r in results] == ["value", "timeout", "lost"]
    assert results[1].error == "timed out after 0.3 s"


@pytest.mark.hacks
def test_cpu_limit_cannot_be_lifted(sandbox: Sandbox) -> None:
    body = """
        import contextlib, ctypes
        libc = ctypes.CDLL(None)
        libc.signal(27, 1)  # ignore SIGPROF
        libc.setitimer(2, None, None)
        while True:
            with contextlib.suppress(BaseException):
                pass
    """
    assert run(sandbox, body)[0].kind in ("timeout", "raised")
    began = time.monotonic()
    loop = "import ctypes\nctypes.CDLL(None).signal(27, 1)\nwhile True: pass"
    assert run(sandbox, loop)[0].kind == "timeout"
    assert time.monotonic() - began < 3.0


@pytest.mark.hacks
def test_waiting_ends_at_the_wall_limit() -> None:
    box = Sandbox(SandboxLimits(cpu_s=1.0, wall_s=0.3), processes=1)
    try:
        body = "import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()"
        (result,) = run(box, body)
        assert (result.kind, result.error) == ("timeout", "timed out after 0.3 s")
        assert run(box, "return 1")[0].value == 1
    finally:
        box.close()


@pytest.mark.hacks
def test_memory_is_bounded(sandbox: Sandbox) -> None:
    assert only_error(sandbox, "return len(bytearray(10 << 30))") == "MemoryError"
    assert only_error(sandbox, "x = []\nwhile True: x.append(bytearray(32 << 20))") == "MemoryError"


@pytest.mark.hacks
@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("os._exit(0)", "the process ended"),
        ("import ctypes\nctypes.string_at(0)", "the process died (SIGSEGV)"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("return f(*args)", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_early_end_is_a_failure(sandbox: Sandbox, act: str, said: str) -> None:
    assert only_error(sandbox, act) == said


@pytest.mark.hacks
def test_unlimited_recursion_stays_in_the_child(sandbox: Sandbox) -> None:
    (result,) = run(sandbox, "sys.setrecursionlimit(10**9)\nreturn f(*args)")
    assert result.kind != "value"
    assert run(sandbox, "return 1")[0].value == 1


@pytest.mark.hacks
def test_output_is_bounded_and_costs_one_job(sandbox: Sandbox) -> None:
    (result,) = run(sandbox, "while True: os.write(3, b'x' * 4096)")
    assert (result.kind, result.error) == ("lost", "too much output")
    assert run(sandbox, "print('y' * 100_000)\nreturn 2")[0].value == 2


@pytest.mark.hacks
@pytest.mark.parametrize(
    "forgery",
    [
        """os.write(3, b'{"value": 3}\\n')""",
        """os.write(3, b'{"value": 3}\\n' * 50)""",
        """os.write(3, b'{"ready": true}\\n{"passed": 2}\\n{"reward": 1}\\n')""",
        """os.write(3, b'[1]\\n\\xff\\xfe\\n' + b'[' * 9999 + b'\\n')""",
        """os.write(1, b'{"timeout": false, "signal": 0, "code": 0}\\n')""",
        """os.write(3, b'{"syntax": 5, "line": "x"}\\n')""",
    ],
)
def test_forged_result_lines_gain_nothing(sandbox: Sandbox, forgery: str) -> None:
    """The wrong function stays wrong, whatever it writes, as long as it does not know the answers."""
    cases = [Case((5,), 11), Case((8,), 17)]
    results = run(sandbox, f"{forgery}\nos._exit(0)", *[case.arguments for case in cases])
    assert len(results) in (0, 2)
    assert not results or passed_count(cases, results) == 0
    results = run(sandbox, f"{forgery}\nreturn 0", *[case.arguments for case in cases])
    assert not results or passed_count(cases, results) == 0


@pytest.mark.hacks
def test_a_job_sees_its_source_and_arguments_only(sandbox: Sandbox) -> None:
    """What frames and gc reach of the job is the request: no expected value is in it."""
    body = """
        import gc
        frame, jobs = sys._getframe(), []
        while frame:
            jobs += [v for v in frame.f_locals.values() if type(v) is dict and "calls" in v]
            frame = frame.f_back
        jobs += [o for o in gc.get_objects() if type(o) is dict and "calls" in o and "source" in o]
        return [sorted({key for job in jobs for key in job}), jobs[0]["calls"]]
    """
    (result,) = run(sandbox, body, (4711,))
    assert result.value == [["calls", "function", "source"], [[4711]]], result


@pytest.mark.hacks
def test_fork_server_keeps_nothing_of_a_job() -> None:
    """Children inherit the fork server's memory, so it must hold no solution and no result of others."""
    box = Sandbox(processes=1)
    try:
        marker = f"left-over-{os.getpid()}"
        assert run(box, f"return {marker!r} + args[0]", (marker,))[0].value == marker * 2
        process = box._servers[0]._process
        assert process is not None
        found = searched = 0
        with open(f"/proc/{process.pid}/maps") as maps, open(f"/proc/{process.pid}/mem", "rb", 0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                if not rights.startswith("rw"):
                    continue
                first, last = (int(part, 16) for part in span.split("-"))
                memory.seek(first)
                content = memory.read(last - first)
                searched += len(content)
                found += content.count(marker.encode())
        assert searched > 1 << 20
        assert found == 0
    finally:
        box.close()


@pytest.mark.hacks
def test_state_does_not_survive_a_job(sandbox: Sandbox) -> None:
    body = "import math\nmath.seen = getattr(math, 'seen', 0) + 1\nreturn math.seen"
    assert [r.value for r in run(sandbox, body, (1,), (1,))] == [1, 2]
    assert [r.value for r in run(sandbox, body, (1,))] == [1]


@pytest.mark.chaos
def test_dead_fork_servers_are_replaced(sandbox: Sandbox) -> None:
    assert run(sandbox, "return 1")[0].value == 1
    workers = [c for c in psutil.Process().children() if "sandbox_worker.py" in " ".join(c.cmdline())]
    assert workers
    for worker in workers:
        worker.kill()
        worker.wait(5)
    assert run(sandbox, "return args[0] + 1", (1,))[0].value == 2


def test_concurrent_jobs_do_not_mix(sandbox: Sandbox) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(5):
            (result,) = run(sandbox, f"return [{number}, args[0]]", (turn,))
            if result.value != [number, turn]:
                wrong.append(result)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_confinement_there_is_an_error_and_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker whose filter lets everything pass is found out by the positive control."""
    import forge_composer.envs.sandbox as module

    text = module._WORKER.read_text()
    loose = text.replace(
        "_RET_ERRNO_EPERM, _RET_ALLOW = 0x80000000, 0x00050001",
        "_RET_ERRNO_EPERM, _RET_ALLOW = 0x80000000, 0x7FFF0000",
    )
    assert loose != text
    worker = tmp_path / "loose_worker.py"
    worker.write_text(loose)
    monkeypatch.setattr(module, "_WORKER", worker)
    box = Sandbox(processes=1)
    try:
        with pytest.raises(SandboxUnavailableError, match=r"does not confine.*CONFIG_SECCOMP_FILTER"):
            box.verify()
    finally:
        box.close()


def test_worker_that_cannot_start_is_an_infrastructure_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import forge_composer.envs.sandbox as module

    monkeypatch.setattr(module, "_WORKER", tmp_path / "missing.py")
    box = Sandbox(processes=1)
    with pytest.raises(SandboxError, match="sandbox process"):
        box.run("def f(): return 1", "f", [()])
    with pytest.raises(SandboxUnavailableError, match=r"environment\.url"):
        box.verify()
    box.close()


@pytest.mark.chaos
def test_processes_die_with_their_parent() -> None:
    script = textwrap.dedent("""
        import json, threading, time, psutil
        from forge_composer.envs.sandbox import Sandbox, SandboxLimits
        box = Sandbox(SandboxLimits(cpu_s=60, wall_s=60), processes=1)
        code = "def f(n):\\n    while n: pass\\n    return 1"
        box.run(code, "f", [(0,)])
        threading.Thread(target=box.run, args=(code, "f", [(1,)]), daemon=True).start()
        time.sleep(0.5)
        print(json.dumps([c.pid for c in psutil.Process().children(recursive=True)]), flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if _alive(pid)] == []


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
