"""Options of targeted textual feedback: which turns are targeted, who writes the hint, where it stands."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from forge_composer._section import Section

HintSourceName = Literal["template", "sibling", "feedback"]
HintPosition = Literal["user", "system", "observation"]


class HintsConfig(Section):
    """Targets and hints of the SDPO channel; in effect when `loss.sdpo.weight` is above 0."""

    sources: tuple[HintSourceName, ...] = Field(("template", "sibling", "feedback"), min_length=1)
    """Who writes the hint; the first that has something to say does. `template`: a reminder for what the
    environment reports (malformed call, unknown tool, wrong arguments). `sibling`: what a successful rollout
    of the same group did. `feedback`: the environment's own message."""
    position: HintPosition = "user"
    """Where the hint stands, just before the targeted turn: a `user` or `system` message of its own, or at
    the end of the last `observation`."""
    max_targets_per_rollout: PositiveInt = 2
    """Most turns of one rollout that are targeted; the earliest faults come first."""
    max_hint_chars: PositiveInt = 600
    """A longer hint is cut, at the end of a line where there is one."""
    routing: Literal["failed", "all"] = "failed"
    """`failed`: only rollouts under `success_threshold` are distilled, correct ones are left to GRPO (SRPO,
    arXiv 2604.02288: distilling them is one cause of collapse). `all`: every rollout."""
    success_threshold: float = 1.0
    """Reward from which on a rollout is a success: not targeted, and a demonstration for its siblings."""
    weight_by_success: bool = False
    """Weigh targets by sqrt(p (1 - p)) with the group's success rate p (SC-SDPO, arXiv 2605.27765)."""
    ignore: tuple[str, ...] = ()
    """Kinds of faults that are not targeted (`test_failed`, `unknown_tool`, `repeated_action`, ...)."""
