"""A recorded episode, entered again at one of its turns.

    recorded   turn 0 ... turn k-1 | turn k                          | turn k+1 ...
    fork       the same actions    | a given action, or sampled anew | sampled from the fork's own past

OpenEnv has no snapshots, so a fork starts a session on the same task and seed and carries out the recorded
actions again. That ends in the recorded state only if the environment is deterministic; every answer is
therefore compared with the recorded one, and a fork whose past differs is void.

Turn k may be sampled from another prompt than the policy had (a teacher's, with a hint). The turns after it
are sampled from what the policy itself would read: its own prompt of turn k, the turn, and what followed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from forge_composer.rendering.renderer import TemplateError
from forge_composer.rendering.tool_calls import to_message
from forge_composer.rollout.episode import EpisodeRunner, EpisodeSpec, EpisodeState, history_before
from forge_composer.services import Sampler
from forge_composer.types import ParsedAction, Rollout, Turn

ForkFailure = Literal["not_deterministic", "failed"]


class NotDeterministicError(RuntimeError):
    """The environment did not do again what was recorded: what it does in a fork says nothing."""


@dataclass(slots=True, frozen=True)
class GivenTurn:
    """Turn k is this action; nobody samples it. It is carried out whatever its length; its tokens count."""

    action: ParsedAction
    completion_ids: tuple[int, ...] = ()
    """Its tokens with the turn-end token, where they are known (a sample of the policy). Without them the
    action is tokenised as the chat template writes it."""


@dataclass(slots=True, frozen=True)
class SampledTurn:
    """Turn k is sampled."""

    prompt_ids: tuple[int, ...] | None = None
    """What it is sampled from; None for the recorded prompt."""
    max_tokens: int | None = None
    """Most tokens that it may have, if that is less than the episode's limits allow."""


@dataclass(slots=True, frozen=True)
class Fork:
    """Which turn of which episode to enter, and how."""

    recorded: Rollout
    turn: int
    """The turn k that is taken anew, counted from 0; the turns before it are carried out again."""
    take: GivenTurn | SampledTurn
    rollout_id: str
    """The fork's own id, under which its session runs; no open episode may have it."""
    seed: int
    """Seed of everything that is sampled. With the recorded one an unchanged policy would sample the recorded
    turn again. The environment always gets the recorded seed."""

    def __post_init__(self) -> None:
        """Refuse what cannot be forked.

        Raises:
            ValueError: there is no such turn, or the record does not hold its task, temperature or tokens.
        """
        recorded, where = self.recorded, f"fork of rollout {self.recorded.rollout_id!r}"
        if not 0 <= self.turn < len(recorded.turns):
            raise ValueError(f"{where}: it has {len(recorded.turns)} turns, there is no turn {self.turn}")
        missing = [name for name in ("task_index", "temperature") if name not in recorded.info]
        if missing:
            raise ValueError(f"{where}: its info has no {' and no '.join(missing)}")
        if not recorded.turns[self.turn].prompt_ids:
            raise ValueError(f"{where}: turn {self.turn} was recorded without its prompt ids")


def fork_failure(rollout: Rollout) -> ForkFailure | None:
    """Why a fork has no reward: the environment is not deterministic, or anything else failed; None if it
    has one."""
    if rollout.reward is not None:
        return None
    return "not_deterministic" if rollout.info["fork"].get("not_deterministic") else "failed"


async def run_fork(fork: Fork, runner: EpisodeRunner, sampler: Sampler) -> Rollout:
    """Carry out the recorded turns before turn k, take turn k, and go on to the episode's end.

    Returns:
        A rollout with all turns from the first one, under the limits of `runner`. `info["fork"]` says what it
        was made from: `of`, `turn`, `sampling_seed`. A turn sampled from another prompt has that prompt as
        its `prompt_ids` and is a training sample of its own; a given turn's log-probabilities are NaN and its
        versions -1, so that it is masked. Never raises for a failed episode, as `EpisodeRunner.run`:
        `status`, `error` and `fork_failure` tell, and the session is ended.
    """
    recorded = fork.recorded
    rollout = Rollout(
        rollout_id=fork.rollout_id,
        group_id=recorded.group_id,
        index=recorded.index,
        task_id=recorded.task_id,
        seed=recorded.seed,
        messages=recorded.messages,
        tools=recorded.tools,
        split=recorded.split,
        info={
            "temperature": recorded.info["temperature"],
            "task_index": recorded.info["task_index"],
            "fork": {"of": recorded.rollout_id, "turn": fork.turn, "sampling_seed": fork.seed},
        },
    )
    await runner.play(rollout, _episode(fork, rollout, runner, sampler))
    return rollout


async def _episode(fork: Fork, rollout: Rollout, runner: EpisodeRunner, sampler: Sampler) -> None:
    recorded, number = fork.recorded, fork.turn
    if number >= runner.config.max_turns:
        raise ValueError(f"rollout.max_turns = {runner.config.max_turns}: there is no turn {number}")
    spec = EpisodeSpec(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        index=rollout.index,
        task_index=int(rollout.info["task_index"]),
        split=rollout.split,
        seed=fork.seed,
        temperature=float(rollout.info["temperature"]),
    )
    try:
        await _repeat(fork, rollout, spec, runner)
    except NotDeterministicError:
        rollout.info["fork"]["not_deterministic"] = True
        raise
    at = recorded.turns[number]
    state = EpisodeState(number, history_before(recorded, number), at.prompt_ids, at.opens_sample)
    if isinstance(fork.take, GivenTurn):
        turn = _given_turn(fork.take, state, rollout, runner)
    else:
        turn = await _sampled_turn(fork.take, state, rollout, spec, runner, sampler)
    if await runner.carry_out(rollout, state, turn):
        return
    if not turn.completion_ids:
        state.prompt, state.opens_sample = runner.renderer.rerender_ids(state.history, rollout.tools), True
    await runner.go_on(rollout, state, spec, sampler)


async def _repeat(fork: Fork, rollout: Rollout, spec: EpisodeSpec, runner: EpisodeRunner) -> None:
    """Bring a session to the state before turn k, and check that it is the recorded one."""
    recorded, environments = fork.recorded, runner.environments
    start = await environments.start(
        rollout.rollout_id, index=spec.task_index, split=rollout.split, seed=recorded.seed
    )
    rollout.info = start.info | rollout.info
    _same("the first messages", recorded.messages, start.messages)
    _same("the tools", recorded.tools, start.tools)
    for number, turn in enumerate(recorded.turns[: fork.turn]):
        step = await environments.step(rollout.rollout_id, turn.action, finish=False)
        if step.error is not None:
            raise RuntimeError(f"environment: turn {number} of the record: {step.error}")
        _same(f"the answers to turn {number}", turn.observations, step.observations)
        if step.done:
            raise NotDeterministicError(
                f"the environment is not deterministic: the episode ended with turn {number}, but it went on"
            )
        rollout.turns.append(dataclasses.replace(turn, generate_s=0.0))


def _same(what: str, recorded: Any, repeated: Any) -> None:
    """Raises: NotDeterministicError."""
    if recorded != repeated:
        raise NotDeterministicError(
            f"the environment is not deterministic: {what} were {_clip(recorded)}, now {_clip(repeated)}"
        )


def _clip(value: Any, most: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _given_turn(given: GivenTurn, state: EpisodeState, rollout: Rollout, runner: EpisodeRunner) -> Turn:
    """A turn that nobody sampled. It has no tokens where the template rewrites it as soon as it is past, so
    that there are none which the policy could have written."""
    renderer, ids = runner.renderer, list(given.completion_ids)
    if not ids:
        try:
            ids = renderer.turn_ids([*state.history, to_message(given.action)], rollout.tools)
        except TemplateError:
            ids = []
    elif not renderer.ends_turn(ids):
        raise ValueError("the given turn's tokens do not end with a turn-end token")
    return Turn(
        prompt_ids=state.prompt,
        completion_ids=ids,
        logprobs=[float("nan")] * len(ids),
        versions=[-1] * len(ids),
        finish_reason="stop",
        action=given.action,
        opens_sample=state.opens_sample,
    )


async def _sampled_turn(
    take: SampledTurn,
    state: EpisodeState,
    rollout: Rollout,
    spec: EpisodeSpec,
    runner: EpisodeRunner,
    sampler: Sampler,
) -> Turn:
    entry = state
    if take.prompt_ids is not None and list(take.prompt_ids) != state.prompt:
        entry = dataclasses.replace(state, prompt=list(take.prompt_ids), opens_sample=True)
    room = runner.room(rollout, entry.prompt)
    if take.max_tokens is not None:
        room = min(room, take.max_tokens)
    if room <= 0:
        raise ValueError(
            f"no token is left for turn {state.number}: its prompt has {len(entry.prompt)} tokens, the turns "
            f"before it have {rollout.completion_tokens}"
        )
    return await runner.sample(entry, spec, sampler, room)
