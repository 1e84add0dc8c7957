"""The training samples of a batch: what GRPO trains on, with the targets of failed turns attached.

Groups whose rewards are all equal are nothing to GRPO; their failed rollouts may still be distilled, and are
then in the batch for that alone.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_composer.batching.samples import samples_from_rollout
from forge_composer.config.hints import HintsConfig
from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.pipeline import HintPipeline
from forge_composer.hints.records import DistillTarget, Misaligned, Target
from forge_composer.hints.sources import make_sources
from forge_composer.types import Rollout, RolloutGroup, TrainingSample


@dataclass(slots=True)
class TargetedSamples:
    """Targets by rollout, aligned; and counts: `kind/...`, `source/...`, `misaligned/...`, `no_hint`."""

    samples: list[TrainingSample] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class TargetedSampleBuilder:
    """Adds targets to the samples of a batch; deterministic by seed."""

    def __init__(self, config: HintsConfig, contexts: TeacherContexts, seed: int) -> None:
        """Make the sources of hints.

        Raises:
            ValueError: the judge's key is not in the environment.
        """
        self.pipeline = HintPipeline(config, make_sources(config), seed)
        self.contexts = contexts

    async def add(self, samples: Sequence[TrainingSample], groups: Sequence[RolloutGroup]) -> TargetedSamples:
        """The samples, with the groups' targets attached to them or to samples of their own.

        Args:
            samples: of the rollouts that GRPO trains on, in the order that `samples_from_rollout` gives.
            groups: those whose failed turns are targeted.
        """
        result = TargetedSamples(list(samples))
        of_rollout: dict[str, list[TrainingSample]] = {}
        for sample in samples:
            of_rollout.setdefault(sample.rollout_id, []).append(sample)
        all_found = await asyncio.gather(*(self.pipeline.targets_for(group) for group in groups))
        for group, found in zip(groups, all_found, strict=True):
            rollouts = {rollout.rollout_id: rollout for rollout in group.rollouts}
            result.counts += found.counts
            for target in found.targets:
                rollout = rollouts[target.rollout_id]
                aligned = self._align(rollout, target)
                result.counts += aligned.counts
                if not aligned.targets:
                    continue
                if rollout.rollout_id not in of_rollout:
                    of_rollout[rollout.rollout_id] = samples_from_rollout(rollout, 0.0)
                    for sample in of_rollout[rollout.rollout_id]:
                        sample.policy_gradient = False
                    result.samples += of_rollout[rollout.rollout_id]
                for part in aligned.targets:
                    of_rollout[rollout.rollout_id][part.sample_index].targets.append(part)
                result.targets.append(target)
        return result

    def _align(self, rollout: Rollout, target: Target) -> _Aligned:
        built: Sequence[DistillTarget | Misaligned]
        if self.pipeline.config.scope == "rollout":
            built = self.contexts.whole(rollout, target)
        else:
            built = [self.contexts.build(rollout, target)]
        aligned = _Aligned()
        for part in built:
            if isinstance(part, Misaligned):
                aligned.counts[f"misaligned/{part.reason}"] += 1
            else:
                aligned.targets.append(part)
        return aligned


@dataclass(slots=True)
class _Aligned:
    """A target in token ids, one part a training sample, and what could not be aligned."""

    targets: list[DistillTarget] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def write_targets(path: Path, step: int, targets: Sequence[Target]) -> None:
    """Append targets to a JSONL file: one line each, with the step that they were distilled in."""
    with path.open("a", encoding="utf-8") as file:
        for target in targets:
            record = {name: getattr(target, name) for name in Target.__slots__}
            file.write(json.dumps({"step": step, **record}, ensure_ascii=False) + "\n")
