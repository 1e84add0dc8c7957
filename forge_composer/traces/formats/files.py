"""Reading and writing files of conversations, in any of the formats; bad lines are reported, not lost.

reader = ConversationReader("runs/demo/traces")
for conversation in reader:
    ...
for problem in reader.problems:
    print(problem)  # traces.jsonl:17: messages: the field is missing; expected a list
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_composer.traces.atif import TraceFormatError, trajectory_from_rollout
from forge_composer.traces.formats import atif as atif_import
from forge_composer.traces.formats import chat, swe_agent, verifiers
from forge_composer.traces.formats.atif_export import write_atif
from forge_composer.traces.formats.conversation import Conversation
from forge_composer.traces.formats.fields import parse_json
from forge_composer.types import Rollout

LINE_SUFFIXES = (".jsonl", ".ndjson")
"""Files with a document a line."""
DOCUMENT_SUFFIXES = (".json", ".traj")
"""Files that are one document, or one list of them."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format: how a document of it is read and written."""

    name: str
    read: Callable[[Mapping[str, Any]], Conversation]
    write: Callable[[Conversation], dict[str, Any]]


FORMATS = {
    format.name: format
    for format in (
        TraceFormat(atif_import.NAME, atif_import.read_atif, write_atif),
        TraceFormat(chat.NAME, chat.read_chat, chat.write_chat),
        TraceFormat(verifiers.NAME, verifiers.read_verifiers, verifiers.write_verifiers),
        TraceFormat(swe_agent.NAME, swe_agent.read_swe_agent, swe_agent.write_swe_agent),
    )
}
"""The formats by name."""


def detect(document: Mapping[str, Any]) -> str:
    """The name of the format that a document is in.

    Raises:
        TraceFormatError: none that is known.
    """
    if "schema_version" in document or ("steps" in document and "agent" in document):
        return atif_import.NAME
    if "prompt" in document and "completion" in document:
        return verifiers.NAME
    if "trajectory_format" in document or "trajectory" in document:
        return swe_agent.NAME
    if "messages" in document:
        return chat.NAME
    if "nodes" in document:
        raise TraceFormatError("a trace graph of verifiers, which is not read; save rollouts as messages")
    keys = ", ".join(sorted(map(str, document))[:5]) or "nothing"
    raise TraceFormatError(
        f"no known format: there is {keys}; expected `schema_version` (ATIF), `messages` (chat), "
        "`prompt` and `completion` (verifiers) or `trajectory` (SWE-agent)"
    )


@dataclass(frozen=True, slots=True)
class BadLine:
    """A document that could not be read."""

    path: Path
    line: int
    """Number of the line, from 1; for a file that is one document the line of the error."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


class ConversationReader:
    """Reads one file, or all trace files of a folder and the folders in it, in order of name.

    A document that cannot be read is skipped and listed in `problems` once the iteration is past it. Every
    conversation has a `trace_id` that no other of the same iteration has: its own, or file and line.
    """

    def __init__(self, path: str | Path, *, format: str | None = None, strict: bool = False) -> None:
        """Take a file or a folder.

        Args:
            path: the file or folder.
            format: name of the format; None finds it out, document by document.
            strict: raise at the first document that cannot be read.

        Raises:
            FileNotFoundError: it does not exist.
            ValueError: there is no such format.
        """
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"no trace at {self.path}")
        if format is not None and format not in FORMATS:
            raise ValueError(f"format {format!r}: there are {', '.join(FORMATS)}")
        self.problems: list[BadLine] = []
        self._format = format
        self._strict = strict
        self._seen: set[str] = set()

    @property
    def files(self) -> list[Path]:
        """The trace files."""
        if not self.path.is_dir():
            return [self.path]
        suffixes = LINE_SUFFIXES + DOCUMENT_SUFFIXES
        return sorted(file for file in self.path.rglob("*") if file.suffix in suffixes and file.is_file())

    def __iter__(self) -> Iterator[Conversation]:
        self.problems = []
        self._seen = set()
        for path in self.files:
            whole = path.suffix in DOCUMENT_SUFFIXES
            yield from self._document_file(path) if whole else self._line_file(path)

    def _line_file(self, path: Path) -> Iterator[Conversation]:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield from self._read(path, number, line)

    def _document_file(self, path: Path) -> Iterator[Conversation]:
        content = path.read_bytes()
        if content.count(b"\n") and _is_json(content.split(b"\n", 1)[0]):
            yield from self._line_file(path)  # lines, whatever the file is called
            return
        yield from self._read(path, 1, content, whole=True)

    def _read(self, path: Path, line: int, content: bytes, *, whole: bool = False) -> Iterator[Conversation]:
        """The conversations of one text; `whole`: of a file, which may be a list of documents."""
        try:
            value = parse_json(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            self._report(path, line, f"not UTF-8 at byte {error.start}")
            return
        except TraceFormatError as error:
            self._report(path, line + (_line_of(error) if whole else 0), str(error))
            return
        if not whole or not isinstance(value, list):
            yield from self._converted(path, line, value)
            return
        for number, document in enumerate(value):
            yield from self._converted(path, line, document, item=f"item {number}: ")

    def _converted(self, path: Path, line: int, document: Any, item: str = "") -> Iterator[Conversation]:
        try:
            if not isinstance(document, dict):
                raise TraceFormatError("not a JSON object")
            conversation = FORMATS[self._format or detect(document)].read(document)
        except TraceFormatError as error:
            self._report(path, line, f"{item}{error}")
            return
        conversation.source = f"{path}:{line}"
        conversation.trace_id = self._unique(conversation.trace_id or f"{path.stem}:{line}")
        yield conversation

    def _unique(self, identity: str) -> str:
        unique, count = identity, 1
        while unique in self._seen:
            count += 1
            unique = f"{identity}#{count}"
        self._seen.add(unique)
        return unique

    def _report(self, path: Path, line: int, reason: str) -> None:
        problem = BadLine(path, line, reason)
        if self._strict:
            raise TraceFormatError(str(problem))
        self.problems.append(problem)


def _is_json(line: bytes) -> bool:
    """True if the line alone is a JSON object."""
    try:
        return isinstance(parse_json(line.decode("utf-8")), dict)
    except (UnicodeDecodeError, TraceFormatError):
        return False


def _line_of(error: TraceFormatError) -> int:
    """How many lines below the first of its document an error of the JSON lies."""
    cause = error.__context__
    return cause.lineno - 1 if isinstance(cause, json.JSONDecodeError) else 0


def conversation_from_rollout(rollout: Rollout) -> Conversation:
    """A rollout of ours as a conversation, token ids and reward included."""
    return atif_import.read_atif(trajectory_from_rollout(rollout))


def write_conversations(path: str | Path, conversations: Iterable[Conversation], format: str) -> int:
    """Write a file, a document a line; a `.traj` or `.json` file holds one conversation. Returns how many.

    Raises:
        ValueError: there is no such format, or a file for one conversation is given another number of them.
    """
    path = Path(path)
    if format not in FORMATS:
        raise ValueError(f"format {format!r}: there are {', '.join(FORMATS)}")
    documents = [FORMATS[format].write(conversation) for conversation in conversations]
    single = path.suffix in DOCUMENT_SUFFIXES
    if single and len(documents) != 1:
        raise ValueError(f"{path}: holds one conversation, not {len(documents)}; name a .jsonl file")
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = (json.dumps(document, ensure_ascii=False, indent=2 if single else None) for document in documents)
    with path.open("wb") as stream:
        for text in texts:
            stream.write(text.encode("utf-8", "replace") + b"\n")  # half a surrogate pair has no UTF-8
    return len(documents)
