"""The LM head of the policy: it lends its weight to whoever wants something of the logits.

The logits of a micro-batch, [N, V], are the largest tensor of a training step, and nobody needs them whole.
So the head does not return them: it calls a function with hidden states and its own weight, which makes the
logits in chunks and reduces them (`forge_composer.kernels`). The call goes through the module, so that FSDP's
hooks gather the weight before it and reduce its gradient afterwards, and tensor parallelism is settled here.

Shape suffixes: N = selected tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from forge_composer.kernels import linear_token_logprobs, token_logprobs
from forge_composer.training import titan


@dataclass(slots=True, frozen=True)
class HeadWeight:
    """The head's weight while it is gathered.

    Attributes:
        weight_VD: all rows, or those of this tensor-parallel rank.
        vocab: rows over all ranks.
        mesh: the tensor-parallel ranks that hold the other rows; None without tensor parallelism.
    """

    weight_VD: Tensor
    vocab: int
    mesh: DeviceMesh | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of `mesh`."""
        return None if self.mesh is None else self.mesh.get_group()

    @property
    def vocab_start(self) -> int:
        """Token id of the first row here."""
        if self.mesh is None:
            return 0
        return min(self.vocab, self.mesh.get_local_rank() * -(-self.vocab // self.mesh.size()))

    def logits(self, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        """Whole logits, [N, V]: a DTensor under tensor parallelism, whose gradient is a partial sum."""
        logits_NV = F.linear(hidden_ND, weight_VD)
        if self.mesh is None:
            return logits_NV
        shape = torch.Size((len(hidden_ND), self.vocab))
        sharded: Tensor = DTensor.from_local(
            logits_NV, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(self.vocab, 1)
        )
        return sharded


HeadReader = Callable[[Tensor, HeadWeight], tuple[Tensor, ...]]
"""Makes something of hidden states [N, D] and the weight. Under tensor parallelism the gradient that it
returns for the hidden states is this rank's part of a sum. A tuple, since that is what FSDP looks for tensors
in."""


class LMHead(titan.Linear):  # type: ignore[misc]  # torchtitan ships no types
    """torchtitan's linear layer, sharded over its rows, whose `forward` applies a reader."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Linear.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def parallelize(self, parallel_dims: titan.ParallelDims) -> None:
        """Shard the weight, and leave `forward` alone: it takes care of the hidden states itself."""
        self._parallelized = True
        self._distribute_states(parallel_dims)

    def forward(self, hidden_ND: Tensor, reader: HeadReader) -> tuple[Tensor, ...]:
        """What the reader makes of `hidden_ND`, [N, D], the same on all tensor-parallel ranks."""
        weight: Any = self.weight
        if not isinstance(weight, DTensor):
            return reader(hidden_ND, HeadWeight(weight, self.out_features))
        mesh = weight.device_mesh
        replicated = DTensor.from_local(hidden_ND, mesh, [Replicate()], run_check=False)
        held = HeadWeight(weight.to_local(), self.out_features, mesh)
        return reader(replicated.to_local(grad_placements=[Partial()]), held)


def token_logprobs_reader(
    targets_N: Tensor, *, temperature: float | Tensor, memory_budget: int
) -> HeadReader:
    """Reads `logprobs_N` and `entropy_N` of the targets, both float32.

    Args:
        targets_N: token ids.
        temperature: one for all tokens, or [N].
        memory_budget: bytes for logits at a time, see `linear_token_logprobs`; 0 makes them all at once and
            keeps them for the gradient.
    """

    def in_chunks(hidden_ND: Tensor, held: HeadWeight) -> tuple[Tensor, ...]:
        return linear_token_logprobs(
            hidden_ND,
            held.weight_VD,
            targets_N,
            temperature=temperature,
            memory_budget=memory_budget,
            group=held.group,
            vocab_start=held.vocab_start,
        )

    def whole(hidden_ND: Tensor, held: HeadWeight) -> tuple[Tensor, ...]:
        logits_NV = held.logits(hidden_ND, held.weight_VD)
        return token_logprobs(logits_NV, targets_N, temperature=temperature)

    return in_chunks if memory_budget else whole
