"""The local teacher server over real HTTP: answers, prices, faults, and the command."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from apps.serve_teachers import main
from forge_composer.envs import prompts
from forge_composer.envs.micro_tasks import make_task
from forge_composer.teachers.local.replies import SPOILED, draw_latency
from forge_composer.teachers.local.server import TeacherServer
from forge_composer.teachers.local.settings import (
    FAULT_KINDS,
    FaultPlan,
    FaultRates,
    ScriptedTeacher,
    ServerFileError,
    TeacherServerConfig,
    load_faults,
    load_server,
)

TASK = make_task("easy", "train", 5)
STRONG = "scripted/strong"
QUICK = ScriptedTeacher(name="quick", family="q", skill=1.0, latency_s=0.0)


def request(model: str = STRONG, index: int | None = None, **more: Any) -> dict[str, Any]:
    task = TASK if index is None else make_task("easy", "train", index)
    return {
        "model": model,
        "messages": prompts.initial_messages(task.module_source),
        "tools": prompts.TOOLS,
    } | more


def server(**fields: Any) -> TeacherServer:
    return TeacherServer(TeacherServerConfig(**({"latency_scale": 0.0} | fields)))


def faulty(**rates: Any) -> TeacherServer:
    return server(teachers=(QUICK,), faults=FaultPlan(default=FaultRates(**rates)))


async def post(host: TeacherServer, body: Any, **options: Any) -> tuple[int, Any]:
    """Status and JSON of one request on a connection of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{host.url}/chat/completions", json=body, **options) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_good_answer_in_full() -> None:
    async with server() as host:
        status, reply = await post(host, request())
    assert status == 200
    assert reply["object"] == "chat.completion"
    assert reply["model"] == STRONG
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["role"] == "assistant"
    write, run = choice["message"]["tool_calls"]
    assert (write["type"], write["function"]["name"]) == ("function", "write_body")
    assert json.loads(write["function"]["arguments"]) == {"body": TASK.reference_body}
    assert (run["function"]["name"], run["function"]["arguments"]) == ("run_tests", "{}")
    assert write["id"] != run["id"]
    usage = reply["usage"]
    characters = len(json.dumps([request()["messages"], prompts.TOOLS]))
    assert usage["prompt_tokens"] == -(-characters // 4)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    usd = (usage["prompt_tokens"] * 3 + usage["completion_tokens"] * 15) / 1e6
    assert usage["cost"] == pytest.approx(usd, abs=1e-9)
    assert host.billed_usd[STRONG] == pytest.approx(usd, abs=1e-12)
    assert host.counts == Counter({(STRONG, "ok"): 1})


async def test_the_other_routes() -> None:
    async with server() as host, aiohttp.ClientSession() as session:
        await post(host, request())
        async with session.get(f"{host.url}/models") as answer:
            models = await answer.json()
        assert [model["id"] for model in models["data"]] == [STRONG, "scripted/medium", "scripted/weak"]
        root = host.url.removesuffix("/v1")
        async with session.get(f"{root}/health") as answer:
            assert await answer.json() == {"status": "ok"}
        async with session.get(f"{root}/stats") as answer:
            stats = await answer.json()
    assert stats["requests"] == 1
    assert stats["outcomes"] == {STRONG: {"ok": 1}, "scripted/medium": {}, "scripted/weak": {}}
    assert stats["peak_in_flight"] == 1


async def test_equal_requests_get_equal_answers_unless_their_seeds_differ() -> None:
    half = ScriptedTeacher(name="half", family="h", skill=0.5, alternatives=4)
    first, second = server(teachers=(half,)), server(teachers=(half,))
    async with first, second:
        once = [(await post(first, request("half", index)))[1] for index in range(20)]
        again = [(await post(second, request("half", index)))[1] for index in reversed(range(20))][::-1]
        other = [(await post(second, request("half", index, seed=0)))[1] for index in range(20)]
        many = (await post(first, request("half", 0, n=40)))[1]
    said = [[reply["choices"] for reply in replies] for replies in (once, again)]
    assert said[0] == said[1]

    def calls(reply: dict[str, Any]) -> list[str]:
        return [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in reply["choices"]]

    assert [calls(reply) for reply in once] != [calls(reply) for reply in other]
    assert calls(many)[0] == calls(once[0])[0]
    assert len(set(calls(many))) > 2


async def test_no_cost_and_a_key() -> None:
    host = TeacherServer(TeacherServerConfig(report_cost=False, latency_scale=0.0), api_key="s3cret")
    async with host:
        status, reply = await post(host, request())
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        status, reply = await post(host, request(), headers={"Authorization": "Bearer s3cret"})
    assert status == 200
    assert "cost" not in reply["usage"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ([], 400, "not a JSON object"),
        ({"messages": []}, 400, "`model`"),
        ({"model": STRONG}, 400, "`messages`"),
        ({"model": STRONG, "messages": ["hi"]}, 400, "`messages`"),
        (request() | {"tools": {}}, 200, None),
        (request() | {"tools": [1]}, 400, "`tools`"),
        (request(stream=True), 400, "`stream`"),
        (request(n=0), 400, "`n`"),
        (request(n=True), 400, "`n`"),
        (request("gpt"), 404, "there is no model 'gpt'; there are scripted/strong"),
        (
            request() | {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
            400,
            "messages[0].tool_calls",
        ),
    ],
)
async def test_requests_that_are_wrong(body: Any, status: int, message: str | None) -> None:
    async with server() as host:
        seen, reply = await post(host, body)
    assert seen == status
    if message is not None:
        assert message in reply["error"]["message"]
        assert not host.counts


async def test_a_request_that_is_no_json() -> None:
    async with server() as host, aiohttp.ClientSession() as session:
        for data in (b"{", b"[" * 100_000, b"\xff"):
            async with session.post(f"{host.url}/chat/completions", data=data) as answer:
                assert answer.status == 400


def test_latencies_have_the_median_and_the_spread_that_are_set() -> None:
    """4001 draws of median 9 s and spread 0.5: the 95th percentile is 9 exp(1.645 x 0.5) = 20.5 s."""
    rng = random.Random(0)
    slow = QUICK.model_copy(update={"latency_s": 9.0, "latency_spread": 0.5})
    seconds = sorted(draw_latency(slow, rng) for _ in range(4001))
    assert seconds[2000] == pytest.approx(9.0, rel=0.04)
    assert seconds[3800] == pytest.approx(20.5, rel=0.06)
    assert draw_latency(QUICK, rng) == 0.0


async def test_answers_take_their_time_side_by_side() -> None:
    """20 answers of exactly 0.2 s, scaled from 20 s, at once: each takes that long, all together not 4 s."""
    slow = QUICK.model_copy(update={"latency_s": 20.0, "latency_spread": 0.0})
    host = server(teachers=(slow,), latency_scale=0.01)

    async def timed(number: int) -> float:
        began = time.perf_counter()
        await post(host, request("quick", seed=number))
        return time.perf_counter() - began

    async with host:
        began = time.perf_counter()
        seconds = await asyncio.gather(*(timed(number) for number in range(20)))
        together = time.perf_counter() - began
    assert min(seconds) >= 0.2
    assert together < 2.0
    assert host.peak == 20


async def test_rate_limits_and_server_errors() -> None:
    async with (
        faulty(rate_limit=1.0, retry_after_s=0.25) as host,
        aiohttp.ClientSession() as session,
        session.post(f"{host.url}/chat/completions", json=request("quick")) as answer,
    ):
        assert answer.status == 429
        assert answer.headers["Retry-After"] == "0.25"
        assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
    async with faulty(server_error=1.0) as host:
        assert (await post(host, request("quick")))[0] == 500
    assert host.billed_usd["quick"] == 0.0
    assert host.counts == Counter({("quick", "server_error"): 1})


async def test_a_hang_lasts_until_the_client_or_the_server_leaves() -> None:
    async with faulty(hang=1.0, hang_s=60.0) as host:
        began = time.perf_counter()
        with pytest.raises(TimeoutError):
            await post(host, request("quick"), timeout=aiohttp.ClientTimeout(total=0.2))
        waiting = asyncio.create_task(post(host, request("quick")))
        await asyncio.sleep(0.1)
    with pytest.raises(aiohttp.ClientError):
        await waiting
    assert time.perf_counter() - began < 5.0
    assert host.counts == Counter({("quick", "hang"): 2})
    async with faulty(hang=1.0, hang_s=0.1) as host:
        with pytest.raises(aiohttp.ClientError):
            await post(host, request("quick"))


async def test_a_client_that_leaves_before_its_answer() -> None:
    slow = QUICK.model_copy(update={"latency_s": 60.0, "latency_spread": 0.0})
    async with server(teachers=(slow,), latency_scale=1.0) as host:
        with pytest.raises(TimeoutError):
            await post(host, request("quick"), timeout=aiohttp.ClientTimeout(total=0.2))
        for _ in range(100):
            if host.counts:
                break
            await asyncio.sleep(0.01)
    assert host.counts == Counter({("quick", "gone"): 1})
    assert host.billed_usd["quick"] == 0.0


async def test_disconnected_and_truncated_answers() -> None:
    async with faulty(disconnect=1.0) as host:
        with pytest.raises(aiohttp.ClientError):
            await post(host, request("quick"))
    async with faulty(truncated=1.0) as host, aiohttp.ClientSession() as session:
        async with session.post(f"{host.url}/chat/completions", json=request("quick")) as answer:
            text = await answer.text()
        assert answer.status == 200
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
    assert host.billed_usd["quick"] > 0.0


async def spoiled(kind: str, count: int = 12) -> list[Any]:
    """Replies with one fault; each request is another one."""
    async with faulty(**{kind: 1.0}) as host:
        replies = [await post(host, request("quick", seed=number)) for number in range(count)]
    assert {status for status, _ in replies} == {200}
    assert host.counts == Counter({("quick", kind): count})
    return [reply for _, reply in replies]


async def test_wrong_schemas() -> None:
    for reply in await spoiled("wrong_schema"):
        choices = reply.get("choices") if isinstance(reply, dict) else None
        assert not choices or "message" not in choices[0]


@pytest.mark.parametrize("kind", ["bad_arguments", "length"])
async def test_arguments_that_are_cut_off(kind: str) -> None:
    for reply in await spoiled(kind):
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == ("length" if kind == "length" else "tool_calls")
        (call,) = choice["message"]["tool_calls"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["function"]["arguments"])


async def test_refusals_and_bad_usage() -> None:
    for reply in await spoiled("refusal"):
        message = reply["choices"][0]["message"]
        assert message["refusal"]
        assert "tool_calls" not in message
    for reply in await spoiled("bad_usage"):
        call = reply["choices"][0]["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"body": TASK.reference_body}
        usage = reply.get("usage")
        good = isinstance(usage, dict) and all(isinstance(v, int | float) and v >= 0 for v in usage.values())
        assert not good


async def test_faults_by_model_come_as_often_as_set_and_pass_when_asked_again() -> None:
    """300 requests a model: a fifth of each kind for one, within 4 standard errors; none for the other."""
    storm = FaultRates(rate_limit=0.2, server_error=0.2, length=0.2, refusal=0.2)
    calm = QUICK.model_copy(update={"name": "calm"})
    host = server(teachers=(QUICK, calm), faults=FaultPlan(models={"quick": storm}))
    async with host, aiohttp.ClientSession() as session:
        for model in ("quick", "calm"):
            for number in range(300):
                body = request(model, seed=number)
                async with session.post(f"{host.url}/chat/completions", json=body) as answer:
                    await answer.read()
        before = host.counts.copy()
        for _ in range(30):  # the same request, until every outcome was seen
            async with session.post(f"{host.url}/chat/completions", json=request("quick", seed=0)) as answer:
                await answer.read()
    assert before["calm", "ok"] == 300
    for outcome in ("rate_limit", "server_error", "length", "refusal", "ok"):
        assert abs(before["quick", outcome] / 300 - 0.2) < 0.093
        assert host.counts["quick", outcome] > before["quick", outcome]


def test_rates_of_a_model_replace_single_defaults() -> None:
    plan = FaultPlan(
        default=FaultRates(hang=0.1, retry_after_s=9.0), models={"m": FaultRates(hang=0.0, refusal=0.5)}
    )
    assert plan.rates("other") == plan.default
    assert plan.rates("m") == FaultRates(refusal=0.5, retry_after_s=9.0)
    assert set(SPOILED) < set(FAULT_KINDS) <= set(FaultRates.model_fields)
    with pytest.raises(ValueError, match=r"add up to 1\.1"):
        FaultPlan(default=FaultRates(hang=0.6), models={"m": FaultRates(refusal=0.5)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\nhang = 2.0", "default.hang: Input should be less than or equal to 1"),
        ("[default]\nhangs = 0.1", "default.hangs: there is no such field; there are rate_limit"),
        ("[default]\nhang = 0.6\nrefusal = 0.6", "default: the rates of all faults add up to 1.2"),
        ("default = ", "is not valid TOML"),
    ],
)
def test_a_wrong_fault_file_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(ServerFileError) as caught:
        load_faults(path)
    assert f"{path}: {message}" in str(caught.value)
    with pytest.raises(ServerFileError, match=r"none\.toml: cannot be read"):
        load_faults(tmp_path / "none.toml")


def test_a_server_file(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('seed = 3\n[[teachers]]\nname = "a"\nfamily = "f"\n[faults.models.a]\nhang = 0.5\n')
    config = load_server(path)
    assert (config.seed, config.teachers[0].name, config.faults.rates("a").hang) == (3, "a", 0.5)
    path.write_text('[[teachers]]\nname = "a"\nfamily = "f"\n[faults.models.b]\nhang = 0.5\n')
    with pytest.raises(ServerFileError, match="there is no teacher 'b'; there are a"):
        load_server(path)


async def test_start_and_stop() -> None:
    host = server()
    with pytest.raises(RuntimeError, match="not started"):
        _ = host.url
    await host.start()
    taken = TeacherServer(port=int(host.url.split(":")[2].split("/")[0]))
    with pytest.raises(OSError, match="address already in use"):
        await taken.start()
    await host.stop()
    await host.stop()
    with pytest.raises(RuntimeError, match="not started"):
        _ = host.url


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """Start the command in a process of its own; ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "apps.serve_teachers", *options],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


async def test_the_command(command: Any, tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[models."scripted/weak"]\nserver_error = 1.0\n')
    options = ("--port", "0", "--seed", "4", "--latency-scale", "0", "--no-cost", "--until-stdin-closes")
    process = command(*options, "--faults", str(faults))
    url = process.stdout.readline().strip().removeprefix("listening on ")
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/chat/completions", json=request()) as answer:
            assert "cost" not in (await answer.json())["usage"]
        async with session.post(f"{url}/chat/completions", json=request("scripted/weak")) as answer:
            assert answer.status == 500
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


def test_the_command_ends_with_its_parent(command: Any) -> None:
    process = command("--port", "0", "--until-stdin-closes")
    assert process.stdout.readline().startswith("listening on http://127.0.0.1:")
    process.stdin.close()
    assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--faults", "none.toml"), "none.toml: cannot be read"),
        (("--config", "none.toml"), "none.toml: cannot be read"),
        (("--api-key-variable", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE: the environment variable is empty"),
        (("--latency-scale", "-1"), "latency_scale"),
    ],
)
def test_the_command_refuses_what_is_wrong(capsys: Any, options: tuple[str, ...], message: str) -> None:
    assert main(options) == 2
    assert message in capsys.readouterr().err
