"""Every reply has one kind, whatever it is; only good ones have an action."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_composer.config.teachers import PriceConfig
from forge_composer.teachers.kinds import ReplyKind, is_free, status_kind
from forge_composer.teachers.prices import CostSource, TokenBound, cost_of, to_nano, upper_bound
from forge_composer.teachers.replies import classify, decode
from forge_composer.types import ToolCall
from tests.teachers.endpoint import TOOLS, completion


def kind(body: Any) -> str:
    return classify(body, TOOLS).kind.value


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (completion(("read", {})), "ok"),
        (completion(("read", {}), finish=None), "ok"),
        (completion(content="All tests pass.", finish="stop"), "ok"),
        (completion(content=[{"type": "text", "text": "Done."}], finish="stop"), "ok"),
        (completion(("read", "")), "ok"),  # a tool without parameters
        (completion(content='<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'), "ok"),
        ({"choices": []}, "no_choice"),
        ({"choices": None, "error": None}, "no_choice"),
        (completion(("write_body", '{"body": "return')), "bad_arguments"),
        (completion(("write_body", "")), "bad_arguments"),
        (completion(("write_body", "[1]")), "bad_arguments"),
        (completion(("write_body", '"return 1"')), "bad_arguments"),
        (completion(("write_body", '{"body": NaN}')), "bad_arguments"),
        (completion(("write_body", '{"body": 1e999}')), "bad_arguments"),
        (completion(("write_body", '{"body": "\\ud800"}')), "bad_arguments"),
        (completion(("write_body", '{"body":' + "[" * 70 + "]" * 70 + "}")), "bad_arguments"),
        (completion(("write_body", "[" * 100_000)), "bad_arguments"),
        (completion(("read", {}), ("write_body", "nonsense")), "bad_arguments"),
        (completion(content="<tool_call>\n{not json}\n</tool_call>"), "bad_arguments"),
        (completion(("rm", {})), "unknown_tool"),
        (completion(content='<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'), "unknown_tool"),
        (completion(refusal="No.", finish="stop"), "refusal"),
        (completion(content="Text", finish="content_filter"), "refusal"),
        (completion(content=[{"type": "refusal", "refusal": "No."}]), "refusal"),
        (completion(content="I'm sorry, but I can't help with that.", finish="stop"), "refusal"),
        (completion(content="I cannot assist with this request.", finish="stop"), "refusal"),
        (completion(content="I cannot reproduce the failure, all tests pass.", finish="stop"), "ok"),
        (completion(("read", {}), finish="length"), "length"),
        (completion(finish="length"), "length"),
        (completion(finish="stop"), "empty"),
        (completion(content="  \n", finish="stop"), "empty"),
        (completion(content="<think>it never ends", finish="stop"), "empty"),
        ([], "wrong_schema"),
        ({}, "wrong_schema"),
        ("text", "wrong_schema"),
        ({"choices": {"a": 1}}, "wrong_schema"),
        ({"choices": ["a"]}, "wrong_schema"),
        ({"choices": [{"message": "hello"}]}, "wrong_schema"),
        (completion(content=7), "wrong_schema"),
        (completion(content="\ud800"), "wrong_schema"),
        (completion(tool_calls={"name": "read"}), "wrong_schema"),
        (completion(tool_calls=[{"function": {"name": 3}}]), "wrong_schema"),
        ({"error": {"message": "busy", "code": 429}}, "rate_limited"),
        ({"error": {"message": "down", "code": "502"}}, "server_error"),
        ({"error": "something"}, "server_error"),
        ({"choices": [{"error": {"code": 400}}]}, "bad_request"),
        (completion(content="half an ans", finish="error"), "server_error"),
    ],
)
def test_kinds(body: Any, expected: str) -> None:
    assert kind(body) == expected
    assert (classify(body, TOOLS).action is not None) == (expected == "ok")


def test_an_action_in_full() -> None:
    body = completion(
        ("write_body", {"body": "return 1"}),
        ("read", {}),
        content="<think>easy</think>\nI write it.",
    )
    action = classify(body, TOOLS).action
    assert action is not None
    assert (action.text, action.reasoning, action.error) == ("I write it.", "easy", None)
    assert action.tool_calls == (
        ToolCall("call_0", "write_body", {"body": "return 1"}),
        ToolCall("call_1", "read", {}),
    )


def test_names_are_not_checked_without_tools() -> None:
    assert classify(completion(("rm", {}))).kind is ReplyKind.OK


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b'{"choices": [', "truncated"),
        (b"<html>busy</html>", "truncated"),
        (b"\xff\xfe\xfa", "truncated"),
        (b"[" * 100_000 + b"]" * 100_000, "wrong_schema"),
        (b"1" * 10_000, "wrong_schema"),
        (b"{}", None),
    ],
)
def test_bodies(body: bytes, expected: str | None) -> None:
    assert decode(body)[0] == expected


@pytest.mark.parametrize(
    ("status", "expected", "free"),
    [
        (429, "rate_limited", True),
        (401, "unauthorized", True),
        (402, "payment_required", True),
        (400, "bad_request", True),
        (302, "bad_request", True),
        (408, "timeout", False),
        (500, "server_error", True),
        (504, "server_error", False),
    ],
)
def test_statuses(status: int, expected: str, free: bool) -> None:
    assert status_kind(status) == expected
    assert is_free(status) is free


# -- prices -----------------------------------------------------------------------------------------------

PRICE = PriceConfig(input=3.0, cached_input=0.3, output=15.0)
BOUND = TokenBound(prompt=2000, completion=1000)
BOUND_COST = 21_000_000  # 2000 * 3 + 1000 * 15 = 21000 per million USD: 0.021 USD


def test_bound_and_rounding() -> None:
    assert upper_bound(BOUND, PRICE) == BOUND_COST
    assert upper_bound(BOUND, None) == 0
    assert to_nano(0.1) == 100_000_000
    assert to_nano(1e-12) == 1  # up


@pytest.mark.parametrize(
    ("usage", "nano", "source"),
    [
        ({"prompt_tokens": 1000, "completion_tokens": 100}, 4_500_000, "table"),
        (
            # 400 * 3 + 600 * 0.3 + 100 * 15 = 2880
            {
                "prompt_tokens": 1000,
                "completion_tokens": 100,
                "prompt_tokens_details": {"cached_tokens": 600},
            },
            2_880_000,
            "table",
        ),
        (
            # more in the cache than there was: not believed
            {
                "prompt_tokens": 1000,
                "completion_tokens": 100,
                "prompt_tokens_details": {"cached_tokens": 1600},
            },
            4_500_000,
            "table",
        ),
        ({"prompt_tokens": 5, "completion_tokens": 5, "cost": 0.0123}, 12_300_000, "provider"),
        ({"cost": 0}, 0, "provider"),
        (
            {"cost": 0.001, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.02}},
            21_000_000,
            "provider",
        ),
        ({"cost": 0.001, "is_byok": True}, BOUND_COST, "bound"),
        ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": -1.0}, 4_500_000, "table"),
        ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": "0.1 USD"}, 4_500_000, "table"),
        ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": float("nan")}, 4_500_000, "table"),
        ({"prompt_tokens": -1000, "completion_tokens": 100}, 7_500_000, "bound"),  # 6000 + 1500
        ({"prompt_tokens": "many", "completion_tokens": None}, BOUND_COST, "bound"),
        ({"prompt_tokens": True, "completion_tokens": 1e30}, BOUND_COST, "bound"),
        ({"prompt_tokens": 1000.0, "completion_tokens": 100}, 4_500_000, "table"),
        ([{"prompt_tokens": 1}], BOUND_COST, "bound"),
        (None, BOUND_COST, "bound"),
    ],
)
def test_costs(usage: Any, nano: int, source: str) -> None:
    cost = cost_of({"usage": usage}, BOUND, PRICE)
    assert (cost.nano_usd, cost.source) == (nano, source)


# -- fuzz -------------------------------------------------------------------------------------------------

_KEYS = st.sampled_from(
    [
        "choices", "message", "content", "tool_calls", "function", "name", "arguments", "finish_reason",
        "error", "code", "usage", "refusal", "type", "text", "prompt_tokens", "completion_tokens", "cost",
        "prompt_tokens_details", "cached_tokens", "is_byok", "cost_details", "reasoning",
    ]
)  # fmt: skip
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["read", "write_body", "{}", '{"body": 1}', "length", "stop", "text", "<tool_call>"])
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.text(), inner, max_size=5)
)


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    """From noise to a completion with one odd place; sometimes cut."""
    odd = draw(_VALUES)
    function = draw(st.sampled_from([odd, {"name": "write_body", "arguments": odd}, {"name": odd}]))
    calls = draw(st.sampled_from([odd, None, [{"id": odd, "function": function}]]))
    message = draw(st.sampled_from([odd, {"content": odd, "tool_calls": calls, "refusal": None}]))
    choice = draw(st.sampled_from([odd, {"message": message, "finish_reason": odd}, {"message": message}]))
    body = draw(st.sampled_from([odd, {"choices": [choice], "usage": odd}, {"choices": odd, "error": odd}]))
    text = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return draw(st.binary(max_size=20)) if draw(st.integers(0, 19)) == 0 else text


def _check(body: bytes) -> None:
    fault, value = decode(body)
    assert fault in (None, ReplyKind.EMPTY, ReplyKind.TRUNCATED, ReplyKind.WRONG_SCHEMA)
    reading = classify(value, TOOLS)
    assert isinstance(reading.kind, ReplyKind)
    assert (reading.action is not None) == (reading.kind is ReplyKind.OK)
    if reading.action is not None:
        assert reading.action.error is None
        assert reading.action.text or reading.action.tool_calls
        for call in reading.action.tool_calls:
            assert call.name in ("read", "write_body")
            json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
    cost = cost_of(value, BOUND, PRICE)
    assert cost.nano_usd >= 0
    assert isinstance(cost.source, CostSource)


@given(_bodies())
@settings(max_examples=150, deadline=None)
def test_any_reply_is_classified(body: bytes) -> None:
    _check(body)


@pytest.mark.slow
@given(_bodies())
@settings(max_examples=10_000, deadline=None)
def test_ten_thousand_replies_are_classified(body: bytes) -> None:
    _check(body)
