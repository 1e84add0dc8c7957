"""What the teacher reads: the context of a targeted turn with the hint in it, then the turn as it was
sampled.

    student   prompt ids of turn k                              + completion ids of turn k
    teacher   prompt ids of turn k with the hint before the     + the same completion ids
              generation prompt (or in the last observation)

Everything up to the turn before keeps its ids; only what follows that turn's end is rendered anew, once with
the hint and once without. The rendering without it must give the student's own prompt, id by id: this is what
proves that the two sides differ in the hint and in nothing else. No sampled token is ever tokenised again.

The other scope, all turns of a rollout behind one hint before the first (`TeacherContexts.whole`), is what
SDPO does to a whole response; it is there to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forge_composer.config.hints import HintPosition
from forge_composer.hints.records import DistillTarget, Misaligned, Target
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rollout.episode import history_before, observation_messages
from forge_composer.types import Message, Rollout, Turn

_MERGED = 2
"""Tokens next to a hint inside an observation that may be other ones, where its first characters join
theirs."""
CUT = "..."
"""Stands for an observation that was left out to make room."""


class TeacherContexts:
    """Builds and checks teacher contexts."""

    def __init__(self, renderer: ChatRenderer, position: HintPosition, *, max_tokens: int) -> None:
        """Take a renderer.

        Args:
            renderer: the policy's.
            position: where the hint stands.
            max_tokens: longest context with the targeted turn, tokens.
        """
        self.renderer, self.position, self.max_tokens = renderer, position, max_tokens

    def build(self, rollout: Rollout, target: Target) -> DistillTarget | Misaligned:
        """The aligned target, or why there is none (`no hint`, `template`, `context`, `hidden`, `rewritten`,
        `too long`, `no token`)."""

        def misaligned(reason: str) -> Misaligned:
            return Misaligned(target.rollout_id, target.turn, reason)

        turn = rollout.turns[target.turn]
        kept = [index for index, logprob in enumerate(turn.logprobs) if math.isfinite(logprob)]
        if not kept:
            return misaligned("no token")
        if not target.hint.strip():
            return misaligned("no hint")
        plain_ids = self._prompt(rollout, target.turn, "")
        prompt_ids = self._prompt(rollout, target.turn, target.hint)
        if plain_ids is None or prompt_ids is None:
            return misaligned("template")
        if fault := self._fault(plain_ids, prompt_ids, turn):
            return misaligned(fault)
        if len(prompt_ids) + len(turn.completion_ids) > self.max_tokens:
            shorter = self._shortened(rollout, target, self.max_tokens - len(turn.completion_ids))
            if shorter is None:
                return misaligned("too long")
            prompt_ids = shorter
        return DistillTarget(
            rollout_id=target.rollout_id,
            turn=target.turn,
            kind=target.kind,
            source=target.source,
            sample_index=_sample_index(rollout, target.turn),
            positions=[len(turn.prompt_ids) + index for index in kept],
            teacher_ids=[*prompt_ids, *turn.completion_ids],
            teacher_positions=[len(prompt_ids) + index for index in kept],
            weight=target.weight,
        )

    def whole(self, rollout: Rollout, target: Target) -> list[DistillTarget | Misaligned]:
        """All turns of the rollout with the hint before the first: one target a training sample."""
        if not target.hint.strip():
            return [Misaligned(target.rollout_id, target.turn, "no hint")]
        firsts = [n for n, turn in enumerate(rollout.turns) if n == 0 or turn.opens_sample]
        return [
            self._whole_sample(rollout, target, index, range(first, last))
            for index, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(rollout.turns)], strict=True))
        ]

    def _whole_sample(
        self, rollout: Rollout, target: Target, index: int, turns: range
    ) -> DistillTarget | Misaligned:
        """The turns of one training sample, which all extend the first one's prompt."""
        first, last = rollout.turns[turns[0]], rollout.turns[turns[-1]]
        history = history_before(rollout, turns[0])[len(rollout.messages) :]
        hinted = self._with_hint(rollout.messages, target.hint)
        plain_ids = self.renderer.initial_ids([*rollout.messages, *history], rollout.tools)
        prompt_ids = self.renderer.initial_ids([*hinted, *history], rollout.tools)
        fault = self._fault(plain_ids, prompt_ids, first)
        shift = len(prompt_ids) - len(plain_ids)
        positions = [
            len(turn.prompt_ids) + offset
            for turn in rollout.turns[turns.start : turns.stop]
            for offset, logprob in enumerate(turn.logprobs)
            if math.isfinite(logprob)
        ]
        student_ids = [*last.prompt_ids, *last.completion_ids]
        if fault is None and not positions:
            fault = "no token"
        if fault is None and len(student_ids) + shift > self.max_tokens:
            fault = "too long"
        if fault is not None:
            return Misaligned(target.rollout_id, target.turn, fault)
        return DistillTarget(
            rollout_id=target.rollout_id,
            turn=target.turn,
            kind=target.kind,
            source=target.source,
            sample_index=index,
            positions=positions,
            teacher_ids=[*prompt_ids, *student_ids[len(plain_ids) :]],
            teacher_positions=[position + shift for position in positions],
            weight=target.weight,
        )

    def _fault(self, plain_ids: list[int], prompt_ids: list[int], turn: Turn) -> str | None:
        """What keeps a hinted prompt from standing for the turn's own; None if nothing does."""
        if plain_ids != turn.prompt_ids:
            return "context"
        if prompt_ids == plain_ids:
            return "hidden"
        slack = _MERGED if self.position == "observation" else 0
        return None if _is_insertion(plain_ids, prompt_ids, slack=slack) else "rewritten"

    def supported(self, messages: Sequence[Message], tools: Sequence[dict[str, object]]) -> str | None:
        """None if the template can show a hint where it is configured to stand, else what is in the way."""
        marker = "a hint of its own"
        try:
            before = self.renderer.initial_ids(messages, list(tools))
            after = self.renderer.initial_ids(self._with_hint(messages, marker), list(tools))
        except Exception as error:  # a template may raise whatever it likes
            return f"the chat template refuses it: {error}"
        if marker not in self.renderer.decode(after) or before == after:
            return "the chat template leaves it out"
        return None

    def _prompt(self, rollout: Rollout, number: int, hint: str) -> list[int] | None:
        """Prompt ids of a turn, with a hint unless it is empty; None where the template cannot continue."""
        turn = rollout.turns[number]
        history = history_before(rollout, number)
        if number == 0 or turn.opens_sample:
            return self.renderer.initial_ids(self._with_hint(history, hint), rollout.tools)
        before = rollout.turns[number - 1]
        answers = observation_messages(before)
        asked = history[: len(history) - len(answers)]
        suffix = self.renderer.continuation_ids(asked, self._with_hint(answers, hint), rollout.tools)
        return None if suffix is None else [*before.prompt_ids, *before.completion_ids, *suffix]

    def _with_hint(self, messages: Sequence[Message], hint: str) -> list[Message]:
        """The messages with the hint behind them, or at the end of the last one."""
        if not hint:
            return list(messages)
        if self.position != "observation" or not messages:
            role = "user" if self.position == "observation" else self.position
            return [*messages, Message(role=role, content=hint)]
        last = messages[-1].copy()
        last["content"] = f"{last['content']}\n{hint}"
        return [*messages[:-1], last]

    def _shortened(self, rollout: Rollout, target: Target, room: int) -> list[int] | None:
        """The hinted prompt with observations left out, the oldest first, until it has at most `room`
        tokens."""
        history = history_before(rollout, target.turn)
        for index, message in enumerate(history):
            if message["role"] != "tool":
                continue
            history[index] = message.copy()
            history[index]["content"] = CUT
            ids = self.renderer.rerender_ids(self._with_hint(history, target.hint), rollout.tools)
            if len(ids) <= room:
                return ids
        return None


def _is_insertion(plain_ids: list[int], hinted_ids: list[int], *, slack: int) -> bool:
    """Whether all but `slack` of the plain ids are there, in order, around one insertion."""
    most = min(len(plain_ids), len(hinted_ids))
    before = next((i for i in range(most) if plain_ids[i] != hinted_ids[i]), most)
    after = next((i for i in range(most) if plain_ids[-1 - i] != hinted_ids[-1 - i]), most)
    return before + after >= len(plain_ids) - slack


def _sample_index(rollout: Rollout, number: int) -> int:
    """Which of the rollout's training samples holds a turn (`batching.samples.samples_from_rollout`)."""
    turns: Sequence[Turn] = rollout.turns[1 : number + 1]
    return sum(turn.opens_sample for turn in turns)
