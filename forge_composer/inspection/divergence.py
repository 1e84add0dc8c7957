"""Both sides' view of a targeted turn: the policy without the hint and with it.

The trainer's teacher may be an average of the policy's past; here one policy reads both contexts. What is
measured is how the trainer measures it: the divergence as `loss.sdpo` has it, log-probabilities at the
temperature that the turn was sampled at.

Shape suffixes: N = targeted tokens, V = vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import jinja2
import torch
from torch import Tensor

from forge_composer.batching.samples import samples_from_rollout
from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.records import DistillTarget, Misaligned, Target
from forge_composer.inspection.load import TargetedRun
from forge_composer.inspection.policy import Policy
from forge_composer.inspection.records import (
    ContextView,
    Inspection,
    InspectionError,
    StepTarget,
    TargetView,
    TokenView,
    TurnView,
    Unaligned,
)
from forge_composer.inspection.selection import Selection
from forge_composer.inspection.summary import summarize, summarize_by
from forge_composer.inspection.text import WINDOW, token_text
from forge_composer.kernels import token_logprobs
from forge_composer.losses.config import SDPOConfig
from forge_composer.losses.sdpo import sdpo_loss
from forge_composer.rendering.renderer import TemplateError
from forge_composer.types import Rollout, Turn

_MERGED = 2
"""Tokens next to a hint in an observation that may be other ones (`hints.context`)."""


def inspect_run(
    run: TargetedRun, policy: Policy, selection: Selection, advance: Callable[[int, int], None] | None = None
) -> Inspection:
    """Measure the selected targets of a run.

    Args:
        run: the run.
        policy: reads both contexts.
        selection: which targets.
        advance: told how many targets are done, and how many there are.

    Raises:
        InspectionError: no target fits the selection, or the policy is not one of this run.
        TraceFormatError: a line of the trace is no trajectory.
    """
    fitting = selection.fitting(run.targets)
    entries = selection.to_measure(fitting)
    inspector = Inspector(run, policy)
    views: list[TargetView] = []
    unaligned: list[Unaligned] = []
    for found in inspector.all(entries):
        if isinstance(found, TargetView):
            views.append(found)
        else:
            unaligned.append(found)
        if advance is not None:
            advance(len(views) + len(unaligned), len(entries))
    return Inspection(
        run=run.folder,
        model=policy.folder,
        settings=inspector.settings,
        found=len(fitting),
        order=selection.in_words(len(fitting)),
        shown=selection.to_show(views),
        unaligned=unaligned,
        total=summarize(views),
        by_kind=summarize_by(views, lambda view: view.target.kind),
        by_source=summarize_by(views, lambda view: view.target.source),
        notes=tuple(run.notes),
    )


class Inspector:
    """Measures targets of one run with one policy."""

    def __init__(self, run: TargetedRun, policy: Policy) -> None:
        config = run.config
        self.run, self.policy = run, policy
        self.sdpo: SDPOConfig = config.loss.sdpo
        self.whole_rollouts = config.hints.scope == "rollout"
        self.temperature = config.generator.sampling.temperature
        self.contexts = TeacherContexts(
            policy.renderer, config.hints.position, max_tokens=config.trainer.seq_len
        )
        self.settings: dict[str, float | int | str] = {
            "hints.position": config.hints.position,
            "hints.scope": config.hints.scope,
            "loss.sdpo.divergence_beta": self.sdpo.divergence_beta,
            "loss.sdpo.temperature": self.sdpo.temperature,
            "generator.sampling.temperature": self.temperature,
        }
        if self.sdpo.top_k:
            self.settings["loss.sdpo.top_k"] = self.sdpo.top_k

    def all(self, entries: Sequence[StepTarget]) -> Iterator[TargetView | Unaligned]:
        """Measure targets; reads the trace once. In the order of the trace, then those without a rollout."""
        of_rollout: dict[str, list[StepTarget]] = defaultdict(list)
        for entry in entries:
            of_rollout[entry.target.rollout_id].append(entry)
        for rollout in self.run.rollouts(list(of_rollout)):
            for entry in of_rollout.pop(rollout.rollout_id):
                yield from self.one(entry, rollout)
        for missing in of_rollout.values():
            for entry in missing:
                yield Unaligned(entry.step, entry.target, "no rollout")

    def one(self, entry: StepTarget, rollout: Rollout) -> Iterator[TargetView | Unaligned]:
        """Build and check the teacher's context of a target, then measure: one view, or one of each training
        sample of the rollout where whole rollouts are distilled."""
        target = entry.target
        if target.turn >= len(rollout.turns):
            yield Unaligned(entry.step, target, "no turn")
            return
        for part in self._build(rollout, target):
            if isinstance(part, Misaligned):
                yield Unaligned(entry.step, target, part.reason)
            else:
                yield self._view(entry, rollout, part)

    def _build(self, rollout: Rollout, target: Target) -> Sequence[DistillTarget | Misaligned]:
        try:
            if self.whole_rollouts:
                return self.contexts.whole(rollout, target)
            return [self.contexts.build(rollout, target)]
        except (TemplateError, jinja2.TemplateError):  # of another policy than the run's
            return [Misaligned(target.rollout_id, target.turn, "template")]

    def _view(self, entry: StepTarget, rollout: Rollout, aligned: DistillTarget) -> TargetView:
        student_ids = samples_from_rollout(rollout, 0.0)[aligned.sample_index].token_ids
        tokens = dict(zip(aligned.positions, self._tokens(student_ids, aligned), strict=True))
        turns = [
            TurnView(number, _before(rollout, number), found)
            for number in _turns_of_sample(rollout, aligned.sample_index)
            if (found := [tokens[place] for place in _places(rollout.turns[number]) if place in tokens])
        ]
        return TargetView(
            step=entry.step,
            target=entry.target,
            task_id=rollout.task_id,
            reward=rollout.reward,
            rollout_turns=len(rollout.turns),
            turns=turns,
            answers=_observed(rollout.turns[turns[-1].number]),
            context=self._context(
                student_ids[: aligned.positions[0]], aligned.teacher_ids[: aligned.teacher_positions[0]]
            ),
        )

    def _tokens(self, student_ids: Sequence[int], aligned: DistillTarget) -> list[TokenView]:
        """The distilled tokens. The logits of both sides exist for these alone, and end here."""
        student_NV = self.policy.logits(student_ids, aligned.positions)
        teacher_NV = self.policy.logits(aligned.teacher_ids, aligned.teacher_positions)
        sampled = [student_ids[position] for position in aligned.positions]
        sampled_N = torch.tensor(sampled, device=student_NV.device)
        ones_N = torch.ones(len(sampled), device=student_NV.device)
        best_N = teacher_NV.argmax(dim=1)
        columns = [
            sdpo_loss(student_NV, teacher_NV, ones_N, config=self.sdpo).per_token_N,
            self._logprobs(student_NV, sampled_N),
            self._logprobs(teacher_NV, sampled_N),
            self._logprobs(teacher_NV, best_N).exp(),
        ]
        numbers_N4 = torch.stack([column.double() for column in columns], dim=1)
        if not numbers_N4.isfinite().all():
            raise InspectionError(
                f"{self.policy.folder}: the policy gives infinite or undefined values for "
                f"{aligned.rollout_id}, turn {aligned.turn}; its weights are damaged, name others with "
                "--model"
            )
        views = []
        for row, position in enumerate(aligned.positions):
            before, best = student_ids[max(0, position - WINDOW) : position], int(best_N[row])
            jsd, student, teacher, probability = numbers_N4[row].tolist()
            views.append(
                TokenView(
                    token_id=sampled[row],
                    text=token_text(self._decode, before, sampled[row]),
                    jsd=jsd,
                    student_logprob=student,
                    teacher_logprob=teacher,
                    best_id=best,
                    best_text=token_text(self._decode, before, best),
                    best_probability=probability,
                )
            )
        return views

    def _logprobs(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        return token_logprobs(logits_NV, targets_N, temperature=self.temperature)[0]

    def _context(self, plain: Sequence[int], hinted: Sequence[int]) -> ContextView:
        """The teacher's prompt around what is not in the student's."""
        most = min(len(plain), len(hinted))
        start = next((i for i in range(most) if plain[i] != hinted[i]), most)
        most -= start
        end = next((i for i in range(most) if plain[-1 - i] != hinted[-1 - i]), most)
        return ContextView(
            before=self._decode(hinted[:start]),
            inserted=self._decode(hinted[start : len(hinted) - end]),
            after=self._decode(hinted[len(hinted) - end :]),
            shortened=start + end < len(plain) - _MERGED,
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self.policy.renderer.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def _turns_of_sample(rollout: Rollout, index: int) -> list[int]:
    """Numbers of the turns that make up a training sample."""
    opens = [number == 0 or turn.opens_sample for number, turn in enumerate(rollout.turns)]
    return [number for number in range(len(opens)) if sum(opens[: number + 1]) == index + 1]


def _places(turn: Turn) -> range:
    """Indices of a turn's sampled tokens in its training sample."""
    return range(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids))


def _before(rollout: Rollout, number: int) -> list[tuple[str, str]]:
    """What a turn answers: the observations of the turn before, or the episode's first messages."""
    if number:
        return _observed(rollout.turns[number - 1])
    return [
        (message["role"], message["content"]) for message in rollout.messages if message["role"] != "system"
    ]


def _observed(turn: Turn) -> list[tuple[str, str]]:
    return [("environment", text) for text in turn.observations]
