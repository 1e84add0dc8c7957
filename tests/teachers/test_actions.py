"""Actions that differ in spelling only are one action; those that do something else are not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.teachers.actions import canonical_action
from forge_composer.types import ParsedAction, ToolCall


def write(body: str) -> str | None:
    return call("write_body", {"body": body})


def call(name: str, arguments: dict[str, Any]) -> str | None:
    return canonical_action(ParsedAction("", (ToolCall("call_0", name, arguments),)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("return x+1", "return x + 1"),
        ("return x + 1", "  return (x + 1)\n"),
        ("return 'a'", 'return "a"'),
        ("if x:\n    return 1\nreturn 2", "if x:\n  return 1\n\nreturn 2  # done"),
        ("return 0x10", "return 16"),
        ("return 1e3", "return 1000.0"),
        ("words that are no code ", "words that are no code"),
        ("two lines, \nno code", "two lines,\nno code"),
    ],
)
def test_spelling_does_not_split(one: str, other: str) -> None:
    assert write(one) == write(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("return x + 1", "return 1 + x"),
        ("return x // 2", "return x // 2.0"),
        ("return 'a'", "return a"),
        ("return x", "return y"),
        ("a  b", "a b"),
        ("if x:\n    return 1\nreturn 2", "if x:\n    return 1\n    return 2"),
    ],
)
def test_meaning_splits(one: str, other: str) -> None:
    assert write(one) != write(other)


def test_arguments() -> None:
    assert call("f", {"a": 1, "b": [1.0, {"c": None}]}) == call("f", {"b": [1, {"c": None}], "a": 1.0})
    assert call("f", {"a": 1}) != call("f", {"a": "1"})
    assert call("f", {"a": 1}) != call("f", {"a": True})
    assert call("f", {"a": 1}) != call("g", {"a": 1})
    assert call("f", {"a": float("nan")}) == call("f", {"a": float("nan")})
    assert call("f", {"a": "x"}) != call("f", {"a": ["string", "x"]})
    first, second = (ToolCall("0", "f", {}), ToolCall("1", "g", {}))
    assert canonical_action(ParsedAction("", (first, second))) != canonical_action(
        ParsedAction("", (second, first))
    )


def test_talk_beside_a_call_does_not_count() -> None:
    submit = (ToolCall("call_0", "submit", {}),)
    assert canonical_action(ParsedAction("I am done.", submit)) == canonical_action(ParsedAction("", submit))


def test_what_does_not_parse_agrees_with_nothing() -> None:
    assert canonical_action(ParsedAction("{", error="not JSON")) is None


@pytest.mark.parametrize(
    ("equivalence", "same", "different"),
    [
        ("exact", "It is 4.", "It is  4."),
        ("whitespace", "It  is\n4.", "it is 4."),
        ("words", "it is, 4!", "It is 5."),
        ("any", "something else", None),
    ],
)
def test_text(equivalence: Any, same: str, different: str | None) -> None:
    key = canonical_action(ParsedAction("It is 4."), text=equivalence)
    assert canonical_action(ParsedAction(same), text=equivalence) == key
    if different is not None:
        assert canonical_action(ParsedAction(different), text=equivalence) != key
    assert canonical_action(ParsedAction("", (ToolCall("0", "f", {}),)), text=equivalence) != key


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.randoms(use_true_random=False))
def test_order_of_arguments_never_matters(arguments: dict[str, Any], draw: random.Random) -> None:
    items = list(arguments.items())
    draw.shuffle(items)
    assert call("f", arguments) == call("f", dict(items))
    assert isinstance(call("f", arguments), str)


def test_hostile_code_is_a_string() -> None:
    """Nesting that would exhaust the parser."""
    assert write("(" * 50_000) == write("(" * 50_000 + " ")
    assert write("-" * 15_000 + "1") is not None
