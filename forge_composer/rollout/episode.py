"""One episode: the policy and an OpenEnv session take turns, and every token is kept as sampled.

    reset -> prompt ids -> [ generate -> parse -> environment step -> continuation ids ] x turns -> reward

The prompt of turn k+1 is the exact ids of turn k (prompt and completion) followed by newly rendered
ids, so the training sample needs no re-tokenisation. Where the chat template does not extend its own
past (it strips earlier thinking, say), the history is rendered afresh and the turn opens a new sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from forge_composer.config.schema import RolloutConfig
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import parse_action, to_message
from forge_composer.services import Environments, Sampler
from forge_composer.types import Message, ParsedAction, Rollout, RolloutStatus, SamplingRequest, Turn


def derived_seed(*parts: object) -> int:
    """A 31-bit seed that depends on all parts and on nothing else (not on Python's hash seed)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


@dataclass(slots=True, frozen=True)
class EpisodeSpec:
    """Which episode to run."""

    rollout_id: str
    group_id: int
    index: int
    task_index: int
    split: str
    seed: int
    temperature: float


@dataclass(slots=True, frozen=True)
class TokenLimits:
    """Token budgets of an episode."""

    max_turn_tokens: int
    max_prompt_tokens: int
    max_completion_tokens: int
    max_model_len: int


@dataclass(slots=True)
class EpisodeState:
    """Where an episode stands before a turn."""

    number: int
    """The turn's."""
    history: list[Message]
    """All messages before it."""
    prompt: list[int]
    """Its prompt ids."""
    opens_sample: bool
    """Whether the prompt does not extend the turn before (`Turn.opens_sample`)."""


class EpisodeRunner:
    """Runs episodes; stateless between them, so one instance serves all rollout tasks.

    `run` plays a whole episode. What it consists of is public for those who enter an episode elsewhere
    (`rollout/fork.py`).
    """

    def __init__(
        self, renderer: ChatRenderer, environments: Environments, rollout: RolloutConfig, limits: TokenLimits
    ) -> None:
        self.renderer = renderer
        self.environments = environments
        self.config = rollout
        self.limits = limits

    async def run(self, spec: EpisodeSpec, sampler: Sampler) -> Rollout:
        """Run one episode to its end. Never raises for a failed episode: `status` and `error` tell.

        A failed rollout has reward None. `asyncio.CancelledError` passes through.
        """
        rollout = Rollout(
            rollout_id=spec.rollout_id,
            group_id=spec.group_id,
            index=spec.index,
            task_id="",
            seed=spec.seed,
            messages=[],
            tools=[],
            split=spec.split,
            info={"temperature": spec.temperature, "task_index": spec.task_index},
        )
        await self.play(rollout, self._from_start(rollout, spec, sampler))
        return rollout

    async def play(self, rollout: Rollout, episode: Coroutine[Any, Any, None]) -> None:
        """Await the episode that fills `rollout`, under the deadline; note how it failed, end its session."""
        rollout.started_at = time.time()
        try:
            async with asyncio.timeout(self.config.timeout_s):
                await episode
        except TimeoutError:
            self._void(
                rollout, f"the rollout took longer than rollout.timeout_s = {self.config.timeout_s:g} s"
            )
        except Exception as error:  # a void episode must not end the run; the trace keeps the reason
            self._void(rollout, f"{type(error).__name__}: {error}")
        finally:
            rollout.ended_at = time.time()
            await self._end(rollout)

    @staticmethod
    def _void(rollout: Rollout, reason: str) -> None:
        rollout.status, rollout.reward, rollout.error = RolloutStatus.FAILED, None, reason

    async def _end(self, rollout: Rollout) -> None:
        try:
            await self.environments.end(rollout.rollout_id)
        except Exception as error:  # the session pool replaces a session that does not close
            rollout.info["end_error"] = f"{type(error).__name__}: {error}"

    async def _from_start(self, rollout: Rollout, spec: EpisodeSpec, sampler: Sampler) -> None:
        start = await self.environments.start(
            spec.rollout_id, index=spec.task_index, split=spec.split, seed=spec.seed
        )
        rollout.task_id, rollout.messages, rollout.tools = start.task_id, start.messages, start.tools
        rollout.info.update(start.info)
        prompt = self.renderer.initial_ids(start.messages, start.tools)
        if len(prompt) > self.limits.max_prompt_tokens:
            raise ValueError(
                f"the task's prompt has {len(prompt)} tokens, more than "
                f"rollout.max_prompt_tokens = {self.limits.max_prompt_tokens}"
            )
        state = EpisodeState(0, list(start.messages), prompt, opens_sample=True)
        await self.go_on(rollout, state, spec, sampler)

    async def go_on(self, rollout: Rollout, state: EpisodeState, spec: EpisodeSpec, sampler: Sampler) -> None:
        """Sample turns and carry them out, from `state` to the end of the episode."""
        while state.number < self.config.max_turns:
            room = self.room(rollout, state.prompt)
            if room <= 0:
                await self._grade_unfinished(rollout)
                return
            turn = await self.sample(state, spec, sampler, room)
            if await self.carry_out(rollout, state, turn):
                return

    def room(self, rollout: Rollout, prompt: Sequence[int]) -> int:
        """Tokens that the next turn may have."""
        budget = self.limits.max_completion_tokens - rollout.completion_tokens
        return min(self.limits.max_turn_tokens, budget, self.limits.max_model_len - len(prompt))

    async def sample(self, state: EpisodeState, spec: EpisodeSpec, sampler: Sampler, room: int) -> Turn:
        """Sample the turn at `state`, at most `room` tokens; its seed is derived from the episode's."""
        request = SamplingRequest(
            request_id=f"{spec.rollout_id}/{state.number:02d}",
            prompt_ids=tuple(state.prompt),
            max_new_tokens=room,
            seed=derived_seed(spec.seed, state.number),
            temperature=spec.temperature,
            stop_token_ids=self.renderer.turn_end_ids,
        )
        began = time.perf_counter()
        completion = await sampler.generate(request)
        text = self.renderer.decode(completion.token_ids)
        return Turn(
            prompt_ids=state.prompt,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            action=parse_action(text, id_prefix=f"call_{state.number}"),
            generate_s=time.perf_counter() - began,
            opens_sample=state.opens_sample,
        )

    async def carry_out(self, rollout: Rollout, state: EpisodeState, turn: Turn) -> bool:
        """Append a turn and carry it out. True if the episode is over; else `state` is that of the next
        turn."""
        rollout.turns.append(turn)
        last = state.number + 1 == self.config.max_turns or turn.finish_reason != "stop"
        done = await self._step(rollout, turn, finish=last)
        if done or last:
            rollout.status = self._status(turn, done_by_policy=done and not last)
            return True
        self._advance(state, turn, rollout.tools)
        return False

    async def _step(self, rollout: Rollout, turn: Turn, *, finish: bool) -> bool:
        """Carry out the turn; returns whether the episode is over."""
        began = time.perf_counter()
        step = await self.environments.step(rollout.rollout_id, turn.action, finish=finish)
        turn.environment_s = time.perf_counter() - began
        turn.observations, turn.feedback = step.observations, step.feedback
        if step.error is not None:
            raise RuntimeError(f"environment: {step.error}")
        if step.done or finish:
            rollout.reward, rollout.reward_breakdown = step.reward, step.reward_breakdown
            if step.reward is None:
                raise RuntimeError("environment: the episode ended without a reward")
        return step.done

    async def _grade_unfinished(self, rollout: Rollout) -> None:
        """No token is left for another turn: grade what there is."""
        step = await self.environments.step(rollout.rollout_id, ParsedAction(text=""), finish=True)
        if step.error is not None or step.reward is None:
            raise RuntimeError(f"environment: {step.error or 'the episode ended without a reward'}")
        rollout.reward, rollout.reward_breakdown = step.reward, step.reward_breakdown
        rollout.status = RolloutStatus.TRUNCATED_LENGTH

    @staticmethod
    def _status(turn: Turn, *, done_by_policy: bool) -> RolloutStatus:
        if turn.finish_reason != "stop":
            return RolloutStatus.TRUNCATED_LENGTH
        submitted = any(call.name == "submit" for call in turn.action.tool_calls)
        return RolloutStatus.COMPLETED if done_by_policy or submitted else RolloutStatus.TRUNCATED_TURNS

    def _advance(self, state: EpisodeState, turn: Turn, tools: list[dict[str, object]]) -> None:
        """Move on to the turn after `turn`. Its prompt extends the state's, whatever prompt `turn` itself
        was sampled from."""
        state.history.append(to_message(turn.action))
        answers = observation_messages(turn)
        suffix = self.renderer.continuation_ids(state.history, answers, tools)
        state.history.extend(answers)
        state.number += 1
        if suffix is None:
            state.prompt, state.opens_sample = self.renderer.rerender_ids(state.history, tools), True
            return
        state.opens_sample = turn.prompt_ids != state.prompt
        state.prompt = [*state.prompt, *turn.completion_ids, *suffix]


def observation_messages(turn: Turn) -> list[Message]:
    """The environment's answers to a turn as chat messages: one per call, or one for a turn without any."""
    calls = turn.action.tool_calls
    if not calls:
        return [Message(role="tool", content=text) for text in turn.observations]
    answers = [
        Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
        for call, text in zip(calls, turn.observations, strict=False)
    ]
    answers += [Message(role="tool", content=text) for text in turn.observations[len(calls) :]]
    return answers


def history_before(rollout: Rollout, number: int) -> list[Message]:
    """All messages before a turn of a rollout."""
    history = list(rollout.messages)
    for turn in rollout.turns[:number]:
        history.append(to_message(turn.action))
        history.extend(observation_messages(turn))
    return history
