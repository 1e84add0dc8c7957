"""The key of an endpoint: read from the environment, sent in one header, and cut out of what comes back."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from forge_composer.config.teachers import TeacherConfig

_LEAST_SECRET = 8
"""A shorter key is a placeholder of a local server, and looking for it in replies would spoil them."""
_CUT = "[key]"
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)


class ApiKey:
    """A teacher's key, or none. It shows in no representation and no message."""

    __slots__ = ("_value",)

    def __init__(self, config: TeacherConfig) -> None:
        """Read it.

        Raises:
            ValueError: the variable holds no key, or none that a header can carry.
        """
        self._value: str | None = None
        if config.api_key_env is None:
            return
        where = f"teacher {config.name!r}: api_key_env: {config.api_key_env}"
        value = os.environ.get(config.api_key_env, "").strip()
        if not value:
            raise ValueError(f"{where} is not set; export it, or leave the teacher out")
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"{where} holds characters that no HTTP header may have; set it again")
        self._value = value

    def headers(self) -> dict[str, str]:
        """The headers that carry it."""
        return {} if self._value is None else {"Authorization": f"Bearer {self._value}"}

    def cut_out(self, value: Any) -> Any:
        """A JSON value without the key, as it is or escaped in a string that holds JSON itself."""
        if self._value is None or len(self._value) < _LEAST_SECRET:
            return value
        match value:
            case str():
                return self._cut_text(value, self._value)
            case list():
                return [self.cut_out(item) for item in value]
            case dict():
                return {self.cut_out(name): self.cut_out(item) for name, item in value.items()}
        return value

    def _cut_text(self, text: str, key: str) -> str:
        for spelt in (key, json.dumps(key)[1:-1]):
            text = text.replace(spelt, _CUT)
        # Another spelling cannot be cut out by itself; nobody writes one for a good reason.
        return _CUT if "\\" in text and key in _ESCAPE.sub(_unescaped, text) else text


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) == 5 else code
