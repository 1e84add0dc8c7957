"""What the Triton kernels of the divergence must get right, in the interpreter as on a GPU.

Not collected by itself. `test_jsd_triton.py` runs it in the interpreter (by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/jsd_triton_cases.py`), `test_triton_gpu.py` takes its tests to a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_composer.kernels import generalized_jsd, jsd, linear_jsd
from forge_composer.kernels.jsd_torch import jsd_reference
from tests.kernels.jsd_formulas import GoldenCase, golden_cases, random_logits

INF = math.inf
SCHEDULES = ["staged", "resident", "cooperative"]
CASES = golden_cases()


def run(
    student: Tensor, teacher: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Value and gradient, once beside the student and once over it: bitwise the same."""
    weight = torch.ones(len(student), device=student.device) if weight is None else weight
    options = {"beta": 0.5, "temperature": 1.0, "need_grad": True} | options
    gradient = torch.full_like(student, 7.0)
    value = jsd.jsd_triton(student, teacher, weight, grad_out=gradient, **options)
    over = student.clone()
    again = jsd.jsd_triton(over, teacher, weight, grad_out=over, **options)
    torch.testing.assert_close(again, value, atol=0.0, rtol=0.0, equal_nan=True)
    torch.testing.assert_close(over, gradient, atol=0.0, rtol=0.0, equal_nan=True)
    return value, gradient


def reference(
    student: Tensor,
    teacher: Tensor,
    weight: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    weight = torch.ones(len(student), device=student.device) if weight is None else weight
    leaf = student.double().requires_grad_()
    value = jsd_reference(leaf, teacher.double(), weight, beta=beta, temperature=temperature)
    (value * weight)[value.isfinite()].sum().backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_near(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-5
) -> None:
    torch.testing.assert_close(found[0].double(), expected[0].double(), atol=tolerance, rtol=tolerance)
    rounding = torch.finfo(found[1].dtype).eps if found[1].dtype != torch.float32 else 0.0
    torch.testing.assert_close(
        found[1].double(), expected[1].double(), atol=tolerance, rtol=tolerance + rounding
    )


@pytest.mark.parametrize("schedule", ["staged", "resident"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_golden(case: GoldenCase, schedule: str, device: str) -> None:
    student, teacher, weight = (
        tensor.to(device, torch.float32) for tensor in (case.student, case.teacher, case.weight)
    )
    found = run(student, teacher, weight, beta=case.beta, temperature=case.temperature, schedule=schedule)
    assert_near(found, (case.per_token.to(device), case.gradient.to(device)))


@pytest.mark.parametrize("schedule", ["staged", "resident", "cluster"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_several_tiles_strided_rows_and_skipped_rows(
    beta: float, dtype: torch.dtype, schedule: str, device: str
) -> None:
    """9,001 columns: three tiles of 4,096, the last one ragged, at an odd place of longer rows."""
    student, teacher, weight = (tensor.to(device) for tensor in random_logits(4, 9001, dtype=dtype))
    weight[1] = 0.0
    expected = reference(student, teacher, weight, beta, 0.7)
    student[1], teacher[1, 3] = math.nan, math.nan
    long = torch.zeros(8, 9050, dtype=dtype, device=device)
    long[::2, 13:9014] = student
    strided = long[::2, 13:9014]
    value = jsd.jsd_triton(
        strided,
        teacher,
        weight,
        beta=beta,
        temperature=0.7,
        need_grad=True,
        grad_out=strided,
        schedule=schedule,
    )
    assert_near((value, strided), expected, 2e-5)
    assert value[1] == 0.0
    assert not strided[1].any()
    strided.zero_()
    assert not long.any()  # nothing was written beside the rows


@pytest.mark.parametrize("width", [1, 2, 31, 512, 513, 4096, 4097])
def test_schedules_agree_at_any_width(width: int, device: str) -> None:
    student, teacher, weight = (tensor.to(device) for tensor in random_logits(2, width))
    expected = reference(student, teacher, weight)
    for schedule in ("auto", "staged", "resident", "cluster", "cooperative"):
        assert_near(run(student, teacher, weight, schedule=schedule), expected)


def test_columns_that_do_not_lie_side_by_side(device: str) -> None:
    student, teacher, weight = (tensor.to(device) for tensor in random_logits(3, 40))
    expected = reference(student, teacher, weight)
    for schedule in ("staged", "resident"):
        columns = student.t().contiguous().t()
        assert columns.stride(1) != 1
        value = jsd.jsd_triton(
            columns,
            teacher.t().contiguous().t(),
            weight,
            beta=0.5,
            temperature=1.0,
            need_grad=True,
            grad_out=columns,
            schedule=schedule,
        )
        assert_near((value, columns), expected)


def test_mixed_dtypes_and_one_teacher_row_for_all(device: str) -> None:
    student, teacher, _ = (tensor.to(device) for tensor in random_logits(3, 70))
    teacher = teacher[:1].bfloat16().expand(3, -1)
    for schedule in ("staged", "resident"):
        assert_near(run(student, teacher, schedule=schedule), reference(student, teacher))


@pytest.mark.parametrize("schedule", ["staged", "resident"])
def test_without_gradient_nothing_is_written(schedule: str, device: str) -> None:
    student, teacher, weight = (tensor.to(device) for tensor in random_logits(3, 70))
    before = student.clone()
    value = jsd.jsd_triton(
        student,
        teacher,
        weight,
        beta=0.5,
        temperature=1.0,
        need_grad=False,
        grad_out=None,
        schedule=schedule,
    )
    assert torch.equal(student, before)
    assert torch.equal(value, run(student, teacher, weight, schedule=schedule)[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.7, 1.0])
def test_equal_rows_give_exactly_zero(beta: float, schedule: str, device: str) -> None:
    student, _, _ = (tensor.to(device) for tensor in random_logits(3, 1000, dtype=torch.bfloat16))
    student[1] *= 300.0
    student[2, ::3] = -INF
    value, gradient = run(student, student.clone(), beta=beta, temperature=0.3, schedule=schedule)
    assert value.tolist() == [0.0, 0.0, 0.0]
    assert not gradient.any()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("beta", "student", "teacher", "expected"),
    [
        (0.0, [0.0, -INF, 0.0], [0.0, 0.0, 0.0], INF),
        (0.0, [0.0, 0.0, 0.0], [0.0, -INF, 0.0], math.log(1.5)),
        (0.0, [0.0, -INF, 0.0], [1e4, 0.0, 0.0], INF),
        (0.0, [1e4, 0.0, 0.0], [0.0, 1e4, 0.0], 1e4),
        (1.0, [0.0, 0.0, 0.0], [0.0, -INF, 0.0], INF),
        (1.0, [0.0, -INF, 0.0], [0.0, 0.0, 0.0], math.log(1.5)),
        (1.0, [1e4, 0.0, 0.0], [0.0, 1e4, 0.0], 1e4),
        (0.5, [0.0, -INF, -INF], [-INF, 0.0, -INF], math.log(2.0)),
        (0.5, [1e4, 0.0, -1e4], [-1e4, 1e4, 0.0], math.log(2.0)),
        (0.1, [0.0, -INF, -INF], [-INF, 0.0, -INF], -0.1 * math.log(0.1) - 0.9 * math.log(0.9)),
        (0.0, [-INF, -INF, -INF], [0.0, 0.0, 0.0], 0.0),
        (0.5, [0.0, 0.0, 0.0], [-INF, -INF, -INF], 0.0),
        (1.0, [-INF, -INF, -INF], [-INF, -INF, -INF], 0.0),
    ],
)
def test_rows_at_the_edge(
    beta: float, student: list[float], teacher: list[float], expected: float, schedule: str, device: str
) -> None:
    rows = torch.tensor([student, [1.0, 2.0, 3.0]], device=device)
    targets = torch.tensor([teacher, [3.0, 1.0, 2.0]], device=device)
    value, gradient = run(rows, targets, beta=beta, schedule=schedule)
    assert value[0].item() == pytest.approx(expected, rel=1e-6)
    exact_value, exact_gradient = reference(rows, targets, beta=beta)
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=1e-6, rtol=1e-6)
    assert value[1].item() == pytest.approx(exact_value[1].item(), rel=1e-5)
    if expected in (0.0, INF):
        assert not gradient[0].any()


@pytest.mark.parametrize("schedule", ["staged", "resident"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("mask", [-INF, -1e30, torch.finfo(torch.float32).min])
def test_columns_masked_in_both_take_no_part(beta: float, mask: float, schedule: str, device: str) -> None:
    student, teacher, _ = (tensor.to(device) for tensor in random_logits(3, 600))
    masked = torch.zeros(600, dtype=torch.bool, device=device)
    masked[0::7] = True
    value, gradient = run(
        student.masked_fill(masked, mask), teacher.masked_fill(masked, mask), beta=beta, schedule=schedule
    )
    expected, expected_gradient = reference(student[:, ~masked], teacher[:, ~masked], beta=beta)
    assert_near((value, gradient[:, ~masked]), (expected, expected_gradient))
    assert not gradient[:, masked].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_large_logits_lose_nothing(beta: float, schedule: str, device: str) -> None:
    """Neighbours at +-1e4, where one rounding of a float32 logsumexp is 5e-4."""
    student, teacher, _ = (tensor.to(device) for tensor in random_logits(2, 50))
    student, teacher = (student * 128).round() / 128, (teacher * 128).round() / 128
    shift = torch.tensor([[1e4], [-1e4]], device=device)
    found = run(student + shift, teacher - shift, beta=beta, temperature=0.7, schedule=schedule)
    moved = (student + shift).double() - shift, (teacher - shift).double() + shift
    assert_near(found, reference(*moved, beta=beta, temperature=0.7), 2e-5)


@pytest.mark.parametrize("schedule", ["staged", "resident"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_what_is_not_a_number_shows(beta: float, bad: float, schedule: str, device: str) -> None:
    """In the value and the gradient of its row, and nowhere else."""
    student, teacher, _ = (tensor.to(device) for tensor in random_logits(3, 20))
    expected = reference(student, teacher, beta=beta)
    for tensor in (student, teacher):
        original = tensor[1, 4].item()
        tensor[1, 4] = bad
        value, gradient = run(student, teacher, beta=beta, schedule=schedule)
        assert value[1].isnan()
        assert gradient[1].isnan().all()
        assert_near((value[::2], gradient[::2]), (expected[0][::2], expected[1][::2]))
        tensor[1, 4] = original


@pytest.mark.parametrize("beta", [1e-12, 1e-6, 0.999999])
def test_beta_close_to_the_ends(beta: float, device: str) -> None:
    student, teacher, _ = (tensor.to(device) for tensor in random_logits(2, 50, gap=5.0))
    student[0, 0], teacher[0, 0] = -200.0, 20.0
    student[1, 0], teacher[1, 0] = 20.0, -200.0
    expected = reference(student, teacher, beta=beta)
    assert_near(run(student, teacher, beta=beta), expected, 1e-6)


@pytest.mark.parametrize("parts", [[300, 300], [1, 599], [250, 0, 350]])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("work", [torch.float32, torch.float64])
def test_shards_of_the_vocabulary(beta: float, parts: list[int], work: torch.dtype, device: str) -> None:
    student, teacher, weight = (tensor.to(device) for tensor in random_logits(5, 600))
    weight[2] = 0.0
    student[3, :10], teacher[3, :10] = -INF, -INF
    expected = reference(student, teacher, weight, beta, 0.8)
    student[2] = math.nan
    shards = list(zip(student.split(parts, 1), teacher.split(parts, 1), strict=True))
    statistics = torch.stack([jsd.row_statistics(*shard, weight, 0.8) for shard in shards])
    assert statistics.dtype == torch.float32
    assert statistics[:, 0::2, 2].isneginf().all()
    assert not statistics[:, 1::2, 2].any()
    highest, total = statistics[:, 0::2].to(work), statistics[:, 1::2].to(work)
    log_norm = torch.logsumexp(highest + total.log(), dim=0)
    log_norm[:, 2] = 0.0
    inputs = (log_norm, beta, 0.8)
    value, inner = torch.stack([jsd.row_sums(*shard, weight, *inputs) for shard in shards]).sum(0)
    gradient = torch.full_like(student, 7.0)
    for shard, out in zip(shards, gradient.split(parts, 1), strict=True):
        jsd.row_gradients(*shard, weight, log_norm, inner, value, beta, 0.8, out)
    assert_near((value, gradient), expected)
    plain = torch.logsumexp(student.double() / 0.8, 1)
    kept = weight != 0
    torch.testing.assert_close(log_norm[0, kept].double(), plain[kept], atol=2e-6, rtol=1e-6)


def test_scale_rows(device: str) -> None:
    """Rows whose factor is 1 are not touched, whatever they hold."""
    for dtype in (torch.float32, torch.bfloat16):
        long = torch.randn(5, 5000, device=device).to(dtype)
        long[1] = math.nan
        rows = long[:, 3:4700]
        factor = torch.tensor([2.0, 1.0, 0.0, 1.0, -0.3], device=device)
        expected = long.clone()
        scaled = (rows.float() * factor[:, None]).to(dtype)
        expected[:, 3:4700] = torch.where((factor == 1)[:, None], rows, scaled)
        # The interpreter cuts off where a GPU rounds to bfloat16.
        rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        jsd.scale_rows_(rows, factor)
        torch.testing.assert_close(long, expected, atol=0.0, rtol=rounding, equal_nan=True)
        assert torch.equal(long[3], expected[3])
        columns = torch.randn(6, 4, device=device).to(dtype).t()
        expected = columns * 2.0
        jsd.scale_rows_(columns, torch.full((4,), 2.0, device=device))
        assert torch.equal(columns, expected)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_do(shape: tuple[int, int], device: str) -> None:
    empty, weight = torch.empty(shape, device=device), torch.ones(shape[0], device=device)
    for schedule in ("auto", "staged", "cluster"):
        assert run(empty, empty, weight, schedule=schedule)[0].tolist() == [0.0] * shape[0]
    assert jsd.row_statistics(empty, empty, weight, 1.0).shape == (4, shape[0])
    jsd.scale_rows_(empty, weight)


@pytest.mark.parametrize("inplace", [False, True])
def test_through_the_public_function(inplace: bool, device: str) -> None:
    student, teacher, weight = (tensor.to(device) for tensor in random_logits(4, 300, dtype=torch.bfloat16))
    weight[1] = 0.0
    results = []
    for backend in ("triton", "torch"):
        leaf = student.clone().requires_grad_()
        logits = leaf * 1.0
        value = generalized_jsd(
            logits,
            teacher,
            beta=0.5,
            temperature=2.0,
            token_weight_N=weight,
            inplace_grad=inplace,
            backend=backend,  # type: ignore[arg-type]
        )
        (value * weight * 3.0).sum().backward()
        assert leaf.grad is not None
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=2e-2)  # three roundings


def test_behind_an_lm_head(device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (torch.randn(9, 16, generator=draw).to(device) for _ in range(2))
    head = torch.randn(700, 16, generator=draw).to(device)
    results = []
    for backend in ("triton", "torch"):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        result = linear_jsd(
            *leaves,
            teacher_hidden,
            head,
            per_token_cap=0.4,
            memory_budget=4 * 700 * 8,
            backend=backend,  # type: ignore[arg-type]
        )
        result.loss.backward()
        results.append((result.loss.detach(), result.per_token_N, leaves[0].grad, leaves[1].grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
