"""Tool calls read from text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.rendering.tool_calls import parse_action, to_message
from forge_composer.types import ParsedAction, ToolCall

GOOD = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'


def written(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def test_reasoning_text_and_several_calls() -> None:
    text = f'<think>\nlook\n</think>\n\nFirst.\n{GOOD}\n<tool_call>{{"name": "submit"}}</tool_call>'
    assert parse_action(text, id_prefix="call_3") == ParsedAction(
        text="First.",
        tool_calls=(ToolCall("call_3_0", "read", {"path": "a.py"}), ToolCall("call_3_1", "submit", {})),
        reasoning="look",
    )


def test_plain_text_is_no_error() -> None:
    assert parse_action("  I am done. ") == ParsedAction(text="I am done.")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ('<tool_call>\n{"name": "read", }\n</tool_call>', "not valid JSON"),
        ("<tool_call>\n\n</tool_call>", "not valid JSON (Expecting value at character 0)"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', '"name" is missing or not a string'),
        ('<tool_call>\n{"name": 3}\n</tool_call>', '"name" is missing or not a string'),
        ('<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>', '"name" is missing or not a string'),
        (
            '<tool_call>\n{"name": "read", "arguments": "a.py"}\n</tool_call>',
            '"arguments" is not a JSON object',
        ),
        ('<tool_call>\n["read"]\n</tool_call>', "expected a JSON object"),
        ('<tool_call>\n{"name": "read", "arguments": {}}', "</tool_call> is missing"),
        ('<tool_call>\n{"name": "read"', "not valid JSON"),
        ('<tool_call>\n{"name": "read", "arguments": {"n": NaN}}\n</tool_call>', "NaN is not JSON"),
        ('<tool_call>\n{"name": "read", "arguments": {"n": 1e999}}\n</tool_call>', "1e999 is too large"),
        ('<tool_call>\n{"name": "r", "arguments": {"s": "\\ud800"}}\n</tool_call>', "surrogate"),
        (
            '<tool_call>\n{"name": "r", "arguments": {"n": ' + "9" * 5000 + "}}\n</tool_call>",
            "too many digits",
        ),
        ("<tool_call>\n" + "[" * 100_000, "nested more than 64 levels"),
        (
            '<tool_call>{"name": "r", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}</tool_call>",
            "nested more than 64 levels",
        ),
    ],
)
def test_errors_in_words_keep_the_calls_before(bad: str, error: str) -> None:
    action = parse_action(f"{GOOD}\n{bad}")
    assert action.error is not None
    assert action.error.startswith("tool call 2: ")
    assert error in action.error
    assert [call.name for call in action.tool_calls] == ["read"]
    assert action.text == bad.strip()


def test_unclosed_reasoning() -> None:
    action = parse_action(f"<think>\nI wonder {GOOD}")
    assert action.error == "the reasoning does not end: </think> is missing"
    assert action.tool_calls == ()
    assert action.reasoning.startswith("I wonder <tool_call>")


def test_reasoning_that_the_prompt_opened() -> None:
    action = parse_action(f"hm\n</think>\n\n{GOOD}")
    assert (action.reasoning, action.text, len(action.tool_calls)) == ("hm", "", 1)


def test_markup_inside_json_strings_is_text() -> None:
    call = ToolCall("call_0", "write", {"body": "</tool_call> </think> <tool_call>"})
    assert parse_action(written(call)) == ParsedAction(text="", tool_calls=(call,))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PROSE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30).map(str.strip)


@st.composite
def actions(draw: st.DrawFn) -> ParsedAction:
    arguments = draw(st.lists(st.tuples(NAMES, st.dictionaries(KEYS, JSON, max_size=3)), max_size=3))
    calls = tuple(ToolCall(f"call_{i}", name, given) for i, (name, given) in enumerate(arguments))
    return ParsedAction(text=draw(PROSE), tool_calls=calls, reasoning=draw(PROSE))


@given(actions())
def test_written_actions_read_back_equal(action: ParsedAction) -> None:
    thought = f"<think>\n{action.reasoning}\n</think>\n\n" if action.reasoning else ""
    text = thought + "\n".join([action.text, *map(written, action.tool_calls)])
    assert parse_action(text) == action


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "a", "arguments": {',
        "}",
        '"',
        "\\",
        "\n",
        GOOD,
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=10), max_size=12).map("".join))
def test_no_text_raises_and_nothing_is_invented(text: str) -> None:
    action = parse_action(text)
    for call in action.tool_calls:
        assert isinstance(call.arguments, dict)
        assert json.dumps(call.name)[1:-1] in text or call.name in text
    if "<tool_call>" not in text:
        assert action.tool_calls == ()
    if action.error is None and "<tool_call>" in text:
        assert action.tool_calls or "</think>" in text


def test_message_shape() -> None:
    message: Any = to_message(parse_action(f"<think>\nhm\n</think>\nText\n{GOOD}"))
    assert message == {
        "role": "assistant",
        "content": "Text",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "read", "arguments": {"path": "a.py"}}}
        ],
    }
    assert to_message(ParsedAction(text="x")) == {"role": "assistant", "content": "x"}
