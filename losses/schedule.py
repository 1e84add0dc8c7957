"""How a channel's weight changes over a run: up at the start, down at the end."""

from __future__ import annotations

import math

from forge_composer.losses.config import WeightSchedule


def scheduled_share(schedule: WeightSchedule, step: int, total_steps: int) -> float:
    """The share of a channel's weight that is in effect in a step.

    The warm-up rises linearly and gives `(step + 1) / warmup_steps`, so that the first step has some of it
    and the last step of the warm-up has all. The decay falls from 1 before its first step to `final_share`
    in the last step of the run. Where the two overlap, the smaller one counts.

    Args:
        schedule: the options.
        step: the optimizer step, from 0.
        total_steps: steps of the run.
    """
    share = 1.0
    if schedule.warmup_steps > 0:
        share = min(share, (step + 1) / schedule.warmup_steps)
    if schedule.decay != "none" and schedule.decay_steps > 0:
        done = (step + 1 - (total_steps - schedule.decay_steps)) / schedule.decay_steps
        done = min(max(done, 0.0), 1.0)
        left = 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        share = min(share, schedule.final_share + (1.0 - schedule.final_share) * left)
    return share
