"""Length, repetition, and what a hint mentions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.hints.filters import already_said, clip, leaks, mentions
from tests.traces.rollout_fixtures import make_rollout

JSON = st.recursive(
    st.integers(-999, 999) | st.text("abcxyz", min_size=1, max_size=6),
    lambda items: st.lists(items, min_size=1, max_size=4),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("hint", "limit", "clipped"),
    [
        ("  short \n", 10, "short"),
        ("exactly", 7, "exactly"),
        ("one line that is long", 8, "one line"),
        ("first\nsecond\nthird", 12, "first\nsecond"),
        ("first\nsecond\nthird", 11, "first"),
        ("first line\nsecond", 5, "first"),
        ("", 5, ""),
    ],
)
def test_clip(hint: str, limit: int, clipped: str) -> None:
    assert clip(hint, limit) == clipped


@given(st.text(), st.integers(1, 50))
def test_clipped_hint_is_a_beginning_within_the_limit(hint: str, limit: int) -> None:
    clipped = clip(hint, limit)
    assert len(clipped) <= limit
    assert hint.strip().startswith(clipped)


def test_already_said_looks_at_the_turns_own_context_only() -> None:
    rollout = make_rollout(script=["a", "b"])
    said = "add(2, 3): expected 5, got -1"
    assert [already_said(said, rollout, turn) for turn in (0, 1)] == [False, True]
    assert already_said("Fix add.", rollout, 0)


@pytest.mark.parametrize(
    ("text", "value", "mentioned"),
    [
        ("f(3): expected 7", 7, True),
        ("f(37)", 7, False),
        ("f(37)", 3, False),
        ("x3 = 1", 3, False),
        ("3.5", 3, False),
        ("the end is 3.", 3, True),
        ("return a-3", 3, True),
        ("f(-3)", -3, True),
        ("f(3)", -3, False),
        ("f('ab')", "ab", True),
        ('{"t": "ab"}', "ab", True),
        ("say ab", "ab", False),
        ("returns fbd here", "fbd", True),
        ("returns fbdx", "fbd", False),
        ("got [1, 2]", [1, 2], True),
        ("got [1,2]", [1, 2], True),
        ("got [1, 2, 3]", [1, 2], False),
        ('got ["a"]', ["a"], True),
    ],
)
def test_mentions(text: str, value: object, mentioned: bool) -> None:
    assert mentions(text, value) is mentioned


def test_leaks_by_hand() -> None:
    hidden = [[4, 9], "fbedg", 12, True, None, "", []]
    assert leaks("expected 'fbedg', got 12; 4", ["calc(4): 12"], hidden) == ["fbedg"]
    assert leaks("[4, 9] and 9", ["9 or 4"], hidden) == [[4, 9]]
    assert leaks("True None '' [] 9", [], hidden) == [9]
    assert leaks("Hint: be brief.", [], hidden) == []


@given(JSON)
def test_value_told_in_any_spelling_leaks_unless_it_was_shown(value: object) -> None:
    for told in (f"f(x): expected {value!r}, got no", f"expected {json.dumps(value)}."):
        assert value in leaks(told, ["def f(x):"], [value])
        assert leaks(told, [told], [value]) == []
