"""Forward and backward of the unified loss, grpo + alpha sdpo + beta replay_dpo.

::

    teacher rows (hinted) --> SelfTeacher, no gradient --> hidden states of targeted tokens ---+
                                                                                               |
    student rows --> policy --> hidden states at selected tokens --> LM head ------------------+
                                                                       |                       |
                                                          log-probabilities, entropy     linear JSD
                                                                       |                       |
    frozen reference (with a KL term) ------------------------------> GRPO                   SDPO
                                                                       +---- alpha x ----------+
                                                                       |
                                                                    backward

    preference rows --> policy --> log-probabilities of both sides, summed ----> DPO --> beta x --> backward
    frozen reference, or what the pairs bring -----------------------------------^

The student is forwarded once for both channels; preference pairs are sequences of their own, in passes of
their own, and gradients add up. A channel of weight 0, and a micro-batch without targets, run none of the
other channel's code; a micro-batch that no channel wants is not forwarded.

Shape suffixes: R = rows, L = positions, N = selected tokens, T = distilled tokens, P = pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_composer.batching.packing import GlobalBatch, Microbatch
from forge_composer.batching.preference_rows import PreferenceRows
from forge_composer.kernels import linear_token_logprobs
from forge_composer.losses.composer import Channel, composer_loss
from forge_composer.losses.config import LossConfig
from forge_composer.losses.grpo import GRPOLoss, aggregation_weights, grpo_loss
from forge_composer.losses.replay_dpo import ReplayDPOLoss, replay_dpo_loss, sum_logprobs
from forge_composer.losses.sdpo import SDPOLoss, sdpo_loss, sdpo_loss_from_hidden, sdpo_token_weights
from forge_composer.training.balance import GradientGauge
from forge_composer.training.frozen import FrozenPolicy
from forge_composer.training.lm_head import HeadReader, HeadWeight, token_logprobs_reader
from forge_composer.training.metrics import StepMetrics
from forge_composer.training.model import PolicyModel
from forge_composer.training.teacher import SelfTeacher, TeacherStates


@dataclass(slots=True, frozen=True)
class _Batch:
    """Tensors of one micro-batch that both channels read."""

    targets_N: Tensor
    mask_N: Tensor
    generator_logprobs_N: Tensor


class UnifiedStep:
    """Runs micro-batches; gradients accumulate in the policy's parameters."""

    def __init__(
        self,
        model: PolicyModel,
        loss: LossConfig,
        *,
        reference: FrozenPolicy | None,
        teacher: SelfTeacher | None,
        temperature: float,
        max_completion_tokens: int,
        logits_memory: int,
        device: torch.device,
        dpo_reference: FrozenPolicy | None = None,
    ) -> None:
        """Take the parts.

        Args:
            model: the policy in training.
            loss: the channels' options.
            reference: what the KL term is measured from.
            teacher: what targeted turns are distilled from; None leaves the channel out.
            temperature: that the training tokens were sampled at, and are scored at.
            max_completion_tokens: Dr. GRPO's constant.
            logits_memory: bytes for logits at a time; 0 makes GRPO's all at once.
            device: of the policy.
            dpo_reference: what the pairs' log-ratios are measured from; None: what each pair brings.
        """
        self.model, self.loss, self.reference, self.teacher = model, loss, reference, teacher
        self.temperature, self.max_completion_tokens = temperature, max_completion_tokens
        self.logits_memory, self.device = logits_memory, device
        self.dpo_reference = dpo_reference

    def tensor(self, array: Any) -> Tensor:
        """An array on the policy's device."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def run(
        self,
        part: Microbatch,
        batch: GlobalBatch,
        *,
        version: int,
        alpha: float,
        metrics: StepMetrics,
        gauge: GradientGauge | None = None,
    ) -> None:
        """Forward and backward of one micro-batch. A collective over all ranks.

        Args:
            part: this rank's micro-batch.
            batch: which it belongs to.
            version: policy version, from which tokens count as on-policy.
            alpha: weight of the SDPO channel; at 0 it is not entered.
            metrics: takes in what there is to tell.
            gauge: measures the channels' gradients.
        """
        with_grpo = self.loss.grpo.weight > 0
        distils = self.teacher is not None and alpha > 0 and bool(part.teacher)
        if not (with_grpo or distils):
            return
        here = _Batch(self.tensor(part.targets_N), self.tensor(part.mask_N), self.tensor(part.logprobs_N))
        reference_logprobs_N = self._reference_logprobs(part, here) if with_grpo else None
        logprobs_N, entropy_N, *distilled = self._read(part, batch, here, gauge, distils=distils)
        channels: list[Channel] = []
        terms: GRPOLoss | None = None
        if with_grpo:
            terms = self._grpo(part, batch, here, logprobs_N, reference_logprobs_N)
            channels.append(Channel("grpo", self.loss.grpo.weight, lambda: terms.loss))
        if distilled:
            channels.append(Channel("sdpo", alpha, lambda: distilled[0]))
            metrics.add_distilled(*distilled)
        composer_loss(channels).total.backward()
        metrics.add(
            terms,
            logprobs_N=logprobs_N,
            generator_logprobs_N=here.generator_logprobs_N,
            entropy_N=entropy_N,
            mask_N=here.mask_N if with_grpo else self._distilled_mask(part),
            on_policy_N=self.tensor(part.versions_N) == version,
        )

    def _read(
        self,
        part: Microbatch,
        batch: GlobalBatch,
        here: _Batch,
        gauge: GradientGauge | None,
        *,
        distils: bool,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies and, where it distils, SDPO's loss and what it was made of."""
        if self.teacher is None or not distils:
            return self._forward(part, self._logprobs_reader(here, gauge))
        with self.teacher.states(part.teacher, self.tensor) as states:
            reader = self._distilling_reader(here, states, batch.teacher.num_tokens, gauge)
            return self._forward(part, reader)

    def _distilled_mask(self, part: Microbatch) -> Tensor:
        """Which of the selected tokens are distilled."""
        mask_N = torch.zeros(len(part.select_N), dtype=torch.bool, device=self.device)
        for rows in part.teacher:
            mask_N[self.tensor(rows.student_N)] = True
        return mask_N

    def run_pairs(self, rows: PreferenceRows, *, num_pairs: int, beta: float, metrics: StepMetrics) -> None:
        """Forward and backward of one pass of preference pairs. A collective over all ranks.

        Args:
            rows: this rank's pass.
            num_pairs: of the global batch: the divisor.
            beta: weight of the channel, above 0.
            metrics: takes in what there is to tell.
        """
        reader = token_logprobs_reader(
            self.tensor(rows.targets_N),
            temperature=self.tensor(rows.temperatures_N),
            memory_budget=self.logits_memory,
        )
        references_2P = self.tensor(rows.references_2P)
        if self.dpo_reference is not None:
            logprobs_N, _ = self.dpo_reference.read(
                self.tensor(rows.token_ids_RL),
                self.tensor(rows.positions_RL),
                self.tensor(rows.select_N),
                reader,
            )
            references_2P = self._sides(rows, logprobs_N)
        logprobs_N, _ = self._forward(rows, reader)
        terms = self._replay_dpo(rows, self._sides(rows, logprobs_N), references_2P, num_pairs)
        composer_loss([Channel("replay_dpo", beta, lambda: terms.loss)]).total.backward()
        metrics.add_pairs(terms, self.tensor(rows.mask_P))

    def _sides(self, rows: PreferenceRows, logprobs_N: Tensor) -> Tensor:
        """Log-probabilities of chosen and rejected sides, [2, P]. Summed in float64: what counts are the
        differences of large sums."""
        sums_S = sum_logprobs(
            logprobs_N.double(),
            self.tensor(rows.mask_N),
            self.tensor(rows.sequence_N),
            num_sequences=2 * len(rows.mask_P),
        )
        return sums_S.view(-1, 2).T

    def _replay_dpo(
        self, rows: PreferenceRows, sides_2P: Tensor, references_2P: Tensor, num_pairs: int
    ) -> ReplayDPOLoss:
        lengths_2P = self.tensor(rows.lengths_2P)
        return replay_dpo_loss(
            sides_2P[0],
            sides_2P[1],
            references_2P[0],
            references_2P[1],
            self.tensor(rows.weights_P),
            self.tensor(rows.mask_P),
            config=self.loss.replay_dpo,
            divisor=num_pairs,
            chosen_lengths_P=lengths_2P[0],
            rejected_lengths_P=lengths_2P[1],
        )

    def _forward(self, part: Microbatch | PreferenceRows, reader: HeadReader) -> tuple[Tensor, ...]:
        positions_RL = self.tensor(part.positions_RL)
        result: tuple[Tensor, ...] = self.model(
            self.tensor(part.token_ids_RL),
            positions_BL=positions_RL,
            attention_masks=self.model.get_attention_masks(positions_RL),
            select_N=self.tensor(part.select_N),
            reader=reader,
        )
        return result

    def _logprobs_reader(self, here: _Batch, gauge: GradientGauge | None = None) -> HeadReader:
        read = token_logprobs_reader(
            here.targets_N, temperature=self.temperature, memory_budget=self.logits_memory
        )
        if gauge is None:
            return read
        return lambda hidden_ND, held: read(gauge.tap(hidden_ND, "grpo", held.group), held)

    def _reference_logprobs(self, part: Microbatch, here: _Batch) -> Tensor | None:
        if self.reference is None:
            return None
        logprobs_N, _ = self.reference.read(
            self.tensor(part.token_ids_RL),
            self.tensor(part.positions_RL),
            self.tensor(part.select_N),
            self._logprobs_reader(here),
        )
        return logprobs_N

    def _grpo(
        self,
        part: Microbatch,
        batch: GlobalBatch,
        here: _Batch,
        logprobs_N: Tensor,
        reference_logprobs_N: Tensor | None,
    ) -> GRPOLoss:
        config = self.loss.grpo
        weights_N, divisor = aggregation_weights(
            config.aggregation,
            self.tensor(part.sequence_weights_N),
            num_rollouts=batch.num_rollouts,
            trained_tokens=batch.trained_tokens,
            max_completion_tokens=self.max_completion_tokens,
        )
        return grpo_loss(
            logprobs_N,
            logprobs_N.detach(),  # the proximal policy is the policy as the step begins
            here.generator_logprobs_N,
            self.tensor(part.advantages_N),
            here.mask_N,
            config=config,
            divisor=divisor,
            weights_N=weights_N,
            sequence_N=self.tensor(part.sequence_N),
            reference_logprobs_N=reference_logprobs_N,
        )

    def _sdpo(
        self,
        student_TD: Tensor,
        held: HeadWeight,
        states: TeacherStates,
        teacher_head: Tensor,
        weight_T: Tensor,
    ) -> SDPOLoss:
        """In chunks; over the likeliest tokens only, with the whole logits of the targeted tokens."""
        config = self.loss.sdpo
        if config.top_k:
            student_TV = held.logits(student_TD, held.weight_VD)
            with torch.no_grad():
                teacher_TV = held.logits(states.hidden_ND, teacher_head)
            return sdpo_loss(student_TV, teacher_TV, weight_T, config=config)
        return sdpo_loss_from_hidden(
            student_TD,
            held.weight_VD,
            states.hidden_ND,
            teacher_head,
            weight_T,
            config=config,
            memory_budget=self.logits_memory or _DEFAULT_LOGITS_MEMORY,
            group=held.group,
        )

    def _distilling_reader(
        self, here: _Batch, states: TeacherStates | None, divisor: float, gauge: GradientGauge | None
    ) -> HeadReader:
        """Reads what GRPO needs, then the SDPO loss and, for the metrics, what it was made of."""
        assert states is not None
        logprobs_of = self._logprobs_reader(here, gauge)
        targets_T = here.targets_N[states.student_N]

        def reader(hidden_ND: Tensor, held: HeadWeight) -> tuple[Tensor, ...]:
            logprobs_N, entropy_N = logprobs_of(hidden_ND, held)
            student_logprobs_T = logprobs_N.detach()[states.student_N]
            teacher_head = states.head(held.weight_VD)
            teacher_logprobs_T, teacher_entropy_T = self._read_teacher(states, held, teacher_head, targets_T)
            weight_T = sdpo_token_weights(
                student_logprobs_T,
                here.generator_logprobs_N[states.student_N],
                torch.ones_like(states.student_N, dtype=torch.bool),
                config=self.loss.sdpo,
                divisor=divisor,
                extra_weight_N=states.weights_N,
                teacher_entropy_N=teacher_entropy_T,
            )
            student_TD = hidden_ND.index_select(0, states.student_N)
            if gauge is not None:
                student_TD = gauge.tap(student_TD, "sdpo", held.group)
            result = self._sdpo(student_TD, held, states, teacher_head, weight_T)
            return (
                logprobs_N,
                entropy_N,
                result.loss,
                result.per_token_N,
                weight_T * divisor,
                result.capped_N,
                teacher_logprobs_T - student_logprobs_T,
                teacher_entropy_T,
            )

        return reader

    @torch.no_grad()
    def _read_teacher(
        self, states: TeacherStates, held: HeadWeight, teacher_head: Tensor, targets_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The teacher's log-probabilities of the sampled tokens, and its entropies."""
        return linear_token_logprobs(
            states.hidden_ND,
            teacher_head,
            targets_T,
            temperature=self.temperature,
            memory_budget=self.logits_memory or _DEFAULT_LOGITS_MEMORY,
            group=held.group,
            vocab_start=held.vocab_start,
        )

    @torch.no_grad()
    def divergence(self, part: Microbatch) -> Tensor:
        """Sum of the distilled tokens' divergence under the weights as they are, float64. A collective."""
        if self.teacher is None or not part.teacher:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        with self.teacher.states(part.teacher, self.tensor) as states:
            assert states is not None

            def reader(hidden_ND: Tensor, held: HeadWeight) -> tuple[Tensor, ...]:
                student_TD = hidden_ND.index_select(0, states.student_N)
                ones_T = torch.ones_like(states.weights_N)
                teacher_head = states.head(held.weight_VD)
                return (self._sdpo(student_TD, held, states, teacher_head, ones_T).per_token_N,)

            (per_token_T,) = self._forward(part, reader)
        return per_token_T.double().sum()


_DEFAULT_LOGITS_MEMORY = 256 * 2**20
"""Bytes for the divergence's logits where GRPO's are made whole."""
