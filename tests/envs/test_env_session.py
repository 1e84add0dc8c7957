"""Sessions and pools against real servers: ours and one that is not ours."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_composer.config.schema import EnvironmentConfig
from forge_composer.envs.micro_tasks import make_task
from forge_composer.envs.server import LocalServer, ServerStartError
from forge_composer.envs.session import EnvironmentSession, SessionError, SessionPool
from forge_composer.types import ParsedAction, ToolCall

FOREIGN = "counter_environment:CounterEnvironment"


def turn(*calls: tuple[str, dict[str, Any]], error: str | None = None) -> ParsedAction:
    made = tuple(ToolCall(str(number), name, arguments) for number, (name, arguments) in enumerate(calls))
    return ParsedAction("", made, error=error)


def serve(config: EnvironmentConfig, folder: Path) -> Iterator[str]:
    server = LocalServer(config, log_file=folder / "server.log")
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(EnvironmentConfig(sessions_per_worker=16), tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        config = EnvironmentConfig(name=FOREIGN, sessions_per_worker=4)
        yield from serve(config, tmp_path_factory.mktemp("foreign"))


async def test_an_episode_of_ours(ours: str) -> None:
    pool = SessionPool(ours, EnvironmentConfig())
    task = make_task("easy", "eval", 2)
    start = await pool.start("r1", index=2, split="eval", seed=1)
    assert (start.task_id, start.messages[1]["content"]) == (task.task_id, task.module_source)
    assert start.info == {"episode_id": "r1"}
    step = await pool.step("r1", turn(("run_tests", {}), ("nonsense", {})))
    assert len(step.observations) == 2
    assert step.feedback[-1].kind == "unknown_tool"
    assert (step.reward, step.done, step.error) == (None, False, None)
    step = await pool.step("r1", turn(("write_body", {"body": task.reference_body})), finish=True)
    assert (step.observations, step.reward, step.done) == (["ok"], 1.0, True)
    assert step.reward_breakdown == {"passed": 6.0, "hidden_tests": 6.0}
    await pool.end("r1")
    await pool.close()


async def test_many_rollouts_share_few_sessions(ours: str) -> None:
    pool = SessionPool(ours, EnvironmentConfig(sessions_per_worker=5))
    most_open = 0

    async def episode(number: int) -> tuple[int, float | None]:
        nonlocal most_open
        name, index = f"r{number}", number // 4
        start = await pool.start(name, index=index, split="train", seed=number)
        task = make_task("easy", "train", index)
        assert start.task_id == task.task_id
        most_open = max(most_open, pool.open_sessions)
        body = task.reference_body if number % 2 else "return None"
        step = await pool.step(name, turn(("write_body", {"body": body}), ("submit", {})))
        await pool.end(name)
        return number, step.reward

    results = await asyncio.gather(*(episode(number) for number in range(40)))
    assert results == [(number, float(number % 2)) for number in range(40)]
    assert most_open == pool.open_sessions == 5
    await pool.close()
    assert pool.open_sessions == 0


async def test_session_by_task_id_and_finish(ours: str) -> None:
    session = EnvironmentSession(ours, action_schema=None, timeout_s=30)
    start = await session.reset(task_id="micro-easy-train-00009")
    assert start.task_id == "micro-easy-train-00009"
    step = await session.finish()
    assert (step.reward, step.done) == (0.0, True)
    again = await session.step(turn(("submit", {})))
    assert (again.reward, again.error) == (None, "no episode is open in this session")
    await session.close()


async def test_wrong_uses_are_clear_errors(ours: str) -> None:
    pool = SessionPool(ours, EnvironmentConfig(sessions_per_worker=1))
    with pytest.raises(SessionError, match="there are tasks 0 to"):
        await pool.start("r1", index=10**9, split="train", seed=0)
    with pytest.raises(SessionError, match="has no open episode"):
        await pool.step("r1", turn())
    await pool.end("never started")
    await pool.start("r2", index=0, split="train", seed=0)
    with pytest.raises(SessionError, match="has an episode already"):
        await pool.start("r2", index=0, split="train", seed=0)
    await pool.end("r2")
    await pool.close()
    with pytest.raises(SessionError, match="closed"):
        await pool.start("r3", index=0, split="train", seed=0)


async def test_ending_a_rollout_that_still_waits_for_a_session(ours: str) -> None:
    pool = SessionPool(ours, EnvironmentConfig(sessions_per_worker=1))
    await pool.start("first", index=0, split="train", seed=0)
    waiting = asyncio.create_task(pool.start("second", index=0, split="train", seed=0))
    cancelled = asyncio.create_task(pool.start("third", index=0, split="train", seed=0))
    await asyncio.sleep(0.05)
    await pool.end("second")
    cancelled.cancel()
    with pytest.raises(SessionError, match="ended while its episode started"):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await pool.end("first")
    start = await asyncio.wait_for(pool.start("fourth", index=1, split="train", seed=0), 10)
    assert start.task_id == "micro-easy-train-00001"
    await pool.close()


async def test_a_client_that_loses_a_cancellation_keeps_no_session(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset comes through although it was cancelled: the session is given back all the same."""
    reset = EnvironmentSession.reset
    begun = asyncio.Event()

    async def stubborn(self: EnvironmentSession, **arguments: Any) -> Any:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return await reset(self, **arguments)

    monkeypatch.setattr(EnvironmentSession, "reset", stubborn)
    pool = SessionPool(ours, EnvironmentConfig(sessions_per_worker=1))
    starting = asyncio.create_task(pool.start("ended", index=0, split="train", seed=0))
    await begun.wait()
    await pool.end("ended")
    with pytest.raises(SessionError, match="ended while its episode started"):
        await starting
    monkeypatch.setattr(EnvironmentSession, "reset", reset)
    async with asyncio.timeout(10):
        start = await pool.start("next", index=1, split="train", seed=0)
    assert start.task_id == "micro-easy-train-00001"
    await pool.close()


@pytest.mark.slow
async def test_full_server_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = EnvironmentConfig(name="counter_environment:LonelyEnvironment", step_timeout_s=15)
    for url in serve(config, tmp_path):
        first, second = SessionPool(url, config), SessionPool(url, config)
        await first.start("a", index=0, split="train", seed=0)
        waiting = asyncio.create_task(second.start("b", index=0, split="train", seed=0))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await first.close()
        assert (await waiting).info == {"episode_id": "b"}
        hopeless = SessionPool(url, config.model_copy(update={"step_timeout_s": 0.5}))
        with pytest.raises(SessionError, match="CAPACITY_REACHED"):
            await hopeless.start("c", index=0, split="train", seed=0)
        await hopeless.close()
        await second.close()


async def test_an_environment_that_is_not_ours(foreign: str) -> None:
    pool = SessionPool(foreign, EnvironmentConfig(name=FOREIGN))
    start = await pool.start("r1", index=0, split="train", seed=2)
    assert json.loads(start.messages[1]["content"]) == {"total": 2}
    (tool,) = start.tools
    assert tool["function"]["name"] == "step"
    parameters = tool["function"]["parameters"]
    assert set(parameters["properties"]) == {"amount", "nap_s"}
    assert parameters["required"] == ["amount"]
    step = await pool.step("r1", turn(("step", {"amount": 1}), ("step", {"amount": 2})))
    assert [json.loads(text) for text in step.observations] == [{"total": 3}, {"total": 5}]
    assert (step.reward, step.done) == (None, False)
    step = await pool.step("r1", turn(("step", {"amount": "many"}), ("jump", {}), error="cut off"))
    assert [remark.kind for remark in step.feedback] == ["bad_arguments", "unknown_tool", "malformed_call"]
    assert len(step.observations) == 3
    step = await pool.step("r1", turn(("step", {"amount": 6}), ("step", {"amount": 1})))
    assert (step.reward, step.done) == (9.0, True)
    assert step.observations[1] == "the episode is over"
    await pool.end("r1")
    await pool.start("r2", index=0, split="train", seed=0)
    await pool.step("r2", turn(("step", {"amount": 4})))
    step = await pool.step("r2", turn(), finish=True)
    assert (step.reward, step.done, step.feedback[0].kind) == (4.0, True, "no_call")
    await pool.close()


async def test_environment_exception_is_void(foreign: str) -> None:
    pool = SessionPool(foreign, EnvironmentConfig(name=FOREIGN))
    await pool.start("r1", index=0, split="train", seed=0)
    step = await pool.step("r1", turn(("step", {"amount": 13})))
    assert (step.reward, step.done) == (None, True)
    assert step.error is not None
    assert "unlucky" in step.error
    await pool.end("r1")
    assert pool.open_sessions == 0, "the session is not used again"
    await pool.close()


async def test_time_out_voids_the_episode_and_the_next_one_is_clean(foreign: str) -> None:
    pool = SessionPool(foreign, EnvironmentConfig(name=FOREIGN, step_timeout_s=2.0, sessions_per_worker=1))
    await pool.start("r1", index=0, split="train", seed=0)
    step = await pool.step("r1", turn(("step", {"amount": 1, "nap_s": 5.0})))
    assert (step.reward, step.done) == (None, True)
    assert step.error == "no answer within environment.step_timeout_s = 2 s"
    late = await pool.step("r1", turn(("step", {"amount": 1})))
    assert late.error == "no episode is open in this session"
    await pool.end("r1")
    await pool.start("r2", index=0, split="train", seed=3)
    step = await pool.step("r2", turn(("step", {"amount": 1})))
    assert json.loads(step.observations[0]) == {"total": 4}
    await pool.close()


async def test_cancelled_step_does_not_poison_the_session(foreign: str) -> None:
    pool = SessionPool(foreign, EnvironmentConfig(name=FOREIGN, sessions_per_worker=1))
    await pool.start("r1", index=0, split="train", seed=0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.step("r1", turn(("step", {"amount": 1, "nap_s": 1.0}))), 0.2)
    await pool.end("r1")
    await pool.start("r2", index=0, split="train", seed=1)
    step = await pool.step("r2", turn(("step", {"amount": 1})))
    assert json.loads(step.observations[0]) == {"total": 2}
    await pool.close()


async def test_ending_a_rollout_during_its_step(foreign: str) -> None:
    pool = SessionPool(foreign, EnvironmentConfig(name=FOREIGN, sessions_per_worker=1))
    await pool.start("r1", index=0, split="train", seed=0)
    running = asyncio.create_task(pool.step("r1", turn(("step", {"amount": 1, "nap_s": 1.0}))))
    await asyncio.sleep(0.2)
    await pool.end("r1")
    step = await running
    assert (step.reward, step.done, step.error is not None) == (None, True, True)
    await pool.close()


async def test_silent_reconnect_is_noticed(ours: str, foreign: str) -> None:
    """The server closes the socket; OpenEnv's client would go on with a fresh environment."""
    for url, name, action in (
        (ours, "feature_deletion", turn(("submit", {}))),
        (foreign, FOREIGN, turn(("step", {"amount": 1}))),
    ):
        pool = SessionPool(url, EnvironmentConfig(name=name))
        await pool.start("r1", index=0, split="train", seed=0)
        client = pool._active["r1"]._client
        await client.disconnect()
        step = await pool.step("r1", action)
        assert (step.reward, step.done) == (None, True)
        assert step.error is not None
        assert "fresh environment" in step.error
        await pool.end("r1")
        await pool.close()


@pytest.mark.slow
@pytest.mark.chaos
async def test_server_crash_and_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = EnvironmentConfig(name=FOREIGN, step_timeout_s=20)
    server = LocalServer(config, log_file=tmp_path / "one.log")
    url = server.start()
    pool = SessionPool(url, config)
    await pool.start("idle", index=0, split="train", seed=0)
    await pool.end("idle")
    await pool.start("other", index=0, split="train", seed=0)
    await pool.start("killer", index=0, split="train", seed=0)
    step = await pool.step("killer", turn(("step", {"amount": 666})))
    assert (step.reward, step.done, step.error is not None) == (None, True, True)
    step = await pool.step("other", turn(("step", {"amount": 1})))
    assert (step.reward, step.done, step.error is not None) == (None, True, True)
    await pool.end("killer")
    await pool.end("other")
    server.stop()
    waiting = asyncio.create_task(pool.start("next", index=0, split="train", seed=4))
    again = LocalServer(config, log_file=tmp_path / "two.log")
    try:
        await asyncio.to_thread(again.start, int(url.rpartition(":")[2]))
        assert json.loads((await waiting).messages[1]["content"]) == {"total": 4}
        await pool.close()
    finally:
        again.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "expected 'feature_deletion' or 'package.module:EnvironmentClass'"),
        ("no_such_package.module:Env", "No module named 'no_such_package'"),
        ("json:JSONDecoder", "is not a subclass of OpenEnv's Environment"),
    ],
)
def test_server_that_cannot_start_says_why(name: str, said: str, tmp_path: Path) -> None:
    server = LocalServer(EnvironmentConfig(name=name), log_file=tmp_path / "server.log")
    with pytest.raises(ServerStartError) as caught:
        server.start()
    assert said in str(caught.value)
    assert server.pid is None


@pytest.mark.slow
def test_bad_options_are_refused_by_the_command_line() -> None:
    command = [sys.executable, "-m", "forge_composer.envs.server", "--options-json"]
    wrong = subprocess.run([*command, '{"difficulty": "absurd"}'], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "difficulty" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    wrong = subprocess.run([*command, "{"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "--options-json" in wrong.stderr


@pytest.mark.slow
@pytest.mark.chaos
def test_server_and_sandbox_die_with_their_parent(tmp_path: Path) -> None:
    script = (
        "import json, time, psutil\n"
        "from pathlib import Path\n"
        "from forge_composer.config.schema import EnvironmentConfig\n"
        "from forge_composer.envs.server import LocalServer\n"
        f"LocalServer(EnvironmentConfig(), log_file=Path({str(tmp_path / 'log')!r})).start()\n"
        "print(json.dumps([c.pid for c in psutil.Process().children(recursive=True)]), flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    assert len(pids) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
