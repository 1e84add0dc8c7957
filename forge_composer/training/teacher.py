"""The self-teacher of SDPO: the policy itself, reading a context with a hint in it, without gradient.

Three kinds (arXiv 2601.20802, section on teacher regularisation; the authors' code calls the last two
`ema` and `trust-region`):

- `live`: the weights that are being trained.
- `ema`: theta_T <- (1 - rate) theta_T + rate theta after each optimizer step; a rate of 0.05 keeps 95%.
- `trust_region`: logits (1 - rate) x frozen initial policy + rate x live policy.

The teacher hands over hidden states and its LM head, never logits. Logits are linear in both, so the blend of
the trust region is one product as well: hidden states side by side times heads side by side.

Shape suffixes: N = distilled tokens, D = hidden size (twice that for the trust region), V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_composer.batching.teacher_rows import TeacherRows
from forge_composer.training.frozen import FrozenPolicy
from forge_composer.training.lm_head import HeadWeight
from forge_composer.training.model import PolicyModel

ToDevice = Callable[[Any], Tensor]


@dataclass(slots=True, frozen=True)
class TeacherStates:
    """What one micro-batch is distilled from.

    Attributes:
        hidden_ND: the teacher's hidden states at the positions that predict the targeted tokens.
        student_N: indices of the same tokens among the student's selected positions.
        weights_N: weight of each token's target.
        head: the teacher's LM head, [V, D], given the student's; the same vocabulary rows.
    """

    hidden_ND: Tensor
    student_N: Tensor
    weights_N: Tensor
    head: Callable[[Tensor], Tensor]


class SelfTeacher:
    """Reads hinted contexts with the live policy, an average of its past, or a blend with its beginning."""

    def __init__(self, kind: str, rate: float, live: PolicyModel, frozen: FrozenPolicy | None) -> None:
        """`frozen` is a copy of the policy as the run began it: for `ema` and `trust_region`.

        Raises:
            ValueError: the kind needs a copy and there is none.
        """
        if (kind == "live") != (frozen is None):
            raise ValueError(f"teacher {kind!r} {'takes no' if kind == 'live' else 'needs a'} second policy")
        self.kind, self.rate, self.live, self.copy = kind, rate, live, frozen

    @contextmanager
    def states(self, passes: Sequence[TeacherRows], to_device: ToDevice) -> Iterator[TeacherStates | None]:
        """Run the forward passes; the copy's head stays gathered inside the block. A collective.

        Yields None where the micro-batch has no pass.
        """
        if not passes:
            yield None
            return
        hidden: list[Tensor] = []
        head: Callable[[Tensor], Tensor] = _same
        if self.kind != "ema":
            hidden.append(self._read(self.live, passes, to_device)[0])
        if self.copy is not None:
            copied_ND, copied_head = self._read(self.copy.model, passes, to_device)
            if self.kind == "ema":
                hidden.append(copied_ND)
                head = _constant(copied_head.weight_VD)
            else:
                hidden = [hidden[0] * self.rate, copied_ND * (1.0 - self.rate)]
                head = _beside(copied_head.weight_VD)
        try:
            yield TeacherStates(
                hidden_ND=torch.cat(hidden, dim=1),
                student_N=torch.cat([to_device(rows.student_N) for rows in passes]),
                weights_N=torch.cat([to_device(rows.weights_N) for rows in passes]),
                head=head,
            )
        finally:
            if self.copy is not None:
                self.copy.reshard()

    @torch.no_grad()
    def _read(
        self, model: PolicyModel, passes: Sequence[TeacherRows], to_device: ToDevice
    ) -> tuple[Tensor, HeadWeight]:
        """Hidden states of all targets, and the head while it is gathered."""
        held: list[HeadWeight] = []

        def reader(hidden_ND: Tensor, head: HeadWeight) -> tuple[Tensor, ...]:
            held.append(head)
            return (hidden_ND,)

        training = model.training
        model.eval()
        parts = []
        for rows in passes:
            positions_RL = to_device(rows.positions_RL)
            (hidden_ND,) = model(
                to_device(rows.token_ids_RL),
                positions_BL=positions_RL,
                attention_masks=model.get_attention_masks(positions_RL),
                select_N=to_device(rows.select_N),
                reader=reader,
            )
            parts.append(hidden_ND[: len(rows.student_N)])
        model.train(training)
        return torch.cat(parts), held[-1]

    @torch.no_grad()
    def follow(self) -> None:
        """After an optimizer step: move the average towards the policy. Nothing for the other kinds."""
        if self.kind != "ema" or self.copy is None:
            return
        mine = [_local(parameter) for parameter in self.copy.model.parameters()]
        theirs = [_local(parameter) for parameter in self.live.parameters()]
        torch._foreach_lerp_(mine, theirs, self.rate)

    def state_dict(self) -> dict[str, Any]:
        """The average's weights, for the checkpoint; nothing for kinds that can be made again."""
        return self.copy.model.state_dict() if self.kind == "ema" and self.copy is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if self.kind == "ema" and self.copy is not None:
            self.copy.model.load_state_dict(state)


def _same(weight_VD: Tensor) -> Tensor:
    return weight_VD.detach()


def _constant(weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: weight_VD.detach()


def _beside(copied_VD: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight_VD: torch.cat([weight_VD.detach(), copied_VD.detach()], dim=1)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
