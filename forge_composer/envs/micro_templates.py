"""The sentences of the micro tasks and the Python that does what they say, as tables of templates.

Parameters are written `a`, `b` (integers), `xs` (list of integers), `s`, `t` (strings), `n` (a small
integer next to a list or string); constants are `{j}` and `{k}`. No word of a sentence may be spelled like
a parameter (no article "a"), since parameters are renamed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

INTS = tuple(str(value) for value in range(2, 10))
FEW = ("1", "2", "3", "4")
SOME = ("2", "3", "4", "6")
LETTERS = tuple(f'"{letter}"' for letter in "abcdxyz_")


@dataclass(slots=True, frozen=True)
class Template:
    """One sentence and one body with holes. `slots` gives the values that each constant may take."""

    signature: str
    english: str
    code: str
    slots: tuple[tuple[str, ...], ...] = ()

    def fill(self, constants: tuple[str, ...]) -> tuple[str, str]:
        """The sentence and the body for these constants (the first is `{j}`, the second `{k}`)."""
        values = dict(zip("jk", constants, strict=False))
        return self.english.format(**values), self.code.format(**values)


# --- easy: one return line ---------------------------------------------------------------------------

_PLUS_MINUS = (("plus", "+"), ("minus", "-"))
_ARITHMETIC = (("plus", "+"), ("minus", "-"), ("times", "*"))
_AGGREGATES = (
    ("the sum of xs", "sum(xs)"),
    ("the largest item of xs", "max(xs)"),
    ("the smallest item of xs", "min(xs)"),
    ("the length of xs", "len(xs)"),
    ("the first item of xs", "xs[0]"),
    ("the last item of xs", "xs[-1]"),
)
_FILTERS = (
    ("greater than", "v > {}"),
    ("less than", "v < {}"),
    ("divisible by", "v % {} == 0"),
    ("not equal to", "v != {}"),
)
_SLICES = (
    ("the first {k} items of xs", "xs[:{k}]"),
    ("the last {k} items of xs", "xs[-{k}:]"),
    ("xs without the first {k} items", "xs[{k}:]"),
    ("xs without the last {k} items", "xs[:-{k}]"),
)
_STRING_PARTS = (
    ("s", "s", ()),
    ("the first {j} characters of s", "s[:{j}]", (FEW,)),
    ("the last {j} characters of s", "s[-{j}:]", (FEW,)),
    ("s without the first {j} characters", "s[{j}:]", (FEW,)),
    ("s without the last {j} characters", "s[:-{j}]", (FEW,)),
)


def _returns(signature: str, phrase: str, expression: str, *slots: tuple[str, ...]) -> Template:
    return Template(signature, f"Return {phrase}.", f"return {expression}", slots)


def _easy_integers() -> Iterator[Template]:
    for word, sign in _PLUS_MINUS:
        yield _returns("ii", f"a {word} b", f"a {sign} b")
        yield _returns("ii", f"a times {{j}} {word} b", f"a * {{j}} {sign} b", INTS)
        yield _returns("ii", f"a {word} b times {{j}}", f"a {sign} b * {{j}}", INTS)
        yield _returns("ii", f"a times {{j}} {word} b times {{k}}", f"a * {{j}} {sign} b * {{k}}", INTS, INTS)
        yield _returns("ii", f"a times b {word} {{j}}", f"a * b {sign} {{j}}", INTS)
        yield _returns("ii", f"the distance of a and b, {word} {{j}}", f"abs(a - b) {sign} {{j}}", INTS)
        yield _returns("i", f"a times {{j}} {word} {{k}}", f"a * {{j}} {sign} {{k}}", INTS, INTS)
        yield _returns("i", f"a times a {word} {{j}}", f"a * a {sign} {{j}}", INTS)
        yield _returns("i", f"a modulo {{j}}, {word} {{k}}", f"a % {{j}} {sign} {{k}}", INTS, INTS)
    yield _returns("ii", "b minus a", "b - a")
    yield _returns("ii", "b minus a times {j}", "b - a * {j}", INTS)
    yield _returns("ii", "b times {j} minus a", "b * {j} - a", INTS)
    for word, name in (("larger", "max"), ("smaller", "min")):
        yield _returns("ii", f"the {word} of a and b", f"{name}(a, b)")
        yield _returns("ii", f"the {word} of a and b times {{j}}", f"{name}(a, b * {{j}})", INTS)
        yield _returns("ii", f"the {word} of a times {{j}} and b", f"{name}(a * {{j}}, b)", INTS)
        for after, sign in _ARITHMETIC:
            yield _returns("ii", f"the {word} of a and b, {after} {{j}}", f"{name}(a, b) {sign} {{j}}", INTS)
    yield _returns("ii", "a plus b, modulo {j}", "(a + b) % {j}", INTS)
    yield _returns("ii", "a times b, modulo {j}", "(a * b) % {j}", INTS)


def _easy_list_to_integer() -> Iterator[Template]:
    for phrase, code in _AGGREGATES:
        yield _returns("l", phrase, code)
        for word, sign in _ARITHMETIC:
            yield _returns("l", f"{phrase} {word} {{j}}", f"{code} {sign} {{j}}", INTS)
        for word, sign in _PLUS_MINUS:
            yield _returns("li", f"{phrase} {word} n", f"{code} {sign} n")
            yield _returns("li", f"{phrase} {word} n times {{j}}", f"{code} {sign} n * {{j}}", INTS)
            for other, other_code in _AGGREGATES:
                if other != phrase and (sign == "-" or phrase < other):
                    yield _returns("l", f"{phrase} {word} {other}", f"{code} {sign} {other_code}")
    for word, test in _FILTERS:
        items = f"items of xs {word} {{j}}"
        chosen = f"[v for v in xs if {test.format('{j}')}]"
        yield _returns("l", f"the number of {items}", f"len({chosen})", INTS)
        yield _returns("l", f"the sum of the {items}", f"sum({chosen})", INTS)


def _easy_list_to_list() -> Iterator[Template]:
    yield _returns("l", "xs reversed", "xs[::-1]")
    yield _returns("l", "xs sorted", "sorted(xs)")
    for word, sign in _ARITHMETIC:
        each = f"each {word} {{j}}"
        yield _returns("l", f"the items of xs, {each}", f"[v {sign} {{j}} for v in xs]", INTS)
        yield _returns("li", f"the items of xs, each {word} n", f"[v {sign} n for v in xs]")
        for part, code in _SLICES:
            yield _returns("l", f"{part}, {each}", f"[v {sign} {{j}} for v in {code}]", INTS, FEW)
        for kind, test in _FILTERS:
            condition = test.format("{k}")
            yield _returns(
                "l",
                f"the items of xs {kind} {{k}}, {each}",
                f"[v {sign} {{j}} for v in xs if {condition}]",
                INTS,
                INTS,
            )
    for kind, test in _FILTERS:
        yield _returns("l", f"the items of xs {kind} {{j}}", f"[v for v in xs if {test.format('{j}')}]", INTS)
        yield _returns("li", f"the items of xs {kind} n", f"[v for v in xs if {test.format('n')}]")
    for part, code in _SLICES:
        yield _returns("l", part.format(k="{j}"), code.format(k="{j}"), FEW)
        yield _returns("l", f"{part.format(k='{j}')}, reversed", f"{code.format(k='{j}')}[::-1]", FEW[1:])


def _easy_strings() -> Iterator[Template]:
    for part, code, slots in _STRING_PARTS:
        constant = "k" if slots else "j"
        if slots:
            yield _returns("s", part, code, *slots)
        yield _returns("s", f"{part}, reversed", f"{code}[::-1]", *((FEW[1:],) if slots else ()))
        yield _returns("s", f"{part}, in upper case", f"{code}.upper()", *slots)
        yield _returns(
            "s", f"{part}, repeated {{{constant}}} times", f"{code} * {{{constant}}}", *slots, INTS[:4]
        )
        yield _returns(
            "s", f"{part}, followed by {{{constant}}}", f"{code} + {{{constant}}}", *slots, LETTERS
        )
        yield _returns(
            "s", f"{part}, preceded by {{{constant}}}", f"{{{constant}}} + {code}", *slots, LETTERS
        )
        yield _returns("ss", f"{part}, followed by t", f"{code} + t", *slots)
        yield _returns("ss", f"{part}, preceded by t", f"t + {code}", *slots)
    for word, sign in _PLUS_MINUS:
        yield _returns("s", f"the length of s {word} {{j}}", f"len(s) {sign} {{j}}", INTS)
        yield _returns("ss", f"the length of s {word} the length of t", f"len(s) {sign} len(t)")
        yield _returns(
            "s", f"the count of {{j}} in s, {word} {{k}}", f"s.count({{j}}) {sign} {{k}}", LETTERS, INTS
        )
    yield _returns("s", "the count of {j} in s", "s.count({j})", LETTERS)
    yield _returns("s", "s with {k} in place of {j}", "s.replace({j}, {k})", LETTERS[:4], LETTERS[4:])
    yield _returns("si", "s, repeated n times", "s * n")
    yield _returns("si", "the first n characters of s", "s[:n]")
    yield _returns("si", "s without the first n characters", "s[n:]")
    yield _returns("si", "s, repeated n times, followed by {j}", "s * n + {j}", LETTERS)
    yield _returns("si", "the first n characters of s, followed by {j}", "s[:n] + {j}", LETTERS)


def easy() -> Iterator[Template]:
    """Templates of easy tasks: one `return` line."""
    yield from _easy_integers()
    yield from _easy_list_to_integer()
    yield from _easy_list_to_list()
    yield from _easy_strings()


# --- medium: a condition, or a name for a part ---------------------------------------------------------

_CONDITIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "ii": (
        ("a is greater than b", "a > b"),
        ("a is less than {j}", "a < {j}"),
        ("a plus b is greater than {j}", "a + b > {j}"),
        ("b is divisible by {j}", "b % {j} == 0"),
    ),
    "l": (
        ("the length of xs is greater than {j}", "len(xs) > {j}"),
        ("the first item of xs is less than {j}", "xs[0] < {j}"),
        ("the sum of xs is greater than {j}", "sum(xs) > {j}"),
        ("the last item of xs is divisible by {j}", "xs[-1] % {j} == 0"),
    ),
    "s": (
        ("the length of s is greater than {j}", "len(s) > {j}"),
        ('s starts with "a"', 's[0] == "a"'),
        ('s has "x" in it', '"x" in s'),
    ),
}
_BRANCHES: dict[str, tuple[tuple[str, str], ...]] = {
    "ii": (
        ("a plus b", "a + b"),
        ("a minus b", "a - b"),
        ("a times b", "a * b"),
        ("a plus {k}", "a + {k}"),
        ("b times {k}", "b * {k}"),
        ("the larger of a and b", "max(a, b)"),
        ("the smaller of a and b", "min(a, b)"),
        ("the distance of a and b", "abs(a - b)"),
    ),
    "l": (
        *_AGGREGATES,
        ("the sum of xs plus {k}", "sum(xs) + {k}"),
        ("the length of xs times {k}", "len(xs) * {k}"),
    ),
    "s": (
        ("s reversed", "s[::-1]"),
        ("s in upper case", "s.upper()"),
        ("s repeated {k} times", "s * {k}"),
        ("the first {k} characters of s", "s[:{k}]"),
        ("s without the first {k} characters", "s[{k}:]"),
        ("s followed by s reversed", "s + s[::-1]"),
    ),
}


def _holes(values: tuple[str, ...], text: str) -> tuple[tuple[str, ...], ...]:
    """Slots for the constants that occur in the text."""
    return tuple(values for hole in ("{j}", "{k}") if hole in text)


def _rename(text: str, has_j: bool) -> str:
    return text if has_j else text.replace("{k}", "{j}")


def _same_branches(test: str, left: str, right: str) -> bool:
    """True where the condition makes other templates' branches equal: no two functions may be the same."""
    if test == "a > b":
        return "abs(" in left + right
    return test.startswith("len(s)") and "{k}" in right and ":" in right


def medium() -> Iterator[Template]:
    """Templates of medium tasks: a condition, or a name for a part; two or three lines."""
    for signature, conditions in _CONDITIONS.items():
        for (when, test), (left, right) in itertools.product(
            conditions, itertools.permutations(_BRANCHES[signature], 2)
        ):
            if _same_branches(test, left[1], right[1]):
                continue
            has_j = "{j}" in test
            sentence = _rename(f"If {when}, return {left[0]}. Otherwise return {right[0]}.", has_j)
            code = _rename(f"if {test}:\n    return {left[1]}\nreturn {right[1]}", has_j)
            yield Template(signature, sentence, code, _holes(FEW[1:] if signature == "s" else SOME, code))
    for (kind, test), (word, sign), (name, call) in itertools.product(
        _FILTERS, _ARITHMETIC, (("sum", "sum"), ("length", "len"))
    ):
        code = f"part = [v for v in xs if {test.format('{k}')}]\nreturn {call}(part) {sign} {{j}}"
        sentence = f"Let part be the items of xs {kind} {{k}}. Return the {name} of part {word} {{j}}."
        yield Template("l", sentence, code, (INTS, INTS))
        code = f"part = [v for v in xs if {test.format('n')}]\nreturn {call}(part) {sign} {{j}}"
        sentence = f"Let part be the items of xs {kind} n. Return the {name} of part {word} {{j}}."
        yield Template("li", sentence, code, (INTS,))


# --- hard: a part and a condition, or a loop -----------------------------------------------------------

_UPDATES = (
    ("add v to total", "total += v"),
    ("subtract v from total", "total -= v"),
    ("add v times {k} to total", "total += v * {k}"),
    ("subtract {k} from total", "total -= {k}"),
    ("multiply total by {k} and add v", "total = total * {k} + v"),
    ("make total the larger of total and v", "total = max(total, v)"),
    ("make total the distance of total and v", "total = abs(total - v)"),
)


def hard() -> Iterator[Template]:
    """Templates of hard tasks: a part and a condition, or a loop; four lines or more."""
    yield from _hard_loops()
    for (left, right), (name, call) in itertools.product(
        itertools.permutations(_AGGREGATES[:4], 2), (("sum", "sum"), ("length", "len"))
    ):
        for kind, test in _FILTERS:
            if call == "sum" and kind in ("less than", "divisible by"):
                continue  # such sums tell few thresholds apart
            yield Template(
                "l",
                f"Let part be the items of xs {kind} {{k}}. If the {name} of part is greater than {{j}}, "
                f"return {left[0]}. Otherwise return {right[0]}.",
                f"part = [v for v in xs if {test.format('{k}')}]\nif {call}(part) > {{j}}:\n"
                f"    return {left[1]}\nreturn {right[1]}",
                (("7", "10", "15") if call == "sum" else FEW[:2], SOME),
            )


def _hard_loops() -> Iterator[Template]:
    for (say, update), (when, test) in itertools.product(_UPDATES, _FILTERS):
        other_updates = [("", "")]
        if when != "not equal to":  # otherwise v would be 5, and several updates the same
            other_updates += [pair for pair in _UPDATES if pair[0] != say]
        for other_say, other in other_updates:
            if "{k}" in update and "{k}" in other:
                continue
            if when == "greater than" and "max(" in other:
                continue  # a total above 5 would never change there
            sentence = f"Start total at {{j}}. For each v in xs, if v is {when} 5, {say}"
            code = f"total = {{j}}\nfor v in xs:\n    if {test.format('5')}:\n        {update}\n"
            if other:
                sentence += f", otherwise {other_say}"
                code += f"    else:\n        {other}\n"
            yield Template("l", f"{sentence}. Return total.", f"{code}return total", _holes(SOME, code))
