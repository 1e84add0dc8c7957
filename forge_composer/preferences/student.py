"""The policy's own samples at a step, among which the chosen side of a pair is looked for.

A chosen side in the policy's own words teaches what to do and nothing else; a stronger model's words also
teach how that model talks (Step-DPO, arXiv 2406.18629, section 3.2).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.steps import StepState
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.rollout.episode import derived_seed
from forge_composer.services import Sampler
from forge_composer.teachers.actions import canonical_action
from forge_composer.types import Completion, ParsedAction, SamplingRequest


@dataclass(slots=True, frozen=True)
class StudentSample:
    """A turn that the policy wrote to its end.

    Attributes:
        action: what it says.
        canonical: its canonical form; None if it does not parse.
        completion_ids: its tokens as sampled, with the turn-end token.
        version: oldest policy version among the tokens.
    """

    action: ParsedAction
    canonical: str | None
    completion_ids: tuple[int, ...]
    version: int


@dataclass(slots=True, frozen=True)
class StudentDraw:
    """What was drawn for one step: how many samples are whole, how many of them match, and one that does."""

    samples: int
    matches: int
    sample: StudentSample | None


class StudentSampler:
    """Samples the policy at recorded steps.

    Attributes:
        counts: `whole` samples, `cut_off` ones (no turn-end token), `failed` requests, `no_room` steps whose
            context leaves no token.
        error: the first failed request's error.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        config: ReplayConfig,
        *,
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        """See the class.

        Args:
            sampler: the policy.
            renderer: of the policy.
            config: `student_samples`, `max_side_tokens` and `text`.
            max_model_len: longest context with completion, tokens.
            seed: the run's; seeds of samples are derived from it, the trace and the step.
        """
        self.sampler, self.renderer, self.config = sampler, renderer, config
        self.max_model_len, self.seed = max_model_len, seed
        self.counts: Counter[str] = Counter()
        self.error = ""

    async def draw(
        self,
        state: StepState,
        agreed: str,
        fits: Callable[[tuple[int, ...]], bool] = lambda completion_ids: True,
    ) -> StudentDraw:
        """Sample the step and take one of the samples that are the agreed action.

        Args:
            state: the step; with its prompt ids.
            agreed: canonical action.
            fits: which completions may be taken.

        Returns:
            The draw. Among several different samples the seed decides: the shortest one, taken always, would
            teach to be short.
        """
        samples = await self.samples(state)
        matching = [sample for sample in samples if sample.canonical == agreed]
        usable = {
            sample.completion_ids: sample for sample in matching if fits(sample.completion_ids)
        }  # distinct, in the order of the samples
        taken = None
        if usable:
            taken = random.Random(f"chosen/{self.seed}/{state.step_id}").choice(list(usable.values()))
        return StudentDraw(len(samples), len(matching), taken)

    async def samples(self, state: StepState) -> list[StudentSample]:
        """`replay.student_samples` samples of a step, without those that are cut off or failed.

        Raises:
            ValueError: the step was recorded without its prompt ids.
        """
        if state.prompt_ids is None:
            raise ValueError(f"step {state.step_id} was recorded without its prompt ids")
        room = min(self.config.max_side_tokens, self.max_model_len - len(state.prompt_ids))
        if room <= 0:
            self.counts["no_room"] += 1
            return []
        requests = [
            self._request(state, state.prompt_ids, room, number)
            for number in range(self.config.student_samples)
        ]
        answers = await asyncio.gather(*map(self.sampler.generate, requests), return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, BaseException):
                self._failed(answer)
            elif (sample := self._read(answer)) is not None:
                found.append(sample)
        return found

    def _request(
        self, state: StepState, prompt_ids: tuple[int, ...], room: int, number: int
    ) -> SamplingRequest:
        return SamplingRequest(
            request_id=f"{state.step_id}/student-{number}",
            prompt_ids=prompt_ids,
            max_new_tokens=room,
            seed=derived_seed("student", self.seed, state.trace, state.step, number),
            temperature=state.temperature,
            stop_token_ids=self.renderer.turn_end_ids,
        )

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        self.counts["failed"] += 1
        self.error = self.error or f"{type(error).__name__}: {error}"

    def _read(self, completion: Completion) -> StudentSample | None:
        ids = tuple(completion.token_ids)
        if completion.finish_reason != "stop" or not self.renderer.ends_turn(ids):
            self.counts["cut_off"] += 1
            return None
        self.counts["whole"] += 1
        action = parse_action(self.renderer.decode(ids))
        canonical = canonical_action(action, text=self.config.text)
        return StudentSample(action, canonical, ids, min(completion.versions, default=-1))
