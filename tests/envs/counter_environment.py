"""A small OpenEnv environment that is not ours, as a user's package might hold it."""

import os
import time
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State


class CounterAction(Action):
    """Add to the counter."""

    amount: int
    """How much."""
    nap_s: float = 0.0


class CounterObservation(Observation):
    total: int = 0


class CounterEnvironment(Environment[CounterAction, CounterObservation, State]):
    """Reach 10; each step is rewarded with what it added."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CounterObservation:
        self.total = (seed or 0) % 5
        self._state = State(episode_id=episode_id)
        return CounterObservation(total=self.total)

    def step(self, action: CounterAction, timeout_s: float | None = None, **_: Any) -> CounterObservation:
        time.sleep(action.nap_s)
        if action.amount == 13:
            raise RuntimeError("unlucky")
        if action.amount == 666:
            os._exit(1)
        self.total += action.amount
        return CounterObservation(total=self.total, done=self.total >= 10, reward=float(action.amount))

    @property
    def state(self) -> State:
        return self._state


class LonelyEnvironment(CounterEnvironment):
    """Does not allow a second session."""

    SUPPORTS_CONCURRENT_SESSIONS = False
