"""Pairs in files and back: ours without loss, TRL's columns, `datasets`; torn and wrong lines."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.codec import FORMAT, PairFormatError, dumps, pair_from_json, pair_to_json
from forge_composer.preferences.export import PairReader, PairWriter, to_dataset, trl_row, write_trl
from forge_composer.preferences.extraction import PairExtractor
from forge_composer.preferences.records import PairTokens, PreferencePair, TeacherVote
from forge_composer.types import Message, ParsedAction, ToolCall
from tests.preferences.replayed import START, TOOLS, body, calling, replayed, spelled, state, token_state
from tests.rendering.chat_fixtures import make_renderer
from tests.rollout.micro_episodes import call


async def made(step: int = 0) -> PreferencePair:
    renderer = make_renderer()
    at = token_state(renderer, call("write_body", body=f"return {step} - b"), step=step, version=4)
    answer = body("write_body", spelled(body="return a + b  # ü \u2028"), "Now.")
    extractor = PairExtractor(ReplayConfig(), renderer=renderer)
    pair = await extractor.extract(replayed(at, [answer, answer, body("", None, "no")]))
    assert isinstance(pair, PreferencePair)
    return pair


async def test_lines_are_read_back_as_they_were(tmp_path: Path) -> None:
    pairs = [await made(step) for step in range(3)]
    path = tmp_path / "deep" / "pairs.jsonl"
    with PairWriter(path, fsync=True) as writer:
        for pair in pairs[:2]:
            writer.append(pair)
        with pytest.raises(BlockingIOError, match=r"pairs\.jsonl is being written by another process"):
            PairWriter(path)
        assert writer.count == 2
    with PairWriter(path) as writer:
        writer.append(pairs[2])
    reader = PairReader(path)
    assert list(reader) == pairs
    assert list(reader) == pairs
    assert reader.torn == []
    assert pairs[0].tokens is not None
    document = json.loads(path.read_text("utf-8").split("\n")[0])
    assert (document["format"], document["trace"], document["families"]) == (FORMAT, "trace", ["A", "B"])
    assert [vote["teacher"] for vote in document["votes"]] == ["t0", "t1", "t2"]
    assert document["cost_usd"] == pytest.approx(0.03)


async def test_a_torn_line_is_reported_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pair, other = await made(0), await made(1)
    line = dumps(pair_to_json(pair))
    for cut in (1, len(line) // 2, len(line) - 1):
        path.write_bytes(line + b"\n" + line[:cut])
        reader = PairReader(path)
        assert list(reader) == [pair]
        (torn,) = reader.torn
        assert (torn.line, torn.size) == (2, cut)
        with PairWriter(path) as writer:
            writer.append(other)
        assert list(reader) == [pair, other]
        assert [(torn.line, torn.size) for torn in reader.torn] == [(2, cut)]


async def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pairs.jsonl"
    pair = await made()
    with PairWriter(path) as writer:
        writer.append(pair)
        real = os.write
        left = [100, 0]

        def full(fd: int, content: bytes) -> int:
            if not (room := left.pop(0)):
                raise OSError(28, "No space left on device")
            return real(fd, content[:room])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            writer.append(pair)
        monkeypatch.undo()
        writer.append(pair)
    assert list(PairReader(path)) == [pair, pair]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "format: expected 'forge_composer.preference_pair/1', got 'other'"),
        ({"step": "3"}, "step: expected a whole number, got '3'"),
        ({"step": True}, "step: expected a whole number"),
        ({"weight": None}, "weight: expected a number"),
        ({"source": "else"}, 'source: expected "student" or "rendered"'),
        (
            {"chosen": {"text": "", "tool_calls": [], "reasoning": 3, "error": None}},
            "chosen.reasoning: expected a string",
        ),
        ({"chosen": 3}, "chosen: expected an object, got 3"),
        ({"votes": [3]}, "votes: expected an object, got 3"),
        ({"votes": [{}]}, "votes.teacher: the field is missing"),
        ({"tokens": {"prompt_ids": [1.5]}}, "tokens.prompt_ids: expected a whole number, got 1.5"),
        ({"outcome": {"chosen": {"$float": "x"}}}, "expected a number, got 'x'"),
    ],
)
async def test_wrong_lines_name_file_line_and_field(tmp_path: Path, change: Any, words: str) -> None:
    document = pair_to_json(await made())
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(dumps(document) + b"\n\n" + dumps(document | change) + b"\n")
    with pytest.raises(PairFormatError) as caught:
        list(PairReader(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert words in str(caught.value)


async def test_missing_fields_and_other_files(tmp_path: Path) -> None:
    document = pair_to_json(await made())
    for key in document.keys() - {"format"}:
        with pytest.raises(PairFormatError, match=f"^{key}: the field is missing"):
            pair_from_json({other: value for other, value in document.items() if other != key})
    with pytest.raises(PairFormatError, match="expected a JSON object, got list"):
        pair_from_json([])
    path = tmp_path / "notes.txt"
    path.write_text("not pairs\n")
    with pytest.raises(PairFormatError, match=r"notes\.txt:1: not a JSON object"):
        list(PairReader(path))
    with pytest.raises(FileNotFoundError, match="no file of pairs at"):
        PairReader(tmp_path / "none.jsonl")


TEXT = st.text(st.characters(), max_size=8)  # half surrogate pairs too
NUMBER = st.integers() | st.floats()
KEY = TEXT | st.sampled_from(["$float", "$object"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(KEY, JSON, max_size=3)
ACTION = st.builds(
    ParsedAction,
    text=TEXT,
    tool_calls=st.lists(st.builds(ToolCall, TEXT, TEXT, OBJECT), max_size=2).map(tuple),
    reasoning=TEXT,
    error=st.none() | TEXT,
)
IDS = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
PAIR = st.builds(
    PreferencePair,
    trace=TEXT,
    step=st.integers(0),
    messages=st.lists(st.builds(lambda said: Message(role="user", content=said), TEXT), max_size=2),
    tools=st.lists(OBJECT, max_size=2),
    chosen=ACTION,
    rejected=ACTION,
    source=st.sampled_from(["student", "rendered"]),
    families=st.lists(TEXT, max_size=3).map(tuple),
    weight=st.floats(0, 1),
    votes=st.lists(
        st.builds(TeacherVote, TEXT, TEXT, TEXT, st.none() | TEXT, st.floats(), st.floats(), st.integers(0)),
        max_size=2,
    ).map(tuple),
    cost_usd=st.floats(),
    tokens=st.none() | st.builds(PairTokens, IDS, IDS, IDS),
    version=st.integers(-1),
    temperature=st.floats(),
    outcome=st.none() | st.fixed_dictionaries({"chosen": st.floats(), "rejected": st.floats()}),
    info=OBJECT,
)


def exact(value: Any) -> str:
    """Tells -0.0 from 0.0 and 1 from 1.0, and NaN is NaN."""
    return repr(value)


@given(PAIR)
def test_any_pair_is_kept_as_it_is(pair: PreferencePair) -> None:
    line = dumps(pair_to_json(pair))
    assert b"\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert exact(pair_from_json(json.loads(line))) == exact(pair)


def test_floats_that_json_lacks() -> None:
    chosen = calling("f", x=math.inf, y={"$float": "nan"})
    info = {"$object": {"$float": -math.inf}}
    pair = PreferencePair(
        "t", 0, START, [], chosen, calling("f"), "rendered", (), 1.0, (), math.nan, info=info
    )
    document = json.loads(dumps(pair_to_json(pair)))
    assert document["cost_usd"] == {"$float": "nan"}
    again = pair_from_json(document)
    assert math.isnan(again.cost_usd)
    assert again.chosen.tool_calls[0].arguments == {"x": math.inf, "y": {"$float": "nan"}}
    assert again.info == {"$object": {"$float": -math.inf}}


async def test_trl_rows(tmp_path: Path) -> None:
    pair = await made()
    row = trl_row(pair)
    assert list(row)[:4] == ["prompt", "chosen", "rejected", "tools"]
    assert row["prompt"] == START
    assert row["chosen"] == [
        {
            "role": "assistant",
            "content": "Now.",
            "tool_calls": [
                {
                    "id": "x",
                    "type": "function",
                    "function": {"name": "write_body", "arguments": {"body": "return a + b  # ü \u2028"}},
                }
            ],
        }
    ]
    assert row["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {"body": "return 0 - b"}
    assert json.loads(row["tools"]) == TOOLS
    assert (row["weight"], row["families"], row["source"]) == (pytest.approx(2 / 3), ["A", "B"], "rendered")
    path = tmp_path / "trl.jsonl"
    assert write_trl(path, [pair, await made(1)]) == 2
    first, second, end = path.read_bytes().split(b"\n")
    assert (json.loads(first), json.loads(second)["step"], end) == (row, 1, b"")


async def test_the_chat_template_writes_trls_rows_as_the_pairs_tokens() -> None:
    """What TRL does: prompt with the generation prompt, then prompt with the side; the rest is the side."""
    pair = await made()
    assert pair.tokens is not None
    row, tokenizer = trl_row(pair), make_renderer().tokenizer
    tools = json.loads(row["tools"])

    def rendered(messages: Any, generation: bool) -> Any:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, tokenize=False
        )

    prompt = rendered(row["prompt"], True)
    assert tokenizer.encode(prompt, add_special_tokens=False) == list(pair.tokens.prompt_ids)
    for side, ids in (("chosen", pair.tokens.chosen_ids), ("rejected", pair.tokens.rejected_ids)):
        whole = rendered(row["prompt"] + row[side], False)
        assert whole.removeprefix(prompt).strip() == tokenizer.decode(list(ids))


async def test_a_side_that_does_not_parse_is_its_text() -> None:
    broken = '<tool_call>\n{"name": \n</tool_call>'
    renderer = make_renderer()
    at = token_state(renderer, broken)
    answer = body("read", spelled())
    pair = await PairExtractor(ReplayConfig()).extract(replayed(at, [answer, answer]))
    assert isinstance(pair, PreferencePair)
    assert trl_row(pair)["rejected"] == [{"role": "assistant", "content": broken}]


async def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    text = await PairExtractor(ReplayConfig()).extract(
        replayed(state(ParsedAction("I do not know.")), [body("read", spelled(path="a", n=[1, None]))] * 2)
    )
    assert isinstance(text, PreferencePair)
    pairs = [await made(), text]
    dataset = to_dataset(pairs)
    assert list(dataset) == [trl_row(pair) for pair in pairs]  # no call has got another's arguments
    dataset.to_parquet(tmp_path / "pairs.parquet")
    again = datasets.Dataset.from_parquet(str(tmp_path / "pairs.parquet"), cache_dir=str(tmp_path / "cache"))
    assert again[1]["chosen"] == trl_row(text)["chosen"]
    assert len(to_dataset([])) == 0
