"""The grammar of the micro tasks: sentences and the Python that does what they say.

A `Template` is one English sentence and one function body with holes for parameter names and constants;
a `Spec` is a template with its constants filled in. `space(difficulty)` is the finite set of all specs of
a difficulty, in a fixed pseudo-random order, each assigned to one split by a stable hash.

Parameters are written `a`, `b` (integers), `xs` (list of integers), `s`, `t` (strings), `n` (a small
integer next to a list or string); constants are `{j}` and `{k}` in templates.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from forge_composer.envs import micro_templates
from forge_composer.envs.micro_templates import Template

Difficulty = Literal["easy", "medium", "hard"]
Split = Literal["train", "eval"]
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")
SPLITS: tuple[Split, ...] = ("train", "eval")

EVAL_SHARE = 8
"""One spec in so many is held out."""

SIGNATURES: dict[str, tuple[str, ...]] = {
    "i": ("a",),
    "ii": ("a", "b"),
    "l": ("xs",),
    "li": ("xs", "n"),
    "s": ("s",),
    "ss": ("s", "t"),
    "si": ("s", "n"),
}
"""Parameters by signature; the letters mean integer, list of integers, string."""


@dataclass(slots=True, frozen=True)
class Spec:
    """What a function does: a template with constants."""

    template: Template
    constants: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The docstring's sentence, in canonical parameter names."""
        return self.template.fill(self.constants)[0]

    @property
    def body(self) -> str:
        """The reference body, in canonical parameter names, not indented."""
        return self.template.fill(self.constants)[1]

    @property
    def digest(self) -> bytes:
        """Stable hash of what the function does; decides order and split."""
        text = f"{self.template.signature}:{self.body}"
        return hashlib.blake2b(text.encode(), digest_size=9).digest()

    @property
    def split(self) -> Split:
        """The split that this function belongs to, whatever it is called."""
        return "eval" if self.digest[-1] % EVAL_SHARE == 0 else "train"


@dataclass(slots=True, frozen=True)
class SpecSpace:
    """All specs of a difficulty."""

    train: tuple[Spec, ...]
    eval: tuple[Spec, ...]
    templates: dict[str, tuple[Template, ...]]
    """Templates by signature."""

    def of(self, split: Split) -> tuple[Spec, ...]:
        """The specs of a split, in their fixed order."""
        return self.train if split == "train" else self.eval


@functools.cache
def space(difficulty: Difficulty) -> SpecSpace:
    """Enumerate a difficulty's specs. Takes a fraction of a second, once."""
    templates = list(_TEMPLATES[difficulty]())
    specs = [Spec(template, constants) for template in templates for constants in all_constants(template)]
    specs = list({spec.digest: spec for spec in specs}.values())
    specs.sort(key=lambda spec: spec.digest)
    by_signature: dict[str, list[Template]] = {}
    for template in templates:
        by_signature.setdefault(template.signature, []).append(template)
    return SpecSpace(
        train=tuple(spec for spec in specs if spec.split == "train"),
        eval=tuple(spec for spec in specs if spec.split == "eval"),
        templates={signature: tuple(members) for signature, members in by_signature.items()},
    )


def all_constants(template: Template) -> Iterator[tuple[str, ...]]:
    """Every assignment of constants to a template's slots."""
    return itertools.product(*template.slots)


_TEMPLATES = {"easy": micro_templates.easy, "medium": micro_templates.medium, "hard": micro_templates.hard}


def siblings(spec: Spec, difficulty: Difficulty) -> Iterable[Spec]:
    """Other functions of the same signature near a spec: other constants, then other templates."""
    template = spec.template
    for position, values in enumerate(template.slots):
        for value in values:
            if value != spec.constants[position]:
                changed = (*spec.constants[:position], value, *spec.constants[position + 1 :])
                yield Spec(template, changed)
    if len(template.slots) == 2 and template.slots[0] == template.slots[1]:
        swapped = (spec.constants[1], spec.constants[0])
        if swapped != spec.constants:
            yield Spec(template, swapped)
    for other in space(difficulty).templates[template.signature]:
        if other is not template:
            yield Spec(other, _fitting(other, spec.constants))


def _fitting(template: Template, constants: tuple[str, ...]) -> tuple[str, ...]:
    """Constants for another template, kept from the given ones where they are allowed."""
    return tuple(
        constants[position]
        if position < len(constants) and constants[position] in values
        else next((constant for constant in constants if constant in values), values[0])
        for position, values in enumerate(template.slots)
    )
