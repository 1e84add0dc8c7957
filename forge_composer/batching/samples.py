"""Training samples from rollouts: token sequences exactly as the generator saw and sampled them."""

from __future__ import annotations

import math

from forge_composer.types import Rollout, TrainingSample, Turn


def samples_from_rollout(rollout: Rollout, advantage: float) -> list[TrainingSample]:
    """The rollout's training samples, every sampled token with the rollout's advantage.

    A turn whose prompt extends what came before (`opens_sample` False) is appended to the sample of the
    turns before it, so that a conversation is one sequence; a turn that opens a sample starts a new one.
    Prompts and observations are context and never trained on. A token whose reported log-probability is not
    finite stays in the sequence and is masked, so that it counts in no numerator and in no divisor.

    Raises:
        ValueError: a turn claims to extend the tokens before it and does not, or its lists differ in length.
    """
    samples: list[TrainingSample] = []
    for number, turn in enumerate(rollout.turns):
        where = f"rollout {rollout.rollout_id}, turn {number}"
        if not len(turn.completion_ids) == len(turn.logprobs) == len(turn.versions):
            raise ValueError(
                f"{where}: {len(turn.completion_ids)} tokens, {len(turn.logprobs)} log-probabilities and "
                f"{len(turn.versions)} versions; there must be one of each per token"
            )
        if turn.opens_sample or not samples:
            samples.append(TrainingSample(rollout.rollout_id, [], [], [], [], []))
        _append_turn(samples[-1], turn, advantage, where)
    return samples


def _append_turn(sample: TrainingSample, turn: Turn, advantage: float, where: str) -> None:
    known = len(sample)
    if turn.prompt_ids[:known] != sample.token_ids:
        raise ValueError(
            f"{where}: the prompt does not begin with the {known} tokens before it; a turn that rewrites its "
            "history must have opens_sample set"
        )
    context = turn.prompt_ids[known:]
    sample.token_ids += context
    sample.action_mask += [False] * len(context)
    sample.logprobs += [0.0] * len(context)
    sample.versions += [-1] * len(context)
    sample.advantages += [0.0] * len(context)
    # A token that was sampled after an update in mid-turn still attends to keys and values that the weights
    # before it computed: the turn's first version is the oldest that took part in it.
    oldest = min(turn.versions, default=-1)
    for token, logprob, _ in zip(turn.completion_ids, turn.logprobs, turn.versions, strict=True):
        trained = math.isfinite(logprob)
        sample.token_ids.append(token)
        sample.action_mask.append(trained)
        sample.logprobs.append(logprob if trained else 0.0)
        sample.versions.append(oldest if trained else -1)
        sample.advantages.append(advantage if trained else 0.0)
