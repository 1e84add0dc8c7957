"""Micro tasks: tiny modules whose one function body is deleted, drawn from the grammar.

A task is a pure function of (difficulty, split, index, number of hidden tests). The splits hold different
*functions*: a function that does the same under another name is in the same split.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forge_composer.envs import prompts
from forge_composer.envs.grading import CallResult, Case, failures, report
from forge_composer.envs.micro_grammar import SIGNATURES, Difficulty, Spec, Split, siblings, space

VISIBLE_TESTS = 3
"""Tests that `run_tests` runs; the first two are the docstring's examples."""
EXAMPLES = 2

FUNCTION_NAMES = ("calc", "make", "work", "form", "turn", "solve", "apply", "build")
PARAMETER_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "i": (("a",), ("x",), ("p",), ("m",)),
    "ii": (("a", "b"), ("x", "y"), ("p", "q"), ("m", "n")),
    "l": (("xs",), ("ys",), ("nums",), ("data",)),
    "li": (("xs", "n"), ("ys", "m"), ("nums", "k"), ("data", "c")),
    "s": (("s",), ("t",), ("text",), ("word",)),
    "ss": (("s", "t"), ("t", "u"), ("text", "more"), ("word", "other")),
    "si": (("s", "n"), ("t", "m"), ("text", "k"), ("word", "c")),
}
NAMINGS = len(FUNCTION_NAMES) * 4
"""Different names under which one function occurs."""
_POOL = 48

Arguments = tuple[Any, ...]


@dataclass(slots=True, frozen=True)
class MicroTask:
    """One task. Bodies are text without the function's indentation and without a trailing newline."""

    task_id: str
    difficulty: Difficulty
    split: Split
    index: int
    function: str
    parameters: tuple[str, ...]
    sentence: str
    reference_body: str
    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]
    spec: Spec

    @property
    def signature(self) -> str:
        """`calc(a, b)`."""
        return f"{self.function}({', '.join(self.parameters)})"

    @property
    def module_source(self) -> str:
        """The module as the policy first sees it, its body deleted."""
        return self.module_with(prompts.DELETED_BODY)

    def module_with(self, body: str) -> str:
        """The module with a body; any common indentation of `body` is replaced by the function's."""
        examples = "\n".join(
            f">>> {prompts.call_text(self.function, case.arguments)}\n{case.expected!r}"
            for case in self.visible[:EXAMPLES]
        )
        docstring = f'"""{self.sentence}\n\n{examples}\n"""'
        inner = f"{docstring}\n{textwrap.dedent(body).strip(chr(10))}"
        return f"def {self.signature}:\n{textwrap.indent(inner, '    ')}"

    def plausible_wrong_bodies(self, rng: random.Random, count: int = 4) -> list[str]:
        """Bodies of similar functions, each failing at least one visible test; fewer than `count` at worst.

        Half of the choice falls on the same sentence with other constants or operands, where there are any.
        """
        near: list[str] = []
        far: list[str] = []
        for other in siblings(self.spec, self.difficulty):
            (near if other.template is self.spec.template else far).append(self._named(other.body))
        rng.shuffle(near)
        rng.shuffle(far)
        wrong: list[str] = []
        while (near or far) and len(wrong) < count:
            source = near if near and (not far or rng.random() < 0.5) else far
            body = source.pop()
            if body not in wrong and trusted_report(self, body) != prompts.ALL_PASSED:
                wrong.append(body)
        return wrong

    def _named(self, text: str) -> str:
        return _rename(text, SIGNATURES[self.spec.template.signature], self.parameters)


def task_count(difficulty: Difficulty, split: Split) -> int:
    """Number of tasks of a split with different text."""
    return function_count(difficulty, split) * NAMINGS


def function_count(difficulty: Difficulty, split: Split) -> int:
    """Number of different functions of a split; later indices repeat them under other names."""
    return len(space(difficulty).of(split))


@functools.lru_cache(maxsize=8192)
def make_task(difficulty: Difficulty, split: Split, index: int, hidden_tests: int = 6) -> MicroTask:
    """The task at an index of a split.

    Raises:
        IndexError: the index is not in 0 .. task_count(difficulty, split) - 1.
        ValueError: `hidden_tests` is below 1.
    """
    if not 0 <= index < task_count(difficulty, split):
        last = task_count(difficulty, split) - 1
        raise IndexError(f"micro task index {index}: {difficulty}/{split} has tasks 0 to {last}")
    if hidden_tests < 1:
        raise ValueError(f"hidden_tests = {hidden_tests}: at least 1 is needed to grade a task")
    seed = hashlib.blake2b(f"{difficulty}/{split}/{index}".encode(), digest_size=8).digest()
    rng = random.Random(int.from_bytes(seed, "big"))
    specs = space(difficulty).of(split)
    visible, hidden = _choose_cases(specs[index % len(specs)], difficulty, rng, hidden_tests)
    return task_with_cases(difficulty, split, index, tuple(visible), tuple(hidden))


def task_with_cases(
    difficulty: Difficulty, split: Split, index: int, visible: tuple[Case, ...], hidden: tuple[Case, ...]
) -> MicroTask:
    """The task at an index with the given tests: choosing tests is what takes time in `make_task`."""
    specs = space(difficulty).of(split)
    spec = specs[index % len(specs)]
    named = name_function(spec, spec.digest[-2] + index // len(specs))
    return MicroTask(
        task_id=f"micro-{difficulty}-{split}-{index:05d}",
        difficulty=difficulty,
        split=split,
        index=index,
        function=named.function,
        parameters=named.parameters,
        sentence=named.sentence,
        reference_body=named.body,
        visible=visible,
        hidden=hidden,
        spec=spec,
    )


@dataclass(slots=True, frozen=True)
class NamedFunction:
    """A function of the grammar under particular names."""

    function: str
    parameters: tuple[str, ...]
    sentence: str
    body: str


def name_function(spec: Spec, naming: int) -> NamedFunction:
    """The function under the `naming`-th of its names (modulo `NAMINGS`)."""
    naming %= NAMINGS
    canonical = SIGNATURES[spec.template.signature]
    parameters = PARAMETER_NAMES[spec.template.signature][naming // len(FUNCTION_NAMES)]
    return NamedFunction(
        function=FUNCTION_NAMES[naming % len(FUNCTION_NAMES)],
        parameters=parameters,
        sentence=_rename(spec.sentence, canonical, parameters),
        body=_rename(spec.body, canonical, parameters),
    )


def trusted_results(task: MicroTask, body: str, cases: Sequence[Case]) -> list[CallResult]:
    """Run a body *of the grammar* in this process. Never for model-written text: that is the sandbox's."""
    function = _compile(task.parameters, body)
    values = [_value(function, case.arguments) for case in cases]
    return [value if isinstance(value, CallResult) else CallResult("value", value) for value in values]


def trusted_report(task: MicroTask, body: str) -> str:
    """What `run_tests` answers for a body *of the grammar*, computed in this process."""
    return report(failures(task.function, task.visible, trusted_results(task, body, task.visible)))


def _rename(text: str, old: Iterable[str], new: Iterable[str]) -> str:
    """Replace parameter names, but not inside the one-letter string constants."""
    names = dict(zip(old, new, strict=True))
    pattern = rf'(?<!")\b({"|".join(names)})\b(?!")'
    return re.sub(pattern, lambda match: names[match[1]], text)


def _choose_cases(
    spec: Spec, difficulty: Difficulty, rng: random.Random, hidden_tests: int
) -> tuple[list[Case], list[Case]]:
    """Visible and hidden tests, all with different arguments, that tell the function from its siblings."""
    parameters = SIGNATURES[spec.template.signature]
    reference = _compile(parameters, spec.body)
    mutants = [_compile(parameters, other.body) for other in siblings(spec, difficulty)]
    visible_pool = _pool(spec, rng, VISIBLE_TESTS, short=True, without=[])
    visible = _choose(VISIBLE_TESTS, visible_pool, reference, mutants)
    taken = [case.arguments for case in visible]
    hidden_pool = _pool(spec, rng, hidden_tests, short=False, without=taken)
    return visible, _choose(hidden_tests, hidden_pool, reference, mutants)


def _pool(
    spec: Spec, rng: random.Random, count: int, *, short: bool, without: list[Arguments]
) -> list[Arguments]:
    """Different argument tuples to choose `count` from."""
    pool: list[Arguments] = []
    for _ in range(4 * (_POOL + count)):  # spaces of short arguments repeat themselves
        if len(pool) == _POOL + count:
            break
        arguments = _arguments(spec, rng, short=short)
        if arguments not in pool and arguments not in without:
            pool.append(arguments)
    return pool


def _choose(
    count: int, pool: list[Arguments], reference: Callable[..., Any], mutants: list[Callable[..., Any]]
) -> list[Case]:
    """Greedy cover: each test in turn is the one on which most of the mutants left deviate."""
    expected = [reference(*arguments) for arguments in pool]
    left = [_deviations(mutant, pool, expected) for mutant in mutants]
    free = list(range(len(pool)))
    chosen: list[Case] = []
    for _ in range(min(count, len(pool))):  # functions of one integer have few short inputs
        votes = Counter(position for deviating in left for position in deviating)
        best = max(free, key=lambda position: votes[position])
        free.remove(best)
        left = [deviating for deviating in left if best not in deviating]
        chosen.append(Case(pool[best], expected[best]))
    return chosen


def _deviations(mutant: Callable[..., Any], pool: list[Arguments], expected: list[Any]) -> set[int]:
    """Positions in the pool where the mutant does not return what is expected."""
    return {
        position for position, arguments in enumerate(pool) if _value(mutant, arguments) != expected[position]
    }


def _arguments(spec: Spec, rng: random.Random, *, short: bool) -> Arguments:
    """Random arguments near the function's constants, where functions differ. Never empty sequences."""
    constants = [int(constant) for constant in spec.constants if constant.isdigit()] or [3]
    letters = [constant[1] for constant in spec.constants if not constant.isdigit()] + ["a", "x"]
    small = rng.random() < 0.3  # sums and differences then fall between neighbouring constants

    def integer() -> int:
        if small:
            return rng.randint(-2, 4)
        if rng.random() < 0.4:
            return rng.choice(constants) * rng.randint(1, 3) + rng.choice((-1, 0, 0, 1))
        return rng.randint(-5, 15)

    def text() -> str:
        length = rng.randint(2, 5) if short else rng.randint(2, 8)
        return "".join(
            rng.choice(letters) if rng.random() < 0.4 else rng.choice("abcdefghmnx") for _ in range(length)
        )

    kind = spec.template.signature
    if kind[0] == "i":
        return tuple(integer() for _ in kind)
    if kind[0] == "l":
        length = rng.randint(3, 4) if short else rng.randint(2, 4) if small else rng.randint(3, 8)
        items = [integer() for _ in range(length)]
        return (items,) if kind == "l" else (items, rng.randint(2, 9))
    return (text(),) if kind == "s" else (text(), text() if kind == "ss" else rng.randint(1, 4))


@functools.lru_cache(maxsize=16384)
def _compile(parameters: tuple[str, ...], body: str) -> Callable[..., Any]:
    source = f"def function({', '.join(parameters)}):\n{textwrap.indent(body, '    ')}\n"
    scope: dict[str, Any] = {}
    exec(source, scope)  # the grammar's own text
    function: Callable[..., Any] = scope["function"]
    return function


def _value(function: Callable[..., Any], arguments: Arguments) -> Any:
    """The value returned, or a CallResult that tells the exception. The grammar's functions do not mutate."""
    try:
        return function(*arguments)
    except Exception as error:
        return CallResult("raised", error=f"{type(error).__name__}: {error}")
