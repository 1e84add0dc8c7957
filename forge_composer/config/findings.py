"""Collects what the rules find."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from forge_composer.config.errors import Problem
from forge_composer.config.load import Origin
from forge_composer.config.overrides import COMMAND_LINE
from forge_composer.config.schema import Config


@dataclass(slots=True)
class Findings:
    """The problems of one config."""

    config: Config
    origin: Origin
    problems: list[Problem] = field(default_factory=list)

    def add(
        self, dotted: str, wrong: str, remedy: str, *, also: tuple[str, ...] = (), machine_local: bool = False
    ) -> None:
        """Note a problem of the field `dotted`; `also` names the other fields that take part in the rule."""
        names = (dotted, *also)
        source = self.origin.of(dotted)
        if any(self.origin.of(name) == COMMAND_LINE for name in names):
            source = COMMAND_LINE
        value = json.dumps(self._value(dotted), default=str)
        self.problems.append(Problem(source, dotted, value, wrong, remedy, machine_local))

    def _value(self, dotted: str) -> Any:
        value: Any = self.config
        for part in dotted.split("."):
            value = value[int(part)] if part.isdecimal() else getattr(value, part)
        return value
