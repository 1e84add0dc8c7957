"""The JSD benchmark: its formula, its check of the contenders, its memory figures, the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apps.bench_jsd import main
from forge_composer.bench.contenders import Contender, contenders, eager_jsd
from forge_composer.bench.jsd import Case, DisagreementError, Results, Size, check, reference, run
from forge_composer.bench.memory import peak_extra_bytes

CPU = torch.device("cpu")
SMALL = Size(6, 50, None, torch.float32)
LINEAR = Size(6, 50, 8, torch.float32)
ON_CPU = {"eager", "chunked", "chunked_out_of_place", "linear_eager", "linear_chunked"}


def by_name(name: str) -> Contender:
    return next(contender for contender in contenders(CPU)[0] if contender.name == name)


def silent(_: str) -> None:
    pass


def test_eager_on_disjoint_and_on_equal_distributions() -> None:
    far = torch.tensor([[60.0, 0.0], [0.0, 60.0]])
    assert float(eager_jsd(far, far.flip(1))) == pytest.approx(math.log(2))
    assert float(eager_jsd(far, far)) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ON_CPU))
def test_contenders_agree_with_float64(name: str, dtype: torch.dtype) -> None:
    hidden = 16 if name.startswith("linear") else None
    case = Case(Size(37, 501, hidden, dtype), CPU)
    errors = check(by_name(name), case, reference(case))
    assert max(errors) <= by_name(name).error_allowed(dtype)


def test_the_reference_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (SMALL, LINEAR):
        case = Case(size, CPU)
        whole = reference(case)
        monkeypatch.setattr("forge_composer.bench.jsd._REFERENCE_ELEMENTS", 2 * size.v)
        parts = reference(case)
        monkeypatch.undo()
        assert parts.value == pytest.approx(whole.value, rel=1e-12)
        torch.testing.assert_close(parts.gradients, whole.gradients)


class Factor(torch.autograd.Function):
    """The same value, another gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def one_row_doubled(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    factor_N1 = torch.ones(len(student_NV), 1)
    factor_N1[-1] = 2.0
    return eager_jsd(Factor.apply(student_NV, factor_N1), teacher_NV)


WRONG = {
    "value": lambda s, t: eager_jsd(s, t) * 1.001,
    "gradient": lambda s, t: Factor.apply(eager_jsd(s, t), torch.tensor(1.001)),
    "gradient of one row": one_row_doubled,
    "direction": lambda s, t: eager_jsd(s, t + 0.01 * s.detach()),
    "nan": lambda s, t: eager_jsd(s, t) * float("nan"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_contender_is_found(fault: str) -> None:
    case = Case(SMALL, CPU)
    expected = reference(case)
    check(Contender("right", "logits", eager_jsd, 0.1), case, expected)
    with pytest.raises(DisagreementError, match="relative error"):
        check(Contender("wrong", "logits", WRONG[fault], 0.1), case, expected)


def test_a_wrong_weight_gradient_is_found() -> None:
    linear = by_name("linear_eager").mean_jsd

    def wrong(hidden: Tensor, weight: Tensor, *teacher: Tensor) -> Tensor:
        return linear(hidden, Factor.apply(weight, torch.tensor(1.01)), *teacher)

    case = Case(LINEAR, CPU)
    with pytest.raises(DisagreementError):
        check(Contender("wrong", "linear", wrong, 0.1), case, reference(case))


def measured(*found: Contender) -> Results:
    results, bytes_per_s = run([SMALL], list(found), CPU, repeats=1, report=silent)
    assert bytes_per_s > 0
    return results


def test_a_wrong_contender_is_not_timed_and_the_others_are() -> None:
    results = measured(
        Contender("wrong", "logits", WRONG["value"], 0.1), Contender("right", "logits", eager_jsd, 0.1)
    )
    assert results.disagreed
    assert [row["impl"] for row in results.rows] == ["right"]
    (skip,) = results.skipped
    assert skip["impl"] == "wrong"
    assert "relative error of the value 0.001" in skip["reason"]


def fail(kind: type[Exception], *_: Tensor) -> Tensor:
    raise kind("first line\nsecond line")


def test_failures_of_foreign_code_are_noted_and_ours_raised() -> None:
    broken = partial(fail, ValueError)
    results = measured(Contender("foreign", "logits", broken, 0.1, foreign=True))
    assert not results.rows
    assert not results.disagreed
    assert results.skipped[0]["reason"] == "ValueError: first line"
    with pytest.raises(ValueError, match="first line"):
        measured(Contender("ours", "logits", broken, 0.1))


def test_too_little_memory_is_noted() -> None:
    results = measured(Contender("ours", "logits", partial(fail, torch.OutOfMemoryError), 0.1))
    assert results.skipped == [
        {"impl": "ours", "n": SMALL.n, "v": SMALL.v, "h": None, "reason": "first line"}
    ]


def test_inputs_come_back_after_they_were_overwritten() -> None:
    case = Case(SMALL, CPU)
    before = [tensor.detach().clone() for tensor in case.learned()]
    for tensor in case.learned():
        tensor.detach().zero_()
    torch.testing.assert_close([tensor.detach() for tensor in case.learned()], before, rtol=0, atol=0)


def test_chunked_memory_is_a_small_part_of_the_eager_formulas() -> None:
    """At the smaller size of the published table, by the exact meter."""
    size = Size(64, 151_936, None, torch.float32)
    case, unit = Case(size, CPU), 4 * size.n * size.v

    def peak(name: str) -> int:
        learned, loss = case.learned(), by_name(name).mean_jsd
        return peak_extra_bytes(lambda: torch.autograd.grad(loss(*learned, *case.fixed), learned), CPU)

    eager, chunked = peak("eager"), peak("chunked")
    assert chunked <= 0.15 * eager
    assert peak("chunked_out_of_place") - chunked == pytest.approx(unit, rel=0.01)


ROW_KEYS = {"n", "v", "dtype", "impl", "fwd_ms", "fwd_bwd_ms", "peak_extra_bytes", "floor_ms"}


def check_results(content: dict[str, Any], names: set[str], sizes: set[tuple[int, int]]) -> None:
    rows = content["rows"]
    assert {(row["n"], row["v"]) for row in rows} == sizes
    assert len(rows) == len(names) * len(sizes)
    assert {row["impl"] for row in rows} == names
    for row in rows:
        assert row.keys() >= ROW_KEYS
        for key in ROW_KEYS - {"dtype", "impl"} | {"fraction_of_floor", "fwd_median_ms", "fwd_bwd_median_ms"}:
            assert math.isfinite(row[key]), key
            assert row[key] > 0, key
        assert (row["h"] is not None) == row["impl"].startswith("linear")
        assert row["fwd_bwd_ms"] <= row["fwd_bwd_median_ms"]
        if row["h"] is None:
            moved = 3 * row["n"] * row["v"] * (4 if row["dtype"] == "float32" else 2)
            assert row["floor_ms"] == pytest.approx(
                moved / content["machine"]["copy_gb_per_s"] / 1e6, rel=0.01
            )
    assert content["machine"]["copy_gb_per_s"] > 0
    assert {"device", "date", "torch", "triton", "threads", "load"} <= content["machine"].keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "results.json"
    impls = ",".join([*sorted(ON_CPU), "triton"])
    arguments = ["--device", "cpu", "--json", str(file), "--sizes", "8x64,4x100", "--dtype", dtype]
    assert main([*arguments, "--hidden", "16", "--repeats", "2", "--impls", impls]) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    check_results(content, ON_CPU, {(8, 64), (4, 100)})
    assert {row["dtype"] for row in content["rows"]} == {dtype}
    assert {row["h"] for row in content["rows"]} == {None, 16}
    assert content["skipped"] == [{"impl": "triton", "reason": "needs a CUDA device"}]
    printed = capsys.readouterr().out
    assert "chunked_out_of_place" in printed
    assert "N=4 V=100" in printed
    assert "not measured: triton: needs a CUDA device" in printed


def test_the_command_fails_when_a_contender_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Contender("eager", "logits", WRONG["value"], 0.1)
    monkeypatch.setattr("forge_composer.bench.contenders.contenders", lambda _: ([wrong], {}))
    file = tmp_path / "results.json"
    assert main(["--device", "cpu", "--json", str(file), "--sizes", "8x64", "--repeats", "1"]) == 1
    assert "relative error" in json.loads(file.read_text(encoding="utf-8"))["skipped"][0]["reason"]
    assert "relative error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "512"], "'512' is not NxV"),
        (["--sizes", "512x0"], "'0' is not a positive whole number"),
        (["--sizes", "512x1x1"], "is not NxV"),
        (["--repeats", "0"], "'0' is not a positive"),
        (["--impls", "eager,fast"], "there is no 'fast'"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", "--json", str(tmp_path / "x.json"), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_without_a_cuda_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cuda", "--json", str(tmp_path / "x.json")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "--device cuda" in error
    assert "use --device cpu" in error


@pytest.mark.slow
def test_all_that_runs_on_this_machine(checkout: Path, tmp_path: Path) -> None:
    """With torch.compile, where there is a compiler, and from a shell."""
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "apps.bench_jsd", "--device", "cpu", "--json", str(file)]
    answer = subprocess.run(
        [*command, "--sizes", "8x64,4x100", "--hidden", "16", "--repeats", "1"],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "USDT" not in answer.stderr
    content = json.loads(file.read_text(encoding="utf-8"))
    reasons = {skip["impl"]: skip["reason"] for skip in content["skipped"]}
    compiled = set() if "compile" in reasons else {"compile"}
    linear = [row for row in content["rows"] if row["h"] is not None]
    assert {row["impl"] for row in linear} == {"linear_eager", "linear_chunked"}
    assert {row["impl"] for row in content["rows"]} == ON_CPU | compiled
    assert reasons.keys() >= {"triton", "liger", "linear_liger"}


@pytest.mark.gpu
def test_the_command_on_cuda(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert main(["--device", "cuda", "--json", str(file), "--sizes", "64x1000", "--repeats", "2"]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {row["impl"] for row in rows} >= ON_CPU | {"triton", "triton_out_of_place"}
