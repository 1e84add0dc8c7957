"""From a replayed step to a preference pair, or to the reason why it gives none.

    votes -> quorum -> another action than the student's? -> seen before? -> the two sides -> outcome -> pair

The rejected side is what the student wrote, malformed or not. The chosen side is a sample of the student that
is the agreed action, else that action in the policy's chat template. Without a policy at hand a pair is text.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.outcome import OutcomeJudge
from forge_composer.preferences.records import ChosenSource, PairTokens, PreferencePair
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.preferences.steps import StepState
from forge_composer.preferences.student import StudentSampler
from forge_composer.preferences.tokens import PolicyTokens, RecordedTokens
from forge_composer.rendering.renderer import ChatRenderer, TemplateError
from forge_composer.teachers.agreement import Agreement, reach_agreement
from forge_composer.types import ParsedAction


class SkipReason(enum.StrEnum):
    """Why a step gives no pair."""

    NO_ANSWER = "no_answer"
    """No teacher gave a valid answer."""
    TOO_FEW_FAMILIES = "too_few_families"
    """Valid answers came from less than `min_quorum` families."""
    NO_QUORUM = "no_quorum"
    """No action has enough families."""
    TIE = "tie"
    """Two actions have enough families, and equally many."""
    AGREES_WITH_STUDENT = "agrees_with_student"
    """The teachers would have done the same."""
    DUPLICATE = "duplicate"
    """The same context with the same two actions gave a pair before."""
    NO_TOKENS = "no_tokens"
    """The step was recorded without tokens of this policy, and the caller needs them."""
    CUT_OFF = "cut_off"
    """The student's turn has no end: what it would have done is not known."""
    TOO_LONG = "too_long"
    """A side has more than `max_side_tokens`."""
    LENGTH_RATIO = "length_ratio"
    """The sides' lengths differ by more than `max_length_ratio`."""
    RENDERED_DROPPED = "rendered_dropped"
    """No sample of the student is the agreed action, and `rendered` is `drop`."""
    NOT_RENDERED = "not_rendered"
    """The chat template cannot write the action so that it reads as the same."""
    OUTCOME_WORSE = "outcome_worse"
    """The environment gave the chosen side less than the gate asks for."""
    OUTCOME_VOID = "outcome_void"
    """The gate got no verdict: an episode failed, or there is no record to enter."""


def disagreement(step: ReplayedStep, config: ReplayConfig) -> Agreement | SkipReason:
    """What the teachers agree on against the student, or why there is no such thing."""
    votes = step.step_votes()
    found = reach_agreement(votes.votes, quorum=config.quorum, min_quorum=config.min_quorum)
    if not isinstance(found, Agreement):
        return SkipReason(found)
    return SkipReason.AGREES_WITH_STUDENT if found.action == step.student else found


@dataclass(slots=True, frozen=True)
class _Chosen:
    """The chosen side; `tokens` is None for a pair of text."""

    action: ParsedAction
    source: ChosenSource
    tokens: PairTokens | None
    info: dict[str, Any]


class PairExtractor:
    """Makes pairs out of replayed steps, and counts why others give none.

    Attributes:
        counts: steps by reason; `pair` counts the pairs, `student` those whose chosen side the policy wrote.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        renderer: ChatRenderer | None = None,
        student: StudentSampler | None = None,
        judge: OutcomeJudge | None = None,
        need_tokens: bool = False,
        render_missing: bool = False,
        memory: int = 65_536,
    ) -> None:
        """See the class.

        Args:
            config: the options.
            renderer: of the policy; None: pairs of text.
            student: samples the policy; None: the agreed action is rendered.
            judge: plays pairs; needed by an outcome gate and an audit.
            need_tokens: skip a step that was recorded without tokens of the policy; else its pair is text.
            render_missing: render context and rejected side of such a step, too, for traces of others.
            memory: pairs that are remembered, to find duplicates; beyond it the oldest is forgotten.

        Raises:
            ValueError: a gate or an audit without a judge; tokens or samples without a renderer.
        """
        if judge is None and config.outcome_gate != "off":
            raise ValueError(
                f'replay.outcome_gate = "{config.outcome_gate}" needs an environment to play pairs in, and '
                'there is none; set it to "off"'
            )
        if judge is None and config.audit_fraction > 0:
            raise ValueError(
                f"replay.audit_fraction = {config.audit_fraction:g} needs an environment to play pairs in, "
                "and there is none; set it to 0"
            )
        if renderer is None and (need_tokens or render_missing or student is not None):
            raise ValueError("tokens of a pair need the policy's renderer, and there is none")
        self.config = config
        self.counts: Counter[str] = Counter()
        self._tokens = PolicyTokens(renderer, config.text) if renderer is not None else None
        self._student, self._judge = student, judge
        self._need_tokens, self._render_missing = need_tokens, render_missing
        self._seen = _Seen(memory)

    async def extract(self, step: ReplayedStep) -> PreferencePair | SkipReason:
        """The pair of a step, or why there is none. Steps may be extracted side by side."""
        found = await self._extract(step)
        if isinstance(found, PreferencePair):
            self.counts["pair"] += 1
            self.counts["student"] += found.source == "student"
        else:
            self.counts[found] += 1
        return found

    def metrics(self) -> dict[str, float]:
        """Counts since the start: steps, pairs, steps without one by reason; and the audit's shares."""
        pairs = self.counts["pair"]
        skipped = {reason: self.counts[reason] for reason in SkipReason if self.counts[reason]}
        numbers: dict[str, float] = {
            "replay/steps": pairs + sum(skipped.values()),
            "replay/pairs": pairs,
            "replay/pairs_student": self.counts["student"],
        }
        numbers |= {f"replay/skipped/{reason}": count for reason, count in skipped.items()}
        numbers = {name: float(value) for name, value in numbers.items()}
        return numbers | (self._judge.counts.metrics() if self._judge is not None else {})

    async def _extract(self, step: ReplayedStep) -> PreferencePair | SkipReason:
        agreement = disagreement(step, self.config)
        if isinstance(agreement, SkipReason):
            return agreement
        key = _pair_key(step, agreement.action)
        if not self._seen.claim(key):
            return SkipReason.DUPLICATE
        found: PreferencePair | SkipReason | None = None
        try:
            found = await self._pair(step, agreement)
        finally:
            if not isinstance(found, PreferencePair):
                self._seen.release(key)
        return found

    async def _pair(self, step: ReplayedStep, agreement: Agreement) -> PreferencePair | SkipReason:
        chosen = await self._chosen(step, agreement.action)
        if isinstance(chosen, SkipReason):
            return chosen
        state = step.state
        pair = PreferencePair(
            trace=state.trace,
            step=state.step,
            messages=state.messages,
            tools=state.tools,
            chosen=chosen.action,
            rejected=state.action,
            source=chosen.source,
            families=agreement.families,
            weight=agreement.share,
            votes=step.votes,
            cost_usd=step.cost_usd,
            tokens=chosen.tokens,
            version=state.version,
            temperature=state.temperature,
            info=chosen.info,
        )
        return await self._graded(pair, state)

    # -- the two sides ------------------------------------------------------------------------------

    async def _chosen(self, step: ReplayedStep, agreed: str) -> _Chosen | SkipReason:
        recorded = self._recorded(step)
        if isinstance(recorded, SkipReason):
            return recorded
        # A teacher's reasoning is not the policy's, and no part of what was agreed on.
        said = dataclasses.replace(step.actions[agreed], reasoning="")
        if recorded is None:
            dropped = self.config.rendered == "drop"
            return SkipReason.RENDERED_DROPPED if dropped else _Chosen(said, "rendered", None, {})
        assert self._tokens is not None
        if not self._tokens.renderer.ends_turn(recorded.completion_ids):
            return SkipReason.CUT_OFF
        if len(recorded.completion_ids) > self.config.max_side_tokens:
            return SkipReason.TOO_LONG
        info: dict[str, Any] = {"rejected_rendered": True} if recorded.rendered else {}
        own = await self._own_words(step.state, agreed, recorded, info)
        if own is not None:
            return own
        if self.config.rendered == "drop":
            return SkipReason.RENDERED_DROPPED
        return self._rendered(step.state, said, agreed, recorded, info)

    def _recorded(self, step: ReplayedStep) -> RecordedTokens | SkipReason | None:
        """Context and rejected side in tokens; None for a pair of text."""
        if self._tokens is None:
            return None
        found = self._tokens.recorded(step.state, step.student)
        if found is None and self._render_missing:
            try:
                found = self._tokens.rendered_step(step.state, step.student)
            except TemplateError:
                return SkipReason.NOT_RENDERED
        if found is None and self._need_tokens:
            return SkipReason.NO_TOKENS
        return found

    async def _own_words(
        self, state: StepState, agreed: str, recorded: RecordedTokens, info: dict[str, Any]
    ) -> _Chosen | None:
        """A sample of the student that is the agreed action; None if there is none that fits."""
        if self._student is None or self.config.student_samples == 0:
            return None
        at = dataclasses.replace(state, prompt_ids=recorded.prompt_ids)
        draw = await self._student.draw(
            at, agreed, lambda ids: self._length_problem(ids, recorded.completion_ids) is None
        )
        info |= {"student_samples": draw.samples, "student_matches": draw.matches}
        if draw.sample is None:
            return None
        info["chosen_version"] = draw.sample.version
        tokens = PairTokens(recorded.prompt_ids, draw.sample.completion_ids, recorded.completion_ids)
        return _Chosen(draw.sample.action, "student", tokens, info)

    def _rendered(
        self,
        state: StepState,
        said: ParsedAction,
        agreed: str,
        recorded: RecordedTokens,
        info: dict[str, Any],
    ) -> _Chosen | SkipReason:
        assert self._tokens is not None
        try:
            ids = self._tokens.turn(state, said, agreed)
        except TemplateError:
            return SkipReason.NOT_RENDERED
        problem = self._length_problem(ids, recorded.completion_ids)
        if problem is not None:
            return problem
        tokens = PairTokens(recorded.prompt_ids, ids, recorded.completion_ids)
        return _Chosen(said, "rendered", tokens, info)

    def _length_problem(self, chosen: Sequence[int], rejected: Sequence[int]) -> SkipReason | None:
        shorter, longer = sorted((len(chosen), len(rejected)))
        if longer > self.config.max_side_tokens:
            return SkipReason.TOO_LONG
        return SkipReason.LENGTH_RATIO if longer > self.config.max_length_ratio * shorter else None

    # -- outcome ------------------------------------------------------------------------------------

    async def _graded(self, pair: PreferencePair, state: StepState) -> PreferencePair | SkipReason:
        """The pair with its outcome where one was asked for, unless the gate drops it."""
        gate = self.config.outcome_gate
        if self._judge is None:
            return pair
        if gate == "off" and not self._judge.audits(pair, self.config.audit_fraction):
            return pair
        outcome = await self._judge.play(pair, state.rollout)
        if outcome is None:
            return pair if gate == "off" else SkipReason.OUTCOME_VOID
        if not outcome.passes(gate):
            return SkipReason.OUTCOME_WORSE
        return dataclasses.replace(pair, outcome={"chosen": outcome.chosen, "rejected": outcome.rejected})


class _Seen:
    """The newest keys, each once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def claim(self, key: bytes) -> bool:
        """Remember a key; False if it is known."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return False
        self._keys[key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)
        return True

    def release(self, key: bytes) -> None:
        """Forget a key."""
        self._keys.pop(key, None)


def _pair_key(step: ReplayedStep, agreed: str) -> bytes:
    """Equal for equal contexts with equal sides; a side that does not parse is its own words."""
    state, rejected = step.state, step.student
    words = [state.action.error, state.action.text, *map(repr, state.action.tool_calls)]
    content = [state.messages, state.tools, agreed, rejected, words if rejected is None else None]
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
