"""Traces of every format become steps; bad lines are named and end nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from forge_composer.config.replay import ReplayConfig
from forge_composer.replay_report.gather import gather
from forge_composer.replay_report.micro_traces import micro_traces, write_traces
from forge_composer.traces.formats.files import FORMATS, ConversationReader, write_conversations
from forge_composer.traces.store import TraceWriter
from tests.traces.rollout_fixtures import make_rollout

ALL = ReplayConfig(traces="all", steps="all")


def test_the_shipped_traces_come_from_the_seed(checkout: Path, tmp_path: Path) -> None:
    shipped = checkout / "assets/replay/traces.jsonl"
    write_traces(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == shipped.read_bytes()
    assert shipped.stat().st_size < 300_000
    found = gather([shipped], "auto", ALL)
    assert (len(found.states), found.bad_lines, found.warnings) == (50, [], 0)
    assert len({state.step_id for state in found.states}) == 50


def test_other_seeds_and_sizes() -> None:
    def turns(document: dict[str, Any]) -> int:
        return sum(message["role"] == "assistant" for message in document["messages"])

    assert sum(map(turns, micro_traces(1, 23))) == 23
    assert list(micro_traces(1, 23)) == list(micro_traces(1, 23)) != list(micro_traces(2, 23))


@pytest.mark.parametrize("format", FORMATS)
def test_each_format(tmp_path: Path, format: str) -> None:
    write_traces(tmp_path / "chat.jsonl", steps=14)
    conversations = list(ConversationReader(tmp_path / "chat.jsonl"))
    target = tmp_path / "out" / "traces.jsonl"
    write_conversations(target, conversations, format)
    for asked in ("auto", format):
        found = gather([target.parent], asked, ALL)  # type: ignore[arg-type]
        assert len(found.states) == 14
        assert found.bad_lines == []
        assert [len(state.action.tool_calls) for state in found.states] == [
            len(step.action.tool_calls) for each in conversations for step in each.steps
        ]


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    write_traces(path, steps=12)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{torn", '{"messages": "no"}', "", *lines[1:]]) + "\n")
    found = gather([path], "auto", ALL)
    assert len(found.states) == 12
    assert [(line.path, line.line) for line in found.bad_lines] == [(path, 2), (path, 3)]
    assert f"{path}:3: messages" in str(found.bad_lines[1])


def test_a_run_folder_is_read_as_rollouts(tmp_path: Path) -> None:
    """Its traces only, and with what the environment said: a step that it complained about is failing."""
    rollout = make_rollout()
    rollout.reward = 0.0
    won = dataclasses.replace(rollout, rollout_id="won", reward=1.0)
    with TraceWriter(tmp_path / "run/traces/t.jsonl") as writer:
        writer.append(rollout)
        writer.append(won)
    with (tmp_path / "run/traces/t.jsonl").open("a") as stream:
        stream.write('{"schema_version": "ATIF-v1.8", "ste\n{"no": "trace"}\n')
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    found = gather([tmp_path / "run"], "auto", ALL)
    assert found.traces == [rollout.rollout_id, "won"]
    assert len(found.states) == 2 * len(rollout.turns)
    assert [line.line for line in found.bad_lines] == [3, 4]
    assert [state.rollout is not None for state in found.states] == [True] * len(found.states)
    assert found.states[0].completion_ids == tuple(rollout.turns[0].completion_ids)
    failed = gather([tmp_path / "run"], "auto", ReplayConfig(steps="failing"))
    assert failed.traces == [rollout.rollout_id]
    assert failed.read == 2
    assert 0 < len(failed.states) <= len(rollout.turns)


def test_ids_are_told_apart_over_files(tmp_path: Path) -> None:
    write_traces(tmp_path / "a.jsonl", steps=3)
    write_traces(tmp_path / "b.jsonl", steps=3)
    found = gather([tmp_path, tmp_path / "a.jsonl"], "auto", ALL)  # a file that is named twice is read once
    assert found.traces == ["micro-0", "micro-0#2"]
    assert len({state.step_id for state in found.states}) == 6


def test_a_forced_format_reports_what_is_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    for format in ("run", "atif", "verifiers"):
        found = gather([path], format, ALL)  # type: ignore[arg-type]
        assert (found.read, len(found.bad_lines)) == (0, 1)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        gather([tmp_path / "none.jsonl"], "auto", ALL)
