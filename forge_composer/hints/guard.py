"""A guard against collapse: it watches a run that distils, and lowers the SDPO channel's weight or stops.

Self-distillation alone is known to fall apart after some hundred steps: the teacher is the policy, so its
faults feed themselves. The signs come in the metrics before they come in the reward: teacher and student
drift apart, the entropy dies out or explodes, answers shrink to nothing or grow without end, the held-out
reward falls. Each is compared with what the run itself began with, as a mean over a window of steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from forge_composer.config.hints import GuardConfig

SIGNALS = {
    "sdpo/jsd": "teacher-student divergence",
    "train/entropy": "entropy",
    "rollout/completion_tokens_mean": "tokens a rollout",
}
"""Metrics of a step that are watched, and what they are."""


class CollapseError(RuntimeError):
    """The guard was told to stop the run, and a limit was passed."""


@dataclass(slots=True)
class _Signal:
    """The last values of a metric, and the mean of the first window."""

    recent: deque[float]
    baseline: float | None = None


@dataclass(slots=True)
class CollapseGuard:
    """Takes in the metrics of each step and each evaluation; keeps what is left of alpha.

    Attributes:
        config: limits and what to do.
        scale: what is left of the channel's weight, in [0, 1]; 0 switches the channel off for good.
    """

    config: GuardConfig
    scale: float = 1.0
    _signals: dict[str, _Signal] = field(default_factory=dict)
    _best_reward: float = -math.inf

    def step(self, metrics: dict[str, float]) -> str | None:
        """Take in a step's metrics; what was done about them, in words, if anything was.

        Raises:
            CollapseError: a limit is passed and the guard is to stop the run.
        """
        if self.config.action == "off" or self.scale == 0.0:
            return None
        found = [
            reason for name in SIGNALS if name in metrics and (reason := self._watch(name, metrics[name]))
        ]
        return self._act("; ".join(found)) if found else None

    def evaluation(self, reward: float) -> str | None:
        """Take in the mean reward of an evaluation; as `step`."""
        if self.config.action == "off" or self.scale == 0.0:
            return None
        best, self._best_reward = self._best_reward, max(self._best_reward, reward)
        if not reward < best - self.config.max_reward_drop:
            return None
        return self._act(
            f"held-out reward {reward:.3f}, more than hints.guard.max_reward_drop = "
            f"{self.config.max_reward_drop:g} below the best evaluation's {best:.3f}"
        )

    def _watch(self, name: str, value: float) -> str | None:
        """What is wrong with a signal, once its window is full."""
        signal = self._signals.setdefault(name, _Signal(deque(maxlen=self.config.window)))
        signal.recent.append(value)
        if len(signal.recent) < self.config.window:
            return None
        mean = math.fsum(signal.recent) / self.config.window
        if signal.baseline is None:
            signal.baseline = mean
            return None
        low, high = self._limits(name)
        if signal.baseline * low <= mean <= signal.baseline * high:
            return None
        return (
            f"{SIGNALS[name]} {mean:.4g} over {self.config.window} steps, against {signal.baseline:.4g} at "
            f"first: outside {low:g} to {high:g} times that"
        )

    def _limits(self, name: str) -> tuple[float, float]:
        config = self.config
        return {
            "sdpo/jsd": (0.0, config.max_jsd_growth),
            "train/entropy": (config.min_entropy, config.max_entropy),
            "rollout/completion_tokens_mean": (config.min_length, config.max_length),
        }[name]

    def _act(self, reason: str) -> str:
        if self.config.action == "stop":
            raise CollapseError(f"the collapse guard stopped the run: {reason}")
        for signal in self._signals.values():
            signal.recent.clear()  # the lower weight gets a whole window to show
        self.scale *= self.config.factor
        if self.scale < self.config.floor:
            self.scale = 0.0
        left = (
            f"{self.scale:g} of loss.sdpo.weight is left" if self.scale else "the channel is off from here on"
        )
        return f"collapse guard: {reason}; {left}"
