"""The teacher client against a real HTTP endpoint: what is sent, what comes back, faults, limits, money."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from forge_composer.config.teachers import TeacherConfig
from forge_composer.teachers.breaker import BreakerState
from forge_composer.teachers.client import TeacherReply
from forge_composer.teachers.kinds import ANSWERED, ReplyKind
from forge_composer.teachers.ledger import Ledger, read_calls
from forge_composer.teachers.limits import Clock
from forge_composer.teachers.pool import TeacherPool
from forge_composer.teachers.requests import TeacherRequest
from forge_composer.types import ToolCall
from tests.teachers.endpoint import READ, TOOLS, Endpoint, FakeClock, ask, completion, file_bytes, teacher

BOUND = 0.01


async def ask_all(
    config: TeacherConfig,
    path: Path,
    questions: list[TeacherRequest],
    *,
    budget: float = 100.0,
    clock: Clock | None = None,
) -> list[TeacherReply]:
    """All questions to one teacher at once, over a ledger that is opened for it."""
    with Ledger(path, budget_usd=budget) as ledger:
        async with TeacherPool([config], ledger, clock=clock) as pool:
            replies = await asyncio.gather(*(pool.ask(question) for question in questions))
    return [reply for (reply,) in replies]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


async def test_a_question_in_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_KEY", "sk-secret-0123456789")
    reply = completion(("write_body", {"body": "return 1"}), content="Now.")
    usage = {"prompt_tokens": 1000, "completion_tokens": 100}
    messages: Any = [
        {"role": "user", "content": "Fix é"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c0", "type": "function", "function": {"name": "read", "arguments": {"n": 1}}}
            ],
        },
        {"role": "tool", "content": "def f(): ...", "tool_call_id": "c0", "name": "read"},
    ]
    async with Endpoint(lambda question, count: reply | {"usage": usage}) as endpoint:
        config = teacher(
            endpoint.url,
            api_key_env="LAB_KEY",
            price={"input": 3.0, "output": 15.0},
            sampling={"max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "seed": 7},
            reasoning_effort="low",
            max_tokens_field="max_completion_tokens",
            extra_body={"provider": {"sort": "price"}},
        )
        question = TeacherRequest("trace", "3", messages, TOOLS, sample=2)
        (first,) = await ask_all(config, path, [question])
        (second,) = await ask_all(config, path, [question])
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-secret-0123456789"
    assert endpoint.bodies == [
        {
            "model": "lab/m",
            "messages": [
                {"role": "user", "content": "Fix é"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c0",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"n": 1}'},
                        }
                    ],
                },
                {"role": "tool", "content": "def f(): ...", "tool_call_id": "c0", "name": "read"},
            ],
            "tools": TOOLS,
            "max_completion_tokens": 50,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 9,
            "reasoning_effort": "low",
            "provider": {"sort": "price"},
        }
    ]
    assert (first.kind, first.family, first.attempts, first.cached) == (ReplyKind.OK, "lab", 1, False)
    assert first.action is not None
    assert first.action.tool_calls == (ToolCall("call_0", "write_body", {"body": "return 1"}),)
    assert first.cost_usd == pytest.approx(0.0045)  # 1000 * 3 + 100 * 15 per million
    assert (second.cached, second.attempts, second.action) == (True, 0, first.action)
    assert (second.cost_usd, second.seconds) == (first.cost_usd, first.seconds)


async def test_samples_and_teachers_have_answers_of_their_own(path: Path) -> None:
    async with Endpoint(lambda question, count: READ) as endpoint:
        config = teacher(endpoint.url)
        for other in (config, config.model_copy(update={"name": "u"})):
            await ask_all(other, path, [ask("q"), ask("q", sample=1), ask("q")])
    assert endpoint.seen["q"] == 4  # 2 teachers x 2 samples; what is asked twice at once is sent once


async def test_openrouter_takes_reasoning_as_a_table(path: Path) -> None:
    async with Endpoint(lambda question, count: READ) as endpoint:
        await ask_all(teacher(endpoint.url, dialect="openrouter", reasoning_effort="high"), path, [ask("q")])
    assert endpoint.bodies[0]["reasoning"] == {"effort": "high"}
    assert "reasoning_effort" not in endpoint.bodies[0]


def status(code: int, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": f"that was {code}"}}, status=code, headers=headers)


@pytest.mark.parametrize(
    ("what", "kind", "sent", "cost"),
    [
        (lambda: completion(("write_body", "{")), "bad_arguments", 1, 0.005),
        (lambda: completion(refusal="no"), "refusal", 1, 0.005),
        (lambda: completion(finish="length"), "length", 1, 0.005),
        (lambda: {"choices": []}, "no_choice", 1, BOUND),
        (lambda: [], "wrong_schema", 1, BOUND),
        (lambda: completion(content=""), "empty", 3, 0.015),
        (lambda: web.Response(text=""), "empty", 3, 3 * BOUND),
        (lambda: "half", "truncated", 3, 3 * BOUND),
        (lambda: "cut", "truncated", 3, 3 * BOUND),
        (lambda: "drop", "connection", 3, 3 * BOUND),
        (lambda: "hang", "timeout", 3, 3 * BOUND),
        (lambda: status(429), "rate_limited", 3, 0),
        (lambda: status(500), "server_error", 3, 0),
        (lambda: status(504), "server_error", 3, 3 * BOUND),
        (lambda: {"error": {"code": 503}}, "server_error", 3, 0),
        (lambda: {"error": {"code": 502}}, "server_error", 3, 3 * BOUND),
        (lambda: status(400), "bad_request", 1, 0),
        (lambda: status(401), "unauthorized", 1, 0),
        (lambda: status(404), "not_found", 1, 0),
        (lambda: status(307, Location="http://127.0.0.1:9/"), "bad_request", 1, 0),
        (lambda: completion(("read", {}), usage=None), "ok", 1, BOUND),
        (lambda: completion(("read", {}), usage={"completion_tokens": -5, "cost": "1"}), "ok", 1, BOUND),
        (lambda: completion(("read", {}), usage={"cost": 0.002}), "ok", 1, 0.002),
        (lambda: web.Response(body=b" " * (9 << 20)), "too_large", 1, BOUND),
    ],
)
async def test_each_fault(path: Path, what: Any, kind: str, sent: int, cost: float) -> None:
    async with Endpoint(lambda question, count: what()) as endpoint:
        config = teacher(
            endpoint.url,
            timeout_s=0.1 if kind == "timeout" else 20.0,
            retry={"attempts": 3, "backoff_s": 0.001},
        )
        (reply,) = await ask_all(config, path, [ask("q")])
        assert (reply.kind, reply.attempts, endpoint.seen["q"]) == (kind, sent, sent)
        assert reply.cost_usd == pytest.approx(cost)
        assert (reply.action is not None) == (kind == "ok")
        assert [entry.kind for entry in read_calls(path)] == [kind] * sent
        (again,) = await ask_all(config, path, [ask("q")])
        assert again.kind == kind
        assert again.cached == (reply.kind in ANSWERED)
        assert endpoint.seen["q"] == (sent if again.cached else 2 * sent)
    assert ("that was 400" in reply.detail) == (kind == "bad_request" and reply.status == 400)


async def test_nobody_listens(path: Path) -> None:
    async with Endpoint(lambda question, count: READ) as endpoint:
        url = endpoint.url
    (reply,) = await ask_all(teacher(url), path, [ask("q")])
    assert (reply.kind, reply.attempts, reply.cost_usd) == (ReplyKind.CONNECTION, 6, 0.0)


PASSING = ["half", "cut", "drop", "hang", "empty", "429", "500", "503 inside"]
LASTING = {
    "bad_arguments": completion(("write_body", "{")),
    "refusal": completion(refusal="no"),
    "length": completion(("read", {}), finish="length"),
    "no_choice": {"choices": []},
    "wrong_schema": {"object": "text_completion"},
    "unknown_tool": completion(("rm", {})),
}


async def test_fault_storm(path: Path) -> None:
    """150 questions, 30% faults of every kind at once: what is good is used, and the bill is not higher."""

    def script(question: str, count: int) -> Any:
        rng = random.Random(f"{question}/{count}")
        good = completion(("read", {}), usage=rng.choice([None, {"cost": 0.004}, {"cost": -1}]))
        if rng.random() >= 0.3:
            return good
        fault = rng.choice([*PASSING, *LASTING])
        made = {
            "empty": lambda: web.Response(text=""),
            "429": lambda: status(429, **{"Retry-After": "0.01"}),
            "500": lambda: status(500),
            "503 inside": lambda: {"error": {"code": 503}},
        }
        return made[fault]() if fault in made else LASTING.get(fault, fault)

    questions = [ask(f"q{number}") for number in range(150)]
    async with Endpoint(script) as endpoint:
        # No question meets ten passing faults in a row here: 0.3**10 * 150 = 0.0009.
        config = teacher(
            endpoint.url, timeout_s=0.5, concurrency=16, retry={"attempts": 10, "backoff_s": 0.001}
        )
        replies = await ask_all(config, path, questions)
        seen = endpoint.seen.copy()
        again = await ask_all(config, path, questions)
    assert endpoint.seen == seen
    kinds = Counter(reply.kind.value for reply in replies)
    assert set(kinds) == {"ok", *LASTING}
    assert kinds["ok"] > 115
    for reply, later in zip(replies, again, strict=True):
        assert (reply.kind, reply.action) == (later.kind, later.action)
        assert later.cached
        assert reply.attempts == seen[reply.request.step]
    entries = read_calls(path)
    assert sum(entry.answered for entry in entries) == 150
    assert len(entries) == sum(seen.values())
    assert {entry.kind for entry in entries} == {
        *LASTING, "ok", "truncated", "connection", "timeout", "empty", "rate_limited", "server_error"
    }  # fmt: skip
    assert sum(reply.cost_usd for reply in replies) == pytest.approx(
        sum(entry.counted_nano_usd for entry in entries) / 1e9
    )


async def test_a_budget_of_sixty_percent(path: Path) -> None:
    """50 calls that cost their bound, 0.01 USD: of 0.5 USD needed 0.3 are there."""
    full = completion(("read", {}), usage={"prompt_tokens": 10, "completion_tokens": 1000})
    questions = [ask(f"q{number}", trace=f"trace{number % 5}") for number in range(50)]
    async with Endpoint(lambda question, count: full) as endpoint:
        config = teacher(endpoint.url, concurrency=8)
        replies = await ask_all(config, path, questions, budget=0.3)
        assert Counter(reply.kind.value for reply in replies) == {"ok": 30, "over_budget": 20}
        missing = {reply.request.step for reply in replies if reply.kind is ReplyKind.OVER_BUDGET}
        assert all("the budget of the run is 0.300000 USD" in r.detail for r in replies if not r.action)
        assert sum(endpoint.seen.values()) == 30
        replies = await ask_all(config, path, questions, budget=0.5)
    assert {reply.kind.value for reply in replies} == {"ok"}
    assert {reply.request.step for reply in replies if not reply.cached} == missing
    assert sum(endpoint.seen.values()) == 50


async def test_money_that_comes_back_is_used(path: Path) -> None:
    """Calls cost half of their bound: after n of them n * 0.005 + 0.01 must not pass 0.15, so 29 are made,
    however many are on their way at once."""
    async with Endpoint(lambda question, count: "slow") as endpoint:
        replies = await ask_all(teacher(endpoint.url), path, [ask(f"q{n}") for n in range(50)], budget=0.15)
    assert Counter(reply.kind.value for reply in replies) == {"ok": 29, "over_budget": 21}
    assert endpoint.peak <= 15  # 0.15 / 0.01


async def test_slots(path: Path) -> None:
    async with Endpoint(lambda question, count: "slow") as endpoint:
        await ask_all(teacher(endpoint.url, concurrency=4), path, [ask(f"q{n}") for n in range(40)])
    assert endpoint.peak == 4


async def test_rate_limits(path: Path) -> None:
    clock = FakeClock()
    times: list[float] = []

    def script(question: str, count: int) -> Any:
        times.append(clock.now)
        return READ

    async with Endpoint(script) as endpoint:
        config = teacher(endpoint.url, requests_per_minute=12, concurrency=3)
        await ask_all(config, path, [ask(f"q{n}") for n in range(36)], clock=clock)
    # A call that is let through may reach the server when the clock has gone on: one interval of room.
    assert max(sum(start <= at < start + 55 for at in times) for start in times) <= 12
    assert 150 <= clock.now - 1000 <= 200


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7.0, 7.01),
        (formatdate(1_700_000_000 + 1000 + 40, usegmt=True), 40.0, 40.01),
        ("9999", 50.0, 50.01),
        ("whenever", 0.0, 0.01),
    ],
)
async def test_retry_after_is_waited_for(path: Path, header: str, least: float, most: float) -> None:
    clock = FakeClock()
    async with Endpoint(lambda q, count: READ if count else status(429, **{"Retry-After": header})) as server:
        config = teacher(server.url, retry={"backoff_s": 0.01, "retry_after_max_s": 50.0})
        (reply,) = await ask_all(config, path, [ask("q")], clock=clock)
    assert (reply.kind, reply.attempts) == (ReplyKind.OK, 2)
    assert least <= clock.now - 1000 <= most


async def test_a_busy_endpoint_is_left_alone_by_all_calls(path: Path) -> None:
    clock = FakeClock()
    busy = status(429, **{"Retry-After": "40"})
    async with Endpoint(lambda question, count: busy if question == "a" else READ) as endpoint:
        config = teacher(endpoint.url, retry={"attempts": 1})
        with Ledger(path, budget_usd=1.0) as ledger:
            async with TeacherPool([config], ledger, clock=clock) as pool:
                kinds = [(await pool.ask(ask(question)))[0].kind.value for question in ("a", "b")]
    assert kinds == ["rate_limited", "ok"]
    assert clock.slept == [40.0]


async def test_a_dead_teacher_is_benched_and_probed(path: Path) -> None:
    clock = FakeClock()
    dead = True
    config = {"retry": {"attempts": 2, "backoff_s": 0.001}, "breaker": {"failures": 4, "bench_s": 30}}
    async with Endpoint(lambda question, count: status(500) if dead else READ) as endpoint:
        with Ledger(path, budget_usd=1.0) as ledger:
            async with TeacherPool([teacher(endpoint.url, **config)], ledger, clock=clock) as pool:

                async def kinds(*questions: str) -> list[str]:
                    return [(await pool.ask(ask(question)))[0].kind.value for question in questions]

                assert await kinds("a", "b") == ["server_error", "server_error"]
                assert await kinds("c", "d") == ["benched", "benched"]
                assert sum(endpoint.seen.values()) == 4
                clock.now += 31
                assert await kinds("e", "f") == ["server_error", "benched"]  # the probe is not repeated
                assert sum(endpoint.seen.values()) == 5
                dead = False
                clock.now += 31
                assert await kinds("g") == ["benched"]  # twice as long now
                clock.now += 30
                assert await kinds("h", "a") == ["ok", "ok"]
                (client,) = pool.clients
                assert client.breaker.state is BreakerState.CLOSED
                assert pool.counts() == {"t": {"server_error": 3, "benched": 4, "ok": 2}}


async def test_dead_teachers_do_not_stop_the_others(path: Path) -> None:
    async with Endpoint(lambda question, count: READ) as alive, Endpoint(lambda q, c: "drop") as dead:
        configs = [
            teacher(alive.url),
            teacher(dead.url, name="dead", breaker={"failures": 3}),
            teacher(dead.url, name="locked", breaker={"failures": 3}),
        ]
        with Ledger(path, budget_usd=10.0) as ledger:
            async with TeacherPool(configs, ledger) as pool:
                for number in range(10):
                    replies = await pool.ask(ask(f"q{number}"))
                    assert [reply.action is not None for reply in replies] == [True, False, False]
    assert sum(dead.seen.values()) == 6


async def test_a_call_that_is_given_up_counts_at_its_bound(path: Path) -> None:
    async with Endpoint(lambda question, count: "hang" if count == 0 else READ) as endpoint:
        with Ledger(path, budget_usd=0.025) as ledger:
            async with TeacherPool([teacher(endpoint.url)], ledger) as pool:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(pool.ask(ask("q")), 0.2)
                assert (ledger.spend().spent_usd, ledger.spend().held_usd) == (BOUND, 0.0)
                assert [reply.kind.value for reply in await pool.ask(ask("q"))] == ["ok"]
        assert [entry.kind for entry in read_calls(path)] == ["cancelled", "ok"]


async def test_the_key_is_nowhere(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An endpoint that sends the key back, in the text, in arguments, in escapes and in an error."""
    key = 'sk-or-"v1\\-abcdef0123456789'
    monkeypatch.setenv("LAB_KEY", key)
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)

    def script(question: str, count: int) -> Any:
        if question == "error":
            return web.json_response({"error": {"message": f"bad key {key}"}}, status=400)
        if question == "escaped twice":
            return completion(("write_body", f'{{"body": "{escaped}"}}'), content="x")
        if question == "escapes":
            text = json.dumps(completion(content="SPOT", finish="stop")).replace("SPOT", escaped)
            return web.Response(text=text, content_type="application/json")
        return completion(("write_body", {"body": key, key: 1}), content=f"Bearer {key}")

    async with Endpoint(script) as endpoint:
        config = teacher(endpoint.url, api_key_env="LAB_KEY", sampling={"max_tokens": 10})
        with Ledger(path, budget_usd=1.0) as ledger:
            async with TeacherPool([config], ledger) as pool:
                questions = ("text", "escapes", "error", "text", "escaped twice")
                replies = [(await pool.ask(ask(question)))[0] for question in questions]
                on_disk = file_bytes(path)
                shown = repr(replies) + repr(pool.clients) + repr(vars(pool.clients[0])) + caplog.text
    core = "abcdef0123456789"
    assert [reply.kind.value for reply in replies] == ["ok", "ok", "bad_request", "ok", "bad_arguments"]
    assert core.encode() not in on_disk + file_bytes(path)
    assert core not in shown
    assert replies[2].detail == "bad key [key]"
    assert endpoint.headers[0]["Authorization"] == f"Bearer {key}"


@pytest.mark.parametrize("value", ["", "   ", "sk-\u00e9", "sk-a\nb"])
async def test_a_key_that_cannot_be_used(path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LAB_KEY", value)
    with Ledger(path, budget_usd=1.0) as ledger:
        with pytest.raises(ValueError, match="teacher 't': api_key_env: LAB_KEY") as error:
            async with TeacherPool([teacher("http://127.0.0.1:9/v1", api_key_env="LAB_KEY")], ledger):
                pass
        assert not value.strip() or value not in str(error.value)
        two = [teacher("http://127.0.0.1:9/v1"), teacher("http://127.0.0.1:8/v1")]
        with pytest.raises(ValueError, match="more than one is named 't'"):
            TeacherPool(two, ledger)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_url": "https://api.example.com/v1", "price": None}, "has no price"),
        ({"base_url": "ftp://localhost"}, "expected http"),
        ({"base_url": "http://me:secret@localhost/v1"}, "no credentials here"),
        ({"extra_body": {"messages": [], "top_k": 3}}, "messages: set by the teacher's own options"),
        ({"sampling": {"top_p": 1.5}}, "less than or equal to 1"),
        ({"price": {"input": -1, "output": 1}}, "greater than or equal to 0"),
    ],
)
def test_configs_that_are_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TeacherConfig.model_validate(teacher("http://localhost/v1").model_dump() | fields)


def test_families() -> None:
    url = "http://localhost/v1"
    assert teacher(url, model="Anthropic/claude-x").family_name == "anthropic"
    assert teacher(url, model="qwen3:8b").family_name == "qwen3:8b"
    assert teacher(url, model="nvidia/llama-x", family="Llama").family_name == "llama"
