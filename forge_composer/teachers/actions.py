"""When two actions are the same: a canonical form, equal for actions that differ in spelling only.

- Tool calls: the names and the arguments, as JSON with sorted keys; 1, 1.0 and 1e0 are one number. A string
  that is Python code counts by its syntax tree, so that quotes, spacing, redundant parentheses and comments
  do not matter; any other string counts without whitespace at line ends and around it.
- Text: by a configurable equivalence.
- A turn whose calls do not parse is equal to nothing, not even to itself said twice: two models that both
  write broken JSON do not agree on an action.
"""

from __future__ import annotations

import ast
import json
import math
import re
import textwrap
import warnings
from typing import Any, Literal

from forge_composer.types import ParsedAction, ToolCall

TextEquivalence = Literal["exact", "whitespace", "words", "any"]
"""`exact`: character by character. `whitespace`: runs of whitespace are one space. `words`: letters and
digits, in any case. `any`: all turns without a tool call are one action."""

_MOST_CODE = 20_000
"""Longest string, in characters, that is tried as code: parsing is quadratic in nesting."""


def canonical_action(action: ParsedAction, *, text: TextEquivalence = "words") -> str | None:
    """The canonical form of an action, or None for one that did not parse.

    With tool calls the text beside them does not count: it is talk, the calls are the action.
    """
    if action.error is not None:
        return None
    if action.tool_calls:
        return json.dumps([_call(call) for call in action.tool_calls], sort_keys=True)
    return "text:" + _text(action.text, text)


def _call(call: ToolCall) -> list[Any]:
    return [call.name.strip(), _value(call.arguments)]


def _value(value: Any) -> Any:
    """A JSON value with tags where two spellings of one thing could meet two things of one spelling."""
    match value:
        case bool() | None:
            return value
        case int() | float():
            return _number(value)
        case str():
            return _string(value)
        case dict():
            return {str(key): _value(item) for key, item in value.items()}
        case list() | tuple():
            return [_value(item) for item in value]
    return ["other", repr(value)]


def _number(value: float) -> Any:
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value if isinstance(value, int) or math.isfinite(value) else ["number", str(value)]


def _string(value: str) -> list[str]:
    tree = _syntax_tree(value)
    if tree is not None:
        return ["code", tree]
    lines = (line.rstrip() for line in value.strip().splitlines())
    return ["string", "\n".join(lines)]


def _syntax_tree(source: str) -> str | None:
    """The syntax tree of Python code, None for what is not code; a lone name or constant is no code."""
    if len(source) > _MOST_CODE:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in somebody's string
            tree = ast.parse(textwrap.dedent(source).strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not tree.body:
        return None
    only = tree.body[0]
    plain = isinstance(only, ast.Expr) and isinstance(only.value, ast.Name | ast.Constant)
    if len(tree.body) == 1 and plain:
        return None
    return ast.dump(tree)


def _text(text: str, equivalence: TextEquivalence) -> str:
    match equivalence:
        case "exact":
            return text
        case "whitespace":
            return " ".join(text.split())
        case "words":
            return " ".join(re.findall(r"\w+", text.casefold()))
        case "any":
            return ""
