"""Pairs in files: ours, TRL's preference format, and `datasets`.

with PairWriter("pairs.jsonl") as writer:
    writer.append(pair)
reader = PairReader("pairs.jsonl")
write_trl("pairs_trl.jsonl", reader)

Our file keeps everything: both sides as actions and as tokens, all votes, the cost. A killed writer leaves at
most one torn line, the last; the reader skips and reports it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forge_composer._files import LineWriter
from forge_composer.preferences.codec import PairFormatError, dumps, pair_from_json, pair_to_json
from forge_composer.preferences.records import PreferencePair
from forge_composer.rendering.tool_calls import to_message
from forge_composer.traces.store import TornLine


class PairWriter(LineWriter):
    """Appends pairs to one file. One writer a file: a second one is refused."""

    def append(self, pair: PreferencePair) -> None:
        """Append one pair.

        Raises:
            OSError: the line could not be written (disk full); nothing of it is left in the file.
            TypeError: `info`, a message or an argument holds what is not JSON.
        """
        self.append_line(dumps(pair_to_json(pair)))


class PairReader:
    """Reads a file of pairs, as often as it is iterated.

    Torn lines are skipped and listed in `torn` once the iteration is past them. Anything else that is no pair
    raises `PairFormatError` with file and line.
    """

    def __init__(self, path: str | Path) -> None:
        """Take a file.

        Raises:
            FileNotFoundError: it does not exist.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"no file of pairs at {self.path}")
        self.torn: list[TornLine] = []

    def __iter__(self) -> Iterator[PreferencePair]:
        self.torn = []
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                content = line.strip()
                if not content:
                    continue
                try:
                    yield pair_from_json(json.loads(content))
                except (json.JSONDecodeError, UnicodeDecodeError):
                    if not content.startswith(b"{"):
                        raise PairFormatError(f"{self.path}:{number}: not a JSON object") from None
                    self.torn.append(TornLine(self.path, number, len(content)))
                except (PairFormatError, RecursionError) as error:
                    raise PairFormatError(f"{self.path}:{number}: {error}") from None


# -- TRL and datasets -------------------------------------------------------------------------------


def trl_row(pair: PreferencePair) -> dict[str, Any]:
    """A pair in TRL's conversational preference format: `prompt`, `chosen` and `rejected` are messages.

    `tools` is a JSON text, which TRL decodes: tools of several shapes in one column of objects would be given
    each other's keys. The columns after it are provenance, which TRL leaves alone; it does not know `weight`.
    A side that does not parse is the text that was written.
    """
    return {
        "prompt": [dict(message) for message in pair.messages],
        "chosen": [dict(to_message(pair.chosen))],
        "rejected": [dict(to_message(pair.rejected))],
        "tools": json.dumps(pair.tools),
        "trace": pair.trace,
        "step": pair.step,
        "source": pair.source,
        "families": list(pair.families),
        "weight": pair.weight,
        "cost_usd": pair.cost_usd,
    }


def write_trl(path: str | Path, pairs: Iterable[PreferencePair]) -> int:
    """Write a new file in TRL's preference format, a pair a line; returns how many.

    Loaded as JSON by `datasets`, messages with calls of several shapes need its `Json` type; `to_dataset`
    sets it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("wb") as stream:
        for pair in pairs:
            stream.write(dumps(trl_row(pair)) + b"\n")
            count += 1
    return count


def to_dataset(pairs: Iterable[PreferencePair]) -> Any:
    """The pairs as a `datasets.Dataset` with the columns of `trl_row`.

    Raises:
        ImportError: `datasets` is not installed, or has no `Json` type (it came with 4.7).
    """
    try:
        from datasets import Dataset, Features, Json, List, Value
    except ImportError as error:
        raise ImportError("pairs as a dataset need `datasets` 4.7 or newer: pip install datasets") from error
    messages = List(Json())
    features = Features(
        {
            "prompt": messages,
            "chosen": messages,
            "rejected": messages,
            "tools": Value("string"),
            "trace": Value("string"),
            "step": Value("int64"),
            "source": Value("string"),
            "families": List(Value("string")),
            "weight": Value("float64"),
            "cost_usd": Value("float64"),
        }
    )
    rows = [trl_row(pair) for pair in pairs]
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)
