"""The trace file: whole lines, whatever happens to the writer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_composer.traces.atif import TraceFormatError, trajectory_from_rollout
from forge_composer.traces.store import TornLine, TraceReader, TraceWriter
from forge_composer.traces.verify import verify_rollout
from tests.rendering.chat_fixtures import make_renderer
from tests.traces.rollout_fixtures import make_rollout


def test_a_hundred_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "train.jsonl"
    rollouts = [make_rollout(number) for number in range(100)]
    with TraceWriter(path, run="demo", fsync=True) as writer:
        for rollout in rollouts:
            writer.append(rollout)
        assert writer.count == 100
    reader = TraceReader(path)
    back = list(reader)
    assert back == rollouts
    assert reader.torn == []
    assert path.read_bytes().count(b"\n") == 100
    renderer = make_renderer()
    assert [m for rollout in back for m in verify_rollout(rollout, renderer)] == []


def test_a_torn_last_line_is_reported_and_written_past(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with TraceWriter(path) as writer:
        writer.append(make_rollout(0))
        writer.append(make_rollout(1))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first + 1, first + 700, whole.index("ü".encode(), first) + 1, len(whole) - 2):
        path.write_bytes(whole[:cut])
        reader = TraceReader(path)
        assert [r.rollout_id for r in reader] == ["train-000000-000"]
        assert reader.torn == [TornLine(path, 2, cut - first)]
        assert str(reader.torn[0]).startswith(f"{path}:2: torn line of {cut - first} bytes")
        with TraceWriter(path) as writer:
            writer.append(make_rollout(2))
        assert [r.rollout_id for r in reader] == ["train-000000-000", "train-000000-002"]
        assert [torn.line for torn in reader.torn] == [2]


def test_a_last_line_that_only_lacks_its_newline_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with TraceWriter(path) as writer:
        writer.append(make_rollout(0))
    path.write_bytes(path.read_bytes()[:-1])
    with TraceWriter(path) as writer:
        writer.append(make_rollout(1))
    reader = TraceReader(path)
    assert [r.index for r in reader] == [0, 1]
    assert reader.torn == []


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with TraceWriter(path) as writer:
        writer.append(make_rollout(0))
        writer.append_trajectory({"schema_version": "ATIF-v1.8", "steps": []})
    with pytest.raises(TraceFormatError, match=rf"{path}:2: not an ATIF trajectory: agent: Field required"):
        list(TraceReader(path))
    path.write_text("step,reward\n")
    with pytest.raises(TraceFormatError, match=rf"{path}:1: not a JSON object"):
        list(TraceReader(path))
    with pytest.raises(FileNotFoundError, match="no trace at"):
        TraceReader(tmp_path / "nothing.jsonl")


def test_trajectories_of_other_producers_are_read_as_such(tmp_path: Path) -> None:
    document = trajectory_from_rollout(make_rollout(0))
    del document["extra"]
    with TraceWriter(tmp_path / "other.jsonl") as writer:
        writer.append_trajectory(document)
    assert list(TraceReader(tmp_path).trajectories()) == [document]
    with pytest.raises(TraceFormatError, match=r"other.jsonl:1: .*not written by forge_composer"):
        list(TraceReader(tmp_path))


def test_half_a_surrogate_pair_does_not_stop_the_run(tmp_path: Path) -> None:
    rollout = make_rollout(0, info={"stdout": "a\udcffb"})
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        writer.append(rollout)
    (back,) = TraceReader(tmp_path / "t.jsonl")
    assert back.info == {"stdout": "a?b"}


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with TraceWriter(path), pytest.raises(BlockingIOError, match="is being written by another process"):
        TraceWriter(path)
    with TraceWriter(path) as writer:
        writer.append(make_rollout(0))
    assert len(list(TraceReader(path))) == 1


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.jsonl"
    with TraceWriter(path) as writer:
        writer.append(make_rollout(0))
        before = path.read_bytes()
        real = os.write

        def short_then_full(fd: int, data: bytes) -> int:
            if len(data) > 100:
                return real(fd, data[: len(data) - 100])
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(os, "write", short_then_full)
        with pytest.raises(OSError, match="no space"):
            writer.append(make_rollout(1))
        monkeypatch.undo()
        assert path.read_bytes() == before
        writer.append(make_rollout(2))
    assert [r.index for r in TraceReader(path)] == [0, 2]


WRITE_FOR_EVER = """
import sys
from forge_composer.traces.store import TraceReader, TraceWriter
rollouts = list(TraceReader(sys.argv[1]))
with TraceWriter(sys.argv[2]) as writer:
    while True:
        for rollout in rollouts:
            rollout.info["padding"] = "x" * 200_000
            writer.append(rollout)
"""


def test_kill_while_writing_leaves_at_most_one_torn_line(tmp_path: Path, checkout: Path) -> None:
    source, path = tmp_path / "source.jsonl", tmp_path / "train.jsonl"
    with TraceWriter(source) as writer:
        for number in range(4):
            writer.append(make_rollout(number))
    for attempt in range(3):
        before = path.stat().st_size if path.exists() else 0
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(source), str(path)], cwd=checkout
        )
        try:
            deadline = time.monotonic() + 60
            while not path.exists() or path.stat().st_size < before + 2_000_000:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.003 * (attempt + 1))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        reader = TraceReader(path)
        assert sum(1 for _ in reader) >= 9 * (attempt + 1)
        assert len(reader.torn) <= attempt + 1
    with TraceWriter(path) as writer:
        writer.append(make_rollout(7))
    assert list(TraceReader(path))[-1] == make_rollout(7)
