"""`python -m apps.inspect_hints`: what it writes, and what it says about what it cannot use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from apps.inspect_hints import main
from forge_composer.hints.records import Target
from forge_composer.hints.samples import write_targets
from tests.inspection.run_fixtures import POLICY, make_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "400")
    return make_run(tmp_path / "run")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says as it refuses."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def test_terminal_page_and_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, numbers = tmp_path / "out" / "hints.html", tmp_path / "out" / "hints.json"
    assert main([str(run), "--limit", "3", "--html", str(page), "--json", str(numbers)]) == 0
    shown = capsys.readouterr().out
    assert f"{run}: 3 of 4 targets, a random choice (seed 0), by step; policy: {POLICY}" in shown
    assert shown.endswith(f"{page}\n{numbers}\n")
    content = json.loads(numbers.read_text(encoding="utf-8"))
    assert len(content["targets"]) == 3
    assert content["found"] == 4
    assert page.read_text(encoding="utf-8").count("<article>") == 3


def test_the_trained_policy_is_taken_where_there_is_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = run / "checkpoints" / "final_hf"
    shutil.copytree(POLICY, final)
    assert main([str(run), "--step", "3", "--threads", "1"]) == 0
    assert f"1 of 1 target, all, by step; policy: {final}" in capsys.readouterr().out
    assert main([str(run), "--step", "3", "--model", str(POLICY)]) == 0
    assert f"policy: {POLICY}" in capsys.readouterr().out


def test_a_run_without_targets_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off = make_run(tmp_path / "off", "--loss.sdpo.weight", "0", pairs=[])
    said = refused(capsys, off)
    assert f"{off / 'targets.jsonl'} holds no target: the run had loss.sdpo.weight = 0" in said
    assert "--loss.sdpo.weight 0.5" in said
    on = make_run(tmp_path / "on", pairs=[])
    assert "targeted feedback was on, but no turn was targeted yet" in refused(capsys, on)
    (on / "targets.jsonl").touch()
    assert "hints.routing" in refused(capsys, on)


def test_no_run(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path / 'none' / 'config.toml'} does not exist; name the folder of a run" in refused(
        capsys, tmp_path / "none"
    )
    shutil.rmtree(run / "traces")
    assert "traces/train.jsonl does not exist; name the folder of a run" in refused(capsys, run)


def test_a_config_of_another_schema(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "config.toml").open("a", encoding="utf-8") as file:
        file.write("\n[nonsense]\nx = 1\n")
    said = refused(capsys, run)
    assert "config.toml" in said
    assert "nonsense" in said


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"step": 1, "turn": -1, "rollout_id": "a", "kind": "k", "hint": "h", "source": "s"}', "turn: "),
        ('{"step": 1, "turn": 0, "rollout_id": "a", "kind": "k", "source": "s"}', "hint: Field required"),
        ("[]", "no target: "),
        ("{", "no target: "),
    ],
)
def test_a_broken_line(run: Path, capsys: pytest.CaptureFixture[str], line: str, wrong: str) -> None:
    file = run / "targets.jsonl"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    said = refused(capsys, run)
    assert f"{file}:5: no target: " in said
    assert wrong in said
    assert "mend the line or take it out" in said


def test_a_torn_last_line_is_left_out_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "targets.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 targets" in shown
    assert f"{file}:4: torn line" in shown.replace("\n", "")


def test_fields_that_are_not_known_do_not_matter(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "targets.jsonl"
    lines = [json.loads(line) | {"later": 1} for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main([str(run)]) == 0
    assert "4 of 4 targets" in capsys.readouterr().out


def test_only_mismatches_are_no_failure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_targets(run / "targets.jsonl", 9, [Target("gone", 0, "no_call", "Hint: x", "template")])
    assert main([str(run), "--step", "9"]) == 0
    shown = capsys.readouterr().out
    assert "no teacher context: 1 of the targets" in shown
    assert "by kind" not in shown


def test_no_policy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    assert f"{gone} is not a folder; name the policy's with --model FOLDER" in refused(
        capsys, run, "--model", gone
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    said = refused(capsys, run, "--model", empty)
    assert f"{empty} cannot be loaded as a policy: " in said
    assert "config.json, safetensors, tokenizer" in said


@pytest.mark.parametrize(
    ("device", "wrong"), [("abacus", "no device of torch; use cpu or cuda"), ("cuda", "sees no CUDA device")]
)
def test_no_device(run: Path, capsys: pytest.CaptureFixture[str], device: str, wrong: str) -> None:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    said = refused(capsys, run, "--device", device)
    assert f"--device {device}: " in said
    assert wrong in said


def test_nothing_fits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--kind timeout: no target has it; there are test_failed (2), low_reward (2)" in refused(
        capsys, run, "--kind", "timeout"
    )


def test_output_that_cannot_be_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--html", "--json"):
        assert f"{option} {tmp_path} is a folder; name a file" in refused(capsys, run, option, tmp_path)
    blocked = run / "config.toml" / "hints.html"
    assert str(run / "config.toml") in refused(capsys, run, "--html", blocked)


@pytest.mark.parametrize(
    "arguments", [["--limit", "0"], ["--tokens", "-1"], ["--sort", "size"], ["--threads", "x"]]
)
def test_bad_options(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(run), *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
