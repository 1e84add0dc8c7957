"""The Triton kernels on a GPU: what the interpreter checks, and what it cannot.

`compute-sanitizer --tool memcheck` (also `racecheck`, `synccheck`, `initcheck`) before
`python -m pytest -m gpu tests/kernels/test_triton_gpu.py -k sanitizer` checks every schedule on small inputs.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from forge_composer.kernels import jsd, token_logprobs
from tests.kernels.jsd_formulas import random_logits
from tests.kernels.jsd_triton_cases import *  # noqa: F403
from tests.kernels.jsd_triton_cases import assert_near, reference, run
from tests.kernels.logprob_triton_cases import *  # noqa: F403
from tests.kernels.logprob_triton_cases import plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = ["staged", "cluster", "cooperative"]
QWEN3 = 151_936


def skip_without_clusters(schedule: str) -> None:
    if schedule == "cluster" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("no clusters of 16 thread blocks")


@pytest.mark.parametrize("schedule", WIDE)
@pytest.mark.parametrize("width", [16_385, 32_000, 50_257, 128_256, QWEN3])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_large_vocabularies(width: int, beta: float, schedule: str) -> None:
    skip_without_clusters(schedule)
    student, teacher, weight = (x.cuda() for x in random_logits(40, width, dtype=torch.bfloat16))
    weight[3::7] = 0.0
    expected = reference(student, teacher, weight, beta, 0.9)
    student[3::7] = torch.nan
    found = run(student, teacher, weight, beta=beta, temperature=0.9, schedule=schedule)
    assert_near(found, expected, 2e-5)


@pytest.mark.parametrize("schedule", [*WIDE, "resident"])
def test_equal_rows_of_a_large_vocabulary_give_exactly_zero(schedule: str) -> None:
    skip_without_clusters(schedule)
    width = 16_384 if schedule == "resident" else QWEN3
    student = random_logits(8, width, dtype=torch.bfloat16)[0].cuda()
    for beta in (0.0, 0.1, 0.5, 1.0):
        value, gradient = run(student, student.clone(), beta=beta, temperature=0.6, schedule=schedule)
        assert not value.any()
        assert not gradient.any()


@pytest.mark.parametrize("schedule", WIDE)
def test_more_logits_than_32_bits_count(schedule: str) -> None:
    skip_without_clusters(schedule)
    count = 2**31 // QWEN3 + 20
    student = torch.randn(count, QWEN3, device="cuda", dtype=torch.bfloat16)
    teacher = torch.randn(count, QWEN3, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(count, device="cuda")
    weight[:4], weight[-4:] = 1.0, 1.0
    ends = torch.cat((torch.arange(4), torch.arange(count - 4, count))).cuda()
    expected = reference(student[ends], teacher[ends])
    value = jsd.jsd_triton(
        student,
        teacher,
        weight,
        beta=0.5,
        temperature=1.0,
        need_grad=True,
        grad_out=student,
        schedule=schedule,  # type: ignore[arg-type]
    )
    assert_near((value[ends], student[ends]), expected, 2e-5)
    assert value.count_nonzero() == 8
    assert not student[4:-4].any()


def test_log_probabilities_of_more_logits_than_32_bits_count() -> None:
    count = 2**31 // QWEN3 + 20
    logits = torch.randn(count, QWEN3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(QWEN3, (count,), device="cuda")
    logprobs, _ = token_logprobs(logits, targets)
    expected, _ = plain(logits[-4:].detach(), targets[-4:], 1.0)
    torch.testing.assert_close(logprobs[-4:], expected.float(), atol=5e-6, rtol=2e-6)
    logprobs[-4:].sum().backward()
    assert logits.grad is not None
    exact = -torch.softmax(logits[-4:].detach().double(), 1)
    exact[torch.arange(4), targets[-4:]] += 1.0
    torch.testing.assert_close(logits.grad[-4:].double(), exact, atol=1e-6, rtol=1e-2)
    assert not logits.grad[:-4].any()


@pytest.mark.parametrize("schedule", ["cluster", "cooperative"])
def test_programs_that_wait_for_each_other_always_agree(schedule: str) -> None:
    """Many launches, on two streams at once, of more rows than are in flight: bitwise the same each time."""
    skip_without_clusters(schedule)
    student, teacher, weight = (x.cuda() for x in random_logits(600, 65_536, dtype=torch.bfloat16))
    options = {"beta": 0.5, "temperature": 1.0, "need_grad": True, "schedule": schedule}

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(student)
        return jsd.jsd_triton(student, teacher, weight, grad_out=gradient, **options), gradient  # type: ignore[arg-type]

    first = launch()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(25):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(launch())
        torch.cuda.synchronize()
        for result in results:
            assert torch.equal(result[0], first[0])
            assert torch.equal(result[1], first[1])


@pytest.mark.parametrize("schedule", [*WIDE, "resident"])
def test_small_inputs_for_a_sanitizer(schedule: str) -> None:
    skip_without_clusters(schedule)
    student, teacher, weight = (x.cuda() for x in random_logits(3, 16_001, dtype=torch.bfloat16))
    weight[1] = 0.0
    expected = reference(student, teacher, weight)
    assert_near(run(student, teacher, weight, schedule=schedule), expected, 2e-5)
    jsd.scale_rows_(student, weight)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu_than_the_current_one() -> None:
    student, teacher, weight = (x.to("cuda:1") for x in random_logits(3, 700))
    for schedule in ("staged", "resident"):
        assert_near(run(student, teacher, weight, schedule=schedule), reference(student, teacher, weight))
