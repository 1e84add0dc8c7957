"""The JSD benchmark: every contender on the same tensors, checked in float64 first, then timed in turns.

Shape suffixes: N = tokens, V = vocabulary, H = hidden size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_composer.bench.contenders import BETA, Contender
from forge_composer.bench.machine import CopyBandwidth, Stopwatch
from forge_composer.bench.memory import peak_extra_bytes
from forge_composer.kernels import generalized_jsd

_REFERENCE_ELEMENTS = 1 << 21
"""Logits that the float64 reference works on at a time."""
_CHECKED_ROWS = 32
"""Rows whose gradient with respect to the logits is checked."""


@dataclass(frozen=True, slots=True)
class Size:
    """One point of the benchmark; `hidden` is None where the logits are given."""

    n: int
    v: int
    hidden: int | None
    dtype: torch.dtype

    @property
    def kind(self) -> Literal["logits", "linear"]:
        """What the contenders start from."""
        return "logits" if self.hidden is None else "linear"

    @property
    def floor_bytes(self) -> int:
        """Both sets of logits read once, one gradient written."""
        return 3 * self.n * self.v * self.dtype.itemsize


class Case:
    """The tensors of one size: those that get a gradient, those that do not.

    The student's logits have standard deviation 3, the teacher's differ from them by 1.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        draw = torch.Generator(device=device).manual_seed(0)

        def normal(rows: int, columns: int, deviation: float) -> Tensor:
            return deviation * torch.randn(rows, columns, generator=draw, device=device, dtype=torch.float32)

        if size.hidden is None:
            student, noise = normal(size.n, size.v, 3.0), normal(size.n, size.v, 1.0)
            self._learned = [student.to(size.dtype)]
            self.fixed = [noise.add_(student).to(size.dtype)]
        else:
            weight = normal(size.v, size.hidden, 3.0 / math.sqrt(size.hidden))
            hidden, noise = normal(size.n, size.hidden, 1.0), normal(size.n, size.hidden, 1 / 3)
            self._learned = [hidden.to(size.dtype), weight.to(size.dtype)]
            self.fixed = [noise.add_(hidden).to(size.dtype), weight.to(size.dtype, copy=True)]
        self._pristine = [tensor.clone() for tensor in self._learned]

    def learned(self) -> list[Tensor]:
        """Leaves with the original values, which contenders may overwrite."""
        for tensor, pristine in zip(self._learned, self._pristine, strict=True):
            tensor.copy_(pristine)
        return [tensor.detach().requires_grad_() for tensor in self._learned]


@dataclass(frozen=True, slots=True)
class Reference:
    """In float64: the loss, and gradients, of which only some rows are kept where they are large."""

    value: float
    gradients: list[Tensor]
    rows: list[Tensor | None]


def reference(case: Case) -> Reference:
    """The definition in float64, a few rows at a time."""
    size = case.size
    step = max(1, _REFERENCE_ELEMENTS // size.v)
    chunks = [slice(start, min(start + step, size.n)) for start in range(0, size.n, step)]
    learned = [tensor.detach() for tensor in case.learned()]
    if size.kind == "logits":
        return _reference_logits(learned[0], case.fixed[0], chunks)
    return _reference_linear(learned, case.fixed, chunks)


def _reference_sum(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    return generalized_jsd(student_NV, teacher_NV, beta=BETA, backend="reference").sum()


def _reference_logits(student_NV: Tensor, teacher_NV: Tensor, chunks: list[slice]) -> Reference:
    n = len(student_NV)
    with torch.no_grad():
        value = sum(float(_reference_sum(student_NV[c].double(), teacher_NV[c].double())) for c in chunks)
    rows = torch.linspace(0, n - 1, min(n, _CHECKED_ROWS), device=student_NV.device).round().long()
    gradients = []
    for row in rows.tolist():
        leaf = student_NV[row : row + 1].double().requires_grad_()
        loss = _reference_sum(leaf, teacher_NV[row : row + 1].double()) / n
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    return Reference(value / n, [torch.cat(gradients)], [rows])


def _reference_linear(learned: list[Tensor], fixed: list[Tensor], chunks: list[slice]) -> Reference:
    hidden_NH, weight_VH = learned[0].double(), learned[1].double().requires_grad_()
    teacher_hidden_NH, teacher_weight_VH = (tensor.double() for tensor in fixed)
    value, hidden_gradients = 0.0, []
    weight_gradient = torch.zeros_like(weight_VH)
    for chunk in chunks:
        leaf = hidden_NH[chunk].requires_grad_()
        teacher_NV = F.linear(teacher_hidden_NH[chunk], teacher_weight_VH)
        loss = _reference_sum(F.linear(leaf, weight_VH), teacher_NV) / len(hidden_NH)
        to_hidden, to_weight = torch.autograd.grad(loss, [leaf, weight_VH])
        value += float(loss.detach())
        hidden_gradients.append(to_hidden)
        weight_gradient += to_weight
    return Reference(value, [torch.cat(hidden_gradients), weight_gradient], [None, None])


class DisagreementError(Exception):
    """A contender's value or gradient is not that of the reference."""


def check(contender: Contender, case: Case, expected: Reference) -> tuple[float, float]:
    """Relative errors of the value and of the gradients (in the 2-norm, the largest of them).

    Raises:
        DisagreementError: one of them is larger than the contender's arithmetic explains.
    """
    learned = case.learned()
    loss = contender.mean_jsd(*learned, *case.fixed)
    gradients = torch.autograd.grad(loss, learned)
    value_error = abs(float(loss.detach()) - expected.value) / expected.value
    errors = []
    for gradient, wanted, rows in zip(gradients, expected.gradients, expected.rows, strict=True):
        seen = (gradient if rows is None else gradient[rows]).double()
        errors.append(float((seen - wanted).norm() / wanted.norm()))
    allowed = contender.error_allowed(case.size.dtype)
    # Not (error > allowed), which NaN would pass.
    if not (value_error <= allowed and all(error <= allowed for error in errors)):
        raise DisagreementError(
            f"relative error of the value {value_error:.2g}, of the gradient {max(errors):.2g}; "
            f"at most {allowed:g} is explained by rounding"
        )
    return value_error, max(errors)


@dataclass(slots=True)
class Measured:
    """What is known about one contender at one size."""

    contender: Contender
    errors: tuple[float, float]
    peak: int
    forward_ms: list[float] = field(default_factory=list)
    both_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """Rows as they go into the JSON; what did not run, and why; whether a contender was wrong."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    disagreed: bool = False


def run(
    sizes: list[Size],
    found: list[Contender],
    device: torch.device,
    *,
    repeats: int,
    report: Callable[[str], None],
) -> tuple[Results, float]:
    """Measure all sizes; returns the results and the copy bandwidth in bytes a second.

    Every contender is checked, then its memory is measured, which also warms it up; then all are timed in
    turns, so that a change of clock or load hits all of them alike.
    """
    stopwatch = Stopwatch(device)
    bandwidth = CopyBandwidth(device, stopwatch)
    results = Results()
    for size in sizes:
        suitable = [contender for contender in found if contender.kind == size.kind]
        label = f"N={size.n} V={size.v}" + (f" H={size.hidden}" if size.hidden else "")
        try:
            case = Case(size, device)
            report(f"{label}: float64 reference")
            expected = reference(case)
        except torch.OutOfMemoryError as error:
            results.skipped += [_skip(contender, size, _first_line(error)) for contender in suitable]
            continue
        ready = []
        for contender in suitable:
            report(f"{label}: {contender.name}")
            measured = _prepare(contender, case, expected, results)
            if measured is not None:
                ready.append(measured)
        products: list[float] = []
        for turn in range(repeats):
            report(f"{label}: turn {turn + 1} of {repeats}")
            bandwidth.sample()
            if size.kind == "linear":
                products.append(_product(case, stopwatch))
            for measured in ready:
                _time(measured, case, stopwatch)
        results.rows += [_row(measured, size, products) for measured in ready]
    for row in results.rows:
        _add_floor(row, bandwidth.bytes_per_s)
    return results, bandwidth.bytes_per_s


def _prepare(contender: Contender, case: Case, expected: Reference, results: Results) -> Measured | None:
    """Check the contender and measure its memory; None, and an entry in `skipped`, if it cannot run."""
    if contender.foreign:
        torch.compiler.reset()  # one graph a size, and no limit on how many sizes there may be
    try:
        errors = check(contender, case, expected)
        learned = case.learned()
        peak = peak_extra_bytes(lambda: _forward_backward(contender, learned, case.fixed), case.device)
        _forward(contender, case.learned(), case.fixed)  # compiles anew where no gradient is wanted
        return Measured(contender, errors, peak)
    except DisagreementError as error:
        results.disagreed = True
        reason = str(error)
    except torch.OutOfMemoryError as error:
        reason = _first_line(error)
    except Exception as error:
        if not contender.foreign:
            raise
        reason = f"{type(error).__name__}: {_first_line(error)}"
    results.skipped.append(_skip(contender, case.size, reason))
    return None


def _forward_backward(contender: Contender, learned: list[Tensor], fixed: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(contender.mean_jsd(*learned, *fixed), learned)


@torch.no_grad()
def _forward(contender: Contender, learned: list[Tensor], fixed: list[Tensor]) -> Tensor:
    return contender.mean_jsd(*learned, *fixed)


def _time(measured: Measured, case: Case, stopwatch: Stopwatch) -> None:
    contender, fixed = measured.contender, case.fixed
    learned = [tensor.detach() for tensor in case.learned()]
    measured.forward_ms.append(stopwatch(lambda: _forward(contender, learned, fixed)))
    learned = case.learned()
    measured.both_ms.append(stopwatch(lambda: _forward_backward(contender, learned, fixed)))


def _product(case: Case, stopwatch: Stopwatch) -> float:
    """One product of this size: a head's logits, of which loss and gradients need four."""
    with torch.no_grad():
        return stopwatch(lambda: F.linear(case.fixed[0], case.fixed[1]))


def _row(measured: Measured, size: Size, products: list[float]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "n": size.n,
        "v": size.v,
        "h": size.hidden,
        "dtype": str(size.dtype).removeprefix("torch."),
        "impl": measured.contender.name,
        "fwd_ms": min(measured.forward_ms),
        "fwd_median_ms": statistics.median(measured.forward_ms),
        "fwd_bwd_ms": min(measured.both_ms),
        "fwd_bwd_median_ms": statistics.median(measured.both_ms),
        "peak_extra_bytes": measured.peak,
        "value_error": measured.errors[0],
        "grad_error": measured.errors[1],
    }
    if products:
        row["floor_ms"] = 4 * min(products)
    else:
        row["bytes_floor"] = size.floor_bytes
    return row


def _add_floor(row: dict[str, Any], bytes_per_s: float) -> None:
    if "bytes_floor" in row:
        row["floor_ms"] = 1e3 * row["bytes_floor"] / bytes_per_s
    row["fraction_of_floor"] = row["floor_ms"] / row["fwd_bwd_ms"]


def _skip(contender: Contender, size: Size, reason: str) -> dict[str, Any]:
    return {"impl": contender.name, "n": size.n, "v": size.v, "h": size.hidden, "reason": reason}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
