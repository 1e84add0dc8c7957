"""Which task of the grammar is a conversation about? Found from the module's text, without running it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_composer.envs.grading import Case
from forge_composer.envs.micro_grammar import DIFFICULTIES, SPLITS, Difficulty, Split, space
from forge_composer.envs.micro_tasks import (
    EXAMPLES,
    FUNCTION_NAMES,
    NAMINGS,
    PARAMETER_NAMES,
    MicroTask,
    make_task,
    name_function,
    task_with_cases,
)

_HEAD = re.compile(r'def (\w+)\(([^()\n]*)\):\n[ \t]+"""(.*)((?:\n.*){0,6})')
"""Function, parameters and sentence of a module of the grammar, and the lines after it."""
_EXAMPLE = re.compile(r">>> (.*)\n[ \t]+(.*)")
_LARGEST, _LONGEST = 1000, 50

_Place = tuple[Difficulty, Split, int]


def find_task(messages: Sequence[Mapping[str, Any]]) -> MicroTask | None:
    """The first task whose module is in a conversation's messages, or None."""
    for message in messages:
        if (task := task_of_source(text_of(message))) is not None:
            return task
    return None


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def task_of_source(text: str) -> MicroTask | None:
    """The first task whose module is in a text, whatever body it has; None if there is none.

    Its tests are the two examples of the docstring: to find the others takes a thousand times as long.
    """
    for found in _HEAD.finditer(text):
        function, parameters, sentence, rest = found.groups()
        names = tuple(name.strip() for name in parameters.split(","))
        if function not in FUNCTION_NAMES or names not in _parameter_rows():
            continue
        row = _parameter_rows()[names]
        place = _places(row).get((names, sentence.strip()))
        if place is not None:
            naming = row * len(FUNCTION_NAMES) + FUNCTION_NAMES.index(function)
            return _task(place, naming, _examples(function, rest))
    return None


def _examples(function: str, docstring: str) -> tuple[Case, ...]:
    """The calls and values that a docstring shows; empty if one of them is not of the grammar's size."""
    cases = []
    for call, value in _EXAMPLE.findall(docstring):
        try:
            tree = ast.parse(call, mode="eval").body
            expected = ast.literal_eval(value)
            if not isinstance(tree, ast.Call) or ast.unparse(tree.func) != function:
                return ()
            arguments = tuple(ast.literal_eval(argument) for argument in tree.args)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ()
        if not all(_is_small(argument) for argument in arguments):
            return ()
        cases.append(Case(arguments, expected))
    return tuple(cases)


def _is_small(value: Any) -> bool:
    """True for what the grammar's own examples hold: bodies of the grammar run on it."""
    if isinstance(value, list):
        return len(value) <= _LONGEST and all(type(item) is int and _is_small(item) for item in value)
    if isinstance(value, str):
        return len(value) <= _LONGEST
    return type(value) is int and abs(value) <= _LARGEST


@functools.cache
def _parameter_rows() -> dict[tuple[str, ...], int]:
    """Parameter names -> their row in the naming tables; no two signatures share names."""
    return {names: row for rows in PARAMETER_NAMES.values() for row, names in enumerate(rows)}


@functools.cache
def _places(row: int) -> dict[tuple[tuple[str, ...], str], _Place]:
    """Every function of the grammar by parameters and sentence, under the names of one row; half a second."""
    found: dict[tuple[tuple[str, ...], str], _Place] = {}
    for difficulty, split, number in _all_places():
        named = name_function(space(difficulty).of(split)[number], row * len(FUNCTION_NAMES))
        found.setdefault((named.parameters, named.sentence), (difficulty, split, number))
    return found


def _all_places() -> Iterator[_Place]:
    for difficulty in DIFFICULTIES:
        for split in SPLITS:
            for number in range(len(space(difficulty).of(split))):
                yield difficulty, split, number


def _task(place: _Place, naming: int, examples: tuple[Case, ...]) -> MicroTask:
    """The task at the index that gives the function of a place its names."""
    difficulty, split, number = place
    specs = space(difficulty).of(split)
    index = number + (naming - specs[number].digest[-2]) % NAMINGS * len(specs)
    if len(examples) != EXAMPLES:
        return make_task(difficulty, split, index)
    return task_with_cases(difficulty, split, index, visible=examples, hidden=())


def warm() -> None:
    """Make the tables now, a second or two, instead of in the middle of the first answers."""
    for row in range(max(len(rows) for rows in PARAMETER_NAMES.values())):
        _places(row)
