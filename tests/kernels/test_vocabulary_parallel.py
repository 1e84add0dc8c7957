"""Each rank with its part of the vocabulary: equal to whole rows; and the head under FSDP. Two gloo ranks.

The ranks start once, run every check and report its traceback, or nothing.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from forge_composer.kernels import (
    generalized_jsd,
    linear_jsd,
    linear_token_logprobs,
    token_logprobs,
    topk_jsd,
)
from tests.kernels.jsd_formulas import golden_cases, random_logits
from tests.training.ranks import run_ranks

Check = Callable[[DeviceMesh], None]


def shard(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor, mesh, [Shard(1)])


def rows_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a head, as torch.chunk splits them: uneven, or none at all."""
    local: Tensor = distribute_tensor(tensor, mesh, [Shard(0)]).to_local()
    return local.clone()


def assert_same_jsd(
    mesh: DeviceMesh,
    student: Tensor,
    teacher: Tensor,
    weight: Tensor,
    function: Callable[..., Tensor] = generalized_jsd,
    tolerance: float = 2e-6,
    inplace_check: bool = True,
    **options: Any,
) -> None:
    """Values on every rank and the gradient's shards are those of whole rows."""
    whole = student.double().requires_grad_()
    expected = function(whole, teacher.double(), token_weight_N=weight.double(), **options)
    (expected * weight).sum().backward()
    leaf = shard(student, mesh).requires_grad_()
    for inplace in (False, True) if inplace_check else (False,):
        leaf.grad = None
        more = {"inplace_grad": True} if inplace else {}
        value = function(leaf * 1.0, shard(teacher, mesh), token_weight_N=weight, **more, **options)
        assert not isinstance(value, DTensor)
        (value * weight).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        assert leaf.grad.placements == leaf.placements
        torch.testing.assert_close(value.double(), expected.detach(), atol=tolerance, rtol=tolerance)
        gradient = leaf.grad.full_tensor().double()
        torch.testing.assert_close(gradient, whole.grad, atol=tolerance, rtol=10 * tolerance)
        rank_0 = value.detach().clone()
        dist.broadcast(rank_0, 0)
        assert torch.equal(value, rank_0)


def golden(mesh: DeviceMesh) -> None:
    """17, 33, 9 and 11 columns: every split is uneven."""
    for case in golden_cases():
        leaf = shard(case.student.float(), mesh).requires_grad_()
        value = generalized_jsd(
            leaf,
            shard(case.teacher.float(), mesh),
            beta=case.beta,
            temperature=case.temperature,
            token_weight_N=case.weight.float(),
        )
        (value * case.weight).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(value.detach().double(), case.per_token, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(leaf.grad.full_tensor().double(), case.gradient, atol=1e-5, rtol=1e-5)


def uneven_and_empty_shards(mesh: DeviceMesh) -> None:
    for columns in (40, 41, 3, 1):
        student, teacher, weight = random_logits(5, columns, seed=columns)
        for beta in (0.0, 0.3, 1.0):
            assert_same_jsd(mesh, student, teacher, weight, beta=beta, temperature=0.7)
    assert_same_jsd(mesh, *random_logits(0, 7))


def masks_and_infinities(mesh: DeviceMesh) -> None:
    """Masked columns, a rank with nothing but masked columns, dead rows, infinite rows, unread rows."""
    student, teacher, weight = random_logits(6, 10)
    student[:, 3], teacher[:, 3] = -math.inf, -math.inf
    student[0, 5:], teacher[0, 5:] = -math.inf, -math.inf
    student[1] = -math.inf
    teacher[2] = -math.inf
    student[3, 7] = -math.inf
    teacher[4, 1] = -math.inf
    for beta in (0.0, 0.5, 1.0):
        assert_same_jsd(mesh, student, teacher, weight, beta=beta)
    broken = student.clone()
    broken[5, 2] = math.nan  # on one rank
    assert generalized_jsd(shard(broken, mesh), shard(teacher, mesh))[5].isnan()
    weight[5] = 0.0
    expected = generalized_jsd(student, teacher, token_weight_N=weight)
    student[5], teacher[5] = math.nan, math.inf
    leaf = shard(student, mesh).requires_grad_()
    value = generalized_jsd(leaf, shard(teacher, mesh), token_weight_N=weight)
    (value * weight).sum().backward()
    torch.testing.assert_close(value.detach(), expected, atol=1e-6, rtol=1e-6)
    assert leaf.grad is not None
    assert leaf.grad.to_local().isfinite().all()
    assert not leaf.grad.to_local()[5].any()


def equal_rows(mesh: DeviceMesh) -> None:
    student, _, _ = random_logits(5, 33, dtype=torch.bfloat16)
    for beta in (0.0, 0.1, 1.0):
        leaf = shard(student, mesh).requires_grad_()
        value = generalized_jsd(leaf, shard(student, mesh), beta=beta)
        value.sum().backward()
        assert not value.any()
        assert leaf.grad is not None
        assert not leaf.grad.to_local().any()


def two_collectives_forward_and_none_backward(mesh: DeviceMesh) -> None:
    student, teacher, weight = random_logits(5, 33)
    leaf = shard(student, mesh).requires_grad_()
    teacher_shard = shard(teacher, mesh)
    for tail in (None, False, True):
        with CommDebugMode() as forward:
            if tail is None:
                value = generalized_jsd(leaf, teacher_shard, token_weight_N=weight)
            else:
                value = topk_jsd(leaf, teacher_shard, k=4, support="student", tail=tail)
        with CommDebugMode() as backward:
            value.sum().backward()
        assert forward.get_total_counts() == (1 if tail is False else 2)
        assert backward.get_total_counts() == 0


def logits_of_a_tensor_parallel_layer(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, 33, bias=False)
    hidden, (_, teacher, weight) = torch.randn(5, 6), random_logits(5, 33)
    whole_hidden, sharded_hidden = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    sharded = parallelize_module(
        copy.deepcopy(head), mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    )
    (generalized_jsd(head(whole_hidden), teacher, token_weight_N=weight) * weight).sum().backward()
    logits = sharded(sharded_hidden)
    value = generalized_jsd(logits, shard(teacher, mesh), token_weight_N=weight, inplace_grad=True)
    (value * weight).sum().backward()
    assert isinstance(sharded.weight.grad, DTensor)
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), head.weight.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sharded_hidden.grad, whole_hidden.grad, atol=1e-6, rtol=1e-5)


def in_place_another_user_gets_an_error(mesh: DeviceMesh) -> None:
    student, teacher, _ = random_logits(3, 8)
    logits = shard(student, mesh).requires_grad_() * 1.0
    other = logits.square().sum().full_tensor()
    loss = generalized_jsd(logits, shard(teacher, mesh), inplace_grad=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def other_layouts_are_refused(mesh: DeviceMesh) -> None:
    student, teacher, _ = random_logits(4, 8)
    replicated = distribute_tensor(teacher, mesh, [Replicate()])
    by_token = distribute_tensor(teacher, mesh, [Shard(0)])
    for other in (replicated, by_token):
        with pytest.raises(ValueError, match="sharded over the vocabulary"):
            generalized_jsd(shard(student, mesh), other)
        with pytest.raises(ValueError, match="sharded over the vocabulary"):
            topk_jsd(other, other, k=2, support="student", tail=True)
    with pytest.raises(ValueError, match="both be DTensors"):
        generalized_jsd(shard(student, mesh), teacher)
    with pytest.raises(ValueError, match="whole rows"):
        generalized_jsd(shard(student, mesh), shard(teacher, mesh), backend="reference")


def top_k(mesh: DeviceMesh) -> None:
    """Also with more tokens in the support than a rank has columns, and a rank that has none of them."""
    for columns, k in ((41, 5), (7, 5), (3, 2), (1, 1), (2, 1)):
        student, teacher, weight = random_logits(6, columns, seed=k)
        student[0] += 100 * (torch.arange(columns) < (columns + 1) // 2)
        for support in ("student", "teacher"):
            for tail in (True, False):
                for beta in (0.0, 0.3):
                    options: dict[str, Any] = {"k": k, "support": support, "tail": tail, "beta": beta}
                    assert_same_jsd(
                        mesh,
                        student,
                        teacher,
                        weight,
                        topk_jsd,
                        tolerance=3e-6,
                        inplace_check=False,
                        temperature=0.7,
                        **options,
                    )


def linear_divergence(mesh: DeviceMesh) -> None:
    for columns, budget in ((41, 1 << 20), (41, 500), (1, 1)):
        torch.manual_seed(0)
        hidden, teacher_hidden = torch.randn(7, 6), torch.randn(7, 4)
        head, teacher_head = torch.randn(columns, 6), torch.randn(columns, 4)
        weight = torch.rand(7)
        weight[2] = 0.0

        def run(head: Tensor, teacher_head: Tensor, group: Any, budget: int = budget) -> tuple[Tensor, ...]:
            leaf, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()  # noqa: B023
            result = linear_jsd(
                leaf,
                head,
                teacher_hidden,  # noqa: B023
                teacher_head,
                beta=0.3,
                temperature=0.8,
                token_weight_N=weight,  # noqa: B023
                per_token_cap=1.0,
                memory_budget=budget,
                group=group,
            )
            result.loss.backward()
            assert leaf.grad is not None
            assert head.grad is not None
            return result.loss.detach(), result.per_token_N, leaf.grad, head.grad

        expected = run(head, teacher_head, None)
        ours = run(rows_of(head, mesh), rows_of(teacher_head, mesh), mesh.get_group())
        dist.all_reduce(ours[2])  # the hidden states' gradient is a part of a sum
        ours = (*ours[:3], _gather_rows(ours[3]))
        for value, reference in zip(ours, expected, strict=True):
            torch.testing.assert_close(value, reference, atol=3e-6, rtol=1e-5)


def linear_logprobs(mesh: DeviceMesh) -> None:
    for columns, budget in ((41, 1 << 20), (41, 500), (1, 1)):
        torch.manual_seed(0)
        hidden, head = torch.randn(7, 6), torch.randn(columns, 6)
        targets, weight = torch.randint(columns, (7,)), torch.randn(7)
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        expected, expected_entropy = token_logprobs(leaves[0] @ leaves[1].t(), targets, temperature=0.8)
        (expected * weight).sum().backward()
        ours = [hidden.clone().requires_grad_(), rows_of(head, mesh).requires_grad_()]
        start = min(columns, mesh.get_local_rank() * -(-columns // mesh.size()))
        value, entropy = linear_token_logprobs(
            *ours,
            targets,
            temperature=0.8,
            memory_budget=budget,
            group=mesh.get_group(),
            vocab_start=start,
        )
        (value * weight).sum().backward()
        torch.testing.assert_close(value, expected, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(entropy, expected_entropy, atol=3e-6, rtol=1e-5)
        assert ours[0].grad is not None
        assert ours[1].grad is not None
        dist.all_reduce(ours[0].grad)
        torch.testing.assert_close(ours[0].grad, leaves[0].grad, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(_gather_rows(ours[1].grad), leaves[1].grad, atol=3e-6, rtol=1e-5)


def _gather_rows(rows: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    return torch.cat(parts)


class Head(nn.Linear):
    """An LM head that returns log-probabilities and a divergence instead of logits."""

    def forward(self, hidden: Tensor, teacher: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logprobs, _ = linear_token_logprobs(hidden, self.weight, targets, memory_budget=600)
        divergence = linear_jsd(hidden, self.weight, teacher, self.weight, memory_budget=600)
        return logprobs, divergence.loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), Head(6, 33, bias=False)

    def forward(self, inputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(inputs)
        logprobs, divergence = self.head(hidden.to(self.head.weight.dtype), teacher, targets)
        return divergence.float() - logprobs.float().sum()


def inside_an_fsdp_module(mesh: DeviceMesh) -> None:
    """The head's weight is freed after forward and gathered again for backward, also in bfloat16."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        torch.manual_seed(0)
        model = Model()
        sharded = copy.deepcopy(model)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in (sharded.head, sharded):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        inputs, teacher, targets = torch.randn(8, 6), torch.randn(8, 6), torch.randint(33, (8,))
        model(inputs, teacher, targets).backward()
        mine = slice(dist.get_rank(), None, 2)
        sharded(inputs[mine].to(dtype), teacher[mine].to(dtype), targets[mine]).backward()
        for parameter, reference in zip(sharded.parameters(), model.parameters(), strict=True):
            assert isinstance(parameter.grad, DTensor)
            gradient = parameter.grad.full_tensor()
            assert reference.grad is not None
            error = (gradient - reference.grad).norm() / reference.grad.norm()
            assert error < tolerance, error


CHECKS: list[Check] = [
    golden,
    uneven_and_empty_shards,
    masks_and_infinities,
    equal_rows,
    two_collectives_forward_and_none_backward,
    logits_of_a_tensor_parallel_layer,
    in_place_another_user_gets_an_error,
    other_layouts_are_refused,
    top_k,
    linear_divergence,
    linear_logprobs,
    inside_an_fsdp_module,
]


def run_checks() -> dict[str, str]:
    """Worker: traceback of each check, empty if it passed."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    failures = {}
    for check in CHECKS:
        try:
            check(mesh)
            failures[check.__name__] = ""
        except BaseException:
            failures[check.__name__] = traceback.format_exc()
    dist.destroy_process_group()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    """What every rank reports."""
    return run_ranks(run_checks, 2)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_two_ranks(name: str, failures: list[dict[str, str]]) -> None:
    for rank, report in enumerate(failures):
        assert report[name] == "", f"rank {rank}"
