"""What is wrong with a config, said so that the reader can put it right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    `source` is the file, `command line` or `default` that the value comes from; `field` its dotted name
    (several, separated by commas, where a rule spans them); `value` how it was written. `wrong` says what
    is wrong or what is allowed, `remedy` what to do. `machine_local` marks a problem of this machine
    rather than of the config: a plan made here for another machine may have it.
    """

    source: str
    field: str
    value: str
    wrong: str
    remedy: str
    machine_local: bool = False

    def __str__(self) -> str:
        shown = f"{self.field} = {self.value}" if self.value else self.field
        place = f"{self.source}: {shown}" if shown else self.source
        return f"{place}\n    {self.wrong}\n    remedy: {self.remedy}"


class ConfigError(Exception):
    """The config cannot be used; `problems` holds everything that is wrong with it, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem in the config" if count == 1 else f"{count} problems in the config"
        super().__init__("\n".join([f"{head}:", *(f"  {problem}" for problem in self.problems)]))
