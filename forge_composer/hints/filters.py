"""What a hint must not be: too long, a repetition, or more than the policy may know.

That no hidden test leaks holds by construction. The environment's server keeps the tests; templates and
feedback repeat what stands in the rollout's observations; a demonstration is what a sibling wrote; a judge
reads the rollout alone. `leaks` checks it where the hidden tests are at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from forge_composer.types import Rollout

_SHORT_WORD = 3
"""Shorter strings count only in quotes: `a` is a word of any text."""


def clip(hint: str, limit: int) -> str:
    """At most `limit` characters; cut at the end of a line where the first line fits."""
    hint = hint.strip()
    if len(hint) <= limit:
        return hint
    whole_lines, newline, _ = hint[: limit + 1].rpartition("\n")
    return whole_lines.rstrip() if newline else hint[:limit].rstrip()


def already_said(text: str, rollout: Rollout, turn: int) -> bool:
    """Whether a text stands in what a turn's context holds anyway: then it is no news to the teacher."""
    return any(text in said for said in context_texts(rollout, turn))


def context_texts(rollout: Rollout, turn: int) -> Iterator[str]:
    """The environment's texts that a turn's context holds."""
    for message in rollout.messages:
        yield message["content"]
    for earlier in rollout.turns[:turn]:
        yield from earlier.observations


def leaks(hint: str, shown: Iterable[str], hidden: Iterable[Any]) -> list[Any]:
    """The hidden values that a hint mentions and no shown text does.

    Args:
        hint: the hint.
        shown: texts that the policy was given or wrote itself.
        hidden: arguments and expected values of hidden tests, JSON values; the items of a list count as
            well as the list. True, False, None and empty values tell nothing and are left out.
    """
    texts = list(shown)
    values = [item for value in hidden for item in _parts(value)]
    return [value for value in values if mentions(hint, value) and not any(mentions(t, value) for t in texts)]


def mentions(text: str, value: Any) -> bool:
    """Whether a text holds a value as a literal; strings also without quotes, as whole words."""
    if isinstance(value, dict | list):
        return _squeezed(repr(value)) in _squeezed(text)
    if isinstance(value, str):
        inner = re.escape(value)
        bare = rf"|(?<!\w){inner}(?!\w)" if len(value) >= _SHORT_WORD else ""
        return re.search(rf"'{inner}'|\"{inner}\"{bare}", text) is not None
    return re.search(rf"(?<![\w.]){re.escape(repr(value))}(?!\w|\.\d)", text) is not None


def _parts(value: Any) -> Iterator[Any]:
    """The value and, of a list or an object, what it holds."""
    if value is None or isinstance(value, bool) or value in ("", [], {}):
        return
    yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parts(item)


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text).replace('"', "'")
