"""Lines that nobody meant: each is a conversation or a report with file and line, and never an exception."""

from __future__ import annotations

import copy
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_composer.traces.atif import TraceFormatError
from forge_composer.traces.formats.conversation import Conversation, training_problems
from forge_composer.traces.formats.files import FORMATS, ConversationReader
from tests.traces import format_samples as samples

DOCUMENTS = [
    samples.chat(),
    samples.verifiers(),
    samples.swe_query(),
    samples.swe_history(),
    samples.mini(),
    samples.atif(),
]

ODD: list[Any] = [
    *(None, True, 0, -1, 10**30, 0.5, 1e308, "", "x", "\ud800", "\u2028", [], {}, [None], [[]], {"": None}),
    *(["x"], [{}], {"role": "user"}, "assistant", "ATIF-v1.3", '{"a": 1}', [1, 2, 3], [0.5, "x"]),
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(ODD).map(copy.deepcopy),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        found += places(item)
    return found


@st.composite
def mutated(draw: Any) -> bytes:
    """A good document of some format with one to four places changed, dropped or swapped."""
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    rng = draw(st.randoms(use_true_random=False))
    for _ in range(draw(st.integers(0, 4))):
        spots = places(document)
        if not spots:
            break
        holder, key = rng.choice(spots)
        if rng.random() < 0.25:
            del holder[key]
        else:
            other = rng.choice(spots)
            swapped = copy.deepcopy(other[0][other[1]])
            holder[key] = swapped if rng.random() < 0.3 else draw(json_values)
    return json.dumps(document).encode()


@st.composite
def torn(draw: Any) -> bytes:
    """A line that ends too early, or has bytes changed."""
    line = bytearray(draw(mutated()))
    if draw(st.booleans()):
        return bytes(line[: draw(st.integers(1, len(line)))])
    for _ in range(draw(st.integers(1, 4))):
        line[draw(st.integers(0, len(line) - 1))] = draw(
            st.integers(0, 255).filter(lambda b: b not in b"\r\n")
        )
    return bytes(line)


lines = st.one_of(
    mutated(),
    mutated(),
    torn(),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")),
)


def check(line: bytes) -> str:
    """Read a file with this line between two good ones; returns what became of it."""
    good = json.dumps(samples.chat()).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(b"\n".join([good, line, good]) + b"\n")
        reader = ConversationReader(path)
        found = {conversation.source: conversation for conversation in reader}
    assert found.keys() >= {f"{path}:1", f"{path}:3"}
    middle = found.get(f"{path}:2")
    if not line.strip():
        assert (middle, reader.problems) == (None, [])
        return "blank"
    if middle is None:
        (problem,) = reader.problems
        assert (problem.path, problem.line) == (path, 2)
        assert problem.reason
        return "bad"
    assert reader.problems == []
    use(middle)
    return "warned" if middle.warnings else "good"


def use(conversation: Conversation) -> None:
    """What a reader's caller does with a conversation: none of it fails."""
    for number, step in enumerate(conversation.steps):
        assert step.message["role"] == "assistant"
        assert all(isinstance(message["content"], str) for message in conversation.state(number))
    training_problems(conversation)
    for form in FORMATS.values():
        try:
            written = json.loads(json.dumps(form.write(conversation)))
        except TraceFormatError:  # what an ATIF document held beside its steps may be no ATIF
            assert form.name == conversation.format == "atif"
            continue
        if not conversation.messages and form.name != conversation.format:
            continue  # a run that failed before its first message; a chat line must have one
        again = form.read(written)
        if form.name == conversation.format:
            assert again.messages == conversation.messages
            assert [step.action for step in again.steps] == [step.action for step in conversation.steps]


def storm(count: int) -> Any:
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@storm(200)
@given(lines)
def test_two_hundred_lines(line: bytes) -> None:
    check(line)


@pytest.mark.slow
@storm(2000)
@given(lines)
def test_two_thousand_lines(line: bytes) -> None:
    check(line)


def test_the_storm_meets_every_outcome() -> None:
    """The same mutations, from a fixed seed: good, mended and bad lines all occur in each format."""
    rng = random.Random(0)
    outcomes = set()
    for number in range(400):
        document = copy.deepcopy(DOCUMENTS[number % len(DOCUMENTS)])
        if number >= len(DOCUMENTS):
            holder, key = rng.choice(places(document))
            holder[key] = copy.deepcopy(rng.choice(ODD))
        outcomes.add((number % len(DOCUMENTS), check(json.dumps(document).encode())))
    assert outcomes == {
        (kind, outcome) for kind in range(len(DOCUMENTS)) for outcome in ("good", "warned", "bad")
    }
