"""Micro tasks played in this process: the real environment behind `Environments`, and a scripted policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from forge_composer.config.schema import RolloutConfig
from forge_composer.envs.adapters import FeatureDeletionAdapter
from forge_composer.envs.feature_deletion import (
    FeatureDeletionAction,
    FeatureDeletionEnvironment,
    FeatureDeletionOptions,
)
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rollout.episode import EpisodeRunner, EpisodeSpec, TokenLimits
from forge_composer.services import Environments
from forge_composer.types import Completion, EpisodeStart, EpisodeStep, ParsedAction, SamplingRequest

LIMITS = TokenLimits(
    max_turn_tokens=300, max_prompt_tokens=900, max_completion_tokens=700, max_model_len=4000
)
TASK = 5
"""`form(t)`: t without the last 3 characters, followed by "d"."""
RIGHT = 'return t[:-3] + "d"'
WRONG = 'return t[:-3] + "x"'

Says = Callable[[str, SamplingRequest], str]
"""What a policy says: from the text of its prompt and the request."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write(body: str) -> str:
    return call("write_body", body=body) + call("run_tests")


SUBMIT = call("submit")


class MicroEnvironments:
    """Each episode has an environment of its own; all share one sandbox."""

    def __init__(self, delay_s: Callable[[str], float] = lambda rollout_id: 0.0) -> None:
        self.delay_s = delay_s
        self.open: dict[str, tuple[FeatureDeletionEnvironment, FeatureDeletionAdapter]] = {}
        self.starts: list[tuple[str, int, str, int]] = []
        self.steps: list[tuple[str, bool]] = []
        self.ended: list[str] = []
        self.most_open = 0

    async def start(self, rollout_id: str, *, index: int, split: str, seed: int) -> EpisodeStart:
        environment = FeatureDeletionEnvironment(FeatureDeletionOptions())
        adapter = FeatureDeletionAdapter()
        self.starts.append((rollout_id, index, split, seed))
        self.open[rollout_id] = environment, adapter
        self.most_open = max(self.most_open, len(self.open))
        observation = environment.reset(seed=seed, episode_id=rollout_id, split=split, index=index)
        return adapter.start(SimpleNamespace(observation=observation.model_dump()), rollout_id)

    async def step(self, rollout_id: str, action: ParsedAction, *, finish: bool) -> EpisodeStep:
        await asyncio.sleep(self.delay_s(rollout_id))
        self.steps.append((rollout_id, finish))
        environment, adapter = self.open[rollout_id]

        class InProcess:
            async def act(self, action: dict[str, Any]) -> Any:
                answer = environment.step(FeatureDeletionAction(**action))
                return SimpleNamespace(
                    observation=answer.model_dump(), reward=answer.reward, done=answer.done
                )

        return await adapter.turn(InProcess(), action, finish=finish)

    async def end(self, rollout_id: str) -> None:
        self.ended.append(rollout_id)
        self.open.pop(rollout_id, None)


class Policy:
    """Says what a function of its prompt says, with the stop token unless the text does not fit."""

    def __init__(self, renderer: ChatRenderer, says: Says) -> None:
        self.renderer, self.says = renderer, says
        self.requests: list[SamplingRequest] = []
        self.batches: list[list[str]] = []

    async def generate(self, request: SamplingRequest) -> Completion:
        self.requests.append(request)
        text = self.says(self.renderer.tokenizer.decode(request.prompt_ids), request)
        ids = [*self.renderer.tokenizer.encode(text, add_special_tokens=False), self.renderer.turn_end_ids[0]]
        cut = len(ids) > request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        return Completion(
            request.request_id, ids, [-0.25] * len(ids), [7] * len(ids), "length" if cut else "stop"
        )

    async def generate_batch(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        self.batches.append([request.request_id for request in requests])
        return [await self.generate(request) for request in requests]


def turns(*texts: str) -> Says:
    """Say these texts, by the number of the turn."""
    return lambda prompt, request: texts[int(request.request_id.rpartition("/")[2])]


def make_runner(
    renderer: ChatRenderer, environments: Environments, limits: TokenLimits = LIMITS, **rollout: Any
) -> EpisodeRunner:
    return EpisodeRunner(renderer, environments, RolloutConfig(**({"max_turns": 4} | rollout)), limits)


def episode(rollout_id: str = "train-000001-000", **changes: Any) -> EpisodeSpec:
    values = {"group_id": 1, "index": 0, "task_index": TASK, "split": "train", "seed": 3, "temperature": 0.8}
    return EpisodeSpec(rollout_id=rollout_id, **(values | changes))
