"""From a finished group to its targets: routing, faults, hints, limits, weights."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

from forge_composer.config.hints import HintsConfig
from forge_composer.hints.records import Target
from forge_composer.hints.sources import SOURCES, HintRequest
from forge_composer.hints.targets import Fault, faults
from forge_composer.types import Rollout, RolloutGroup


@dataclass(slots=True)
class GroupTargets:
    """The targets of a group, and counts by name: `kind/...`, `source/...`, `no_hint`, `over_limit`."""

    targets: list[Target] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def targets_of(group: RolloutGroup, config: HintsConfig, seed: int) -> GroupTargets:
    """The targeted turns of a group with their hints; the same for the same group and seed.

    Rollouts without a reward are not targeted.
    """
    result = GroupTargets()
    scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
    successes = [rollout for rollout in scored if _succeeded(rollout, config)]
    weight = 1.0
    if config.weight_by_success and scored:
        rate = len(successes) / len(scored)
        weight = math.sqrt(rate * (1.0 - rate))
    if weight == 0.0:
        return result
    for rollout in scored:
        succeeded = _succeeded(rollout, config)
        if succeeded and config.routing == "failed":
            continue
        rng = random.Random(f"hints/{seed}/{rollout.rollout_id}")
        found = [f for f in faults(rollout, succeeded=succeeded) if f.kind not in config.ignore]
        for fault in found:
            if _count_over(result, rollout, config):
                result.counts["over_limit"] += 1
                continue
            _add(result, HintRequest(fault, rollout, successes, rng), weight, config)
    return result


def _succeeded(rollout: Rollout, config: HintsConfig) -> bool:
    return rollout.reward is not None and rollout.reward >= config.success_threshold


def _count_over(result: GroupTargets, rollout: Rollout, config: HintsConfig) -> bool:
    mine = sum(target.rollout_id == rollout.rollout_id for target in result.targets)
    return mine >= config.max_targets_per_rollout


def _add(result: GroupTargets, request: HintRequest, weight: float, config: HintsConfig) -> None:
    fault: Fault = request.fault
    for name in config.sources:
        hint = SOURCES[name].write(request)
        if hint is None or not (hint := clip(hint, config.max_hint_chars)):
            continue
        target = Target(request.rollout.rollout_id, fault.turn, fault.kind, hint, name, weight)
        result.targets.append(target)
        result.counts[f"kind/{fault.kind}"] += 1
        result.counts[f"source/{name}"] += 1
        return
    result.counts["no_hint"] += 1


def clip(hint: str, limit: int) -> str:
    """At most `limit` characters; cut at the end of a line where the first line fits."""
    hint = hint.strip()
    if len(hint) <= limit:
        return hint
    whole_lines, newline, _ = hint[: limit + 1].rpartition("\n")
    return whole_lines.rstrip() if newline else hint[:limit].rstrip()
