"""Text of models and environments, made safe to look at."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Literal

Decode = Callable[[Sequence[int]], str]

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of control, format and surrogate characters, and of separators of lines."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
WINDOW = 8
"""Tokens before one that its text may depend on: a character's bytes, a space that a first token loses."""


def visible(text: str) -> str:
    """The text with every character that a terminal obeys, or that hides or reorders others, spelled out.

    Newlines and tabs stay.
    """
    return "".join(
        _spelled(char) if char not in "\n\t" and unicodedata.category(char) in _HIDDEN else char
        for char in text
    )


def marked(text: str) -> str:
    """A token's text on one line, with its spaces and newlines to be seen; for tables."""
    return visible(text).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")


def clipped(text: str, lines: int, *, keep: Literal["first", "last"] = "first") -> str:
    """At most so many lines, the `first` or the `last` ones, and how many are left out."""
    all_lines = text.splitlines()
    left_out = len(all_lines) - lines
    if left_out <= 0:
        return text
    remark = f"… {left_out} more line{'s' if left_out > 1 else ''}"
    kept = [*all_lines[:lines], remark] if keep == "first" else [remark, *all_lines[-lines:]]
    return "\n".join(kept)


def token_text(decode: Decode, before: Sequence[int], token_id: int) -> str:
    """What a token adds to the text of those before it. A character of several tokens belongs to the last of
    them; the others are U+FFFD."""
    window = list(before[-WINDOW:])
    said = decode(window).rstrip(_UNFINISHED)
    longer = decode([*window, token_id])
    return longer[len(said) :] if longer.startswith(said) else decode([token_id])


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
