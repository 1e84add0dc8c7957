"""Which targets of a run are looked at, and in which order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from forge_composer.inspection.records import InspectionError, StepTarget, TargetView

Sort = Literal["step", "jsd", "advantage"]
SORTS: tuple[Sort, ...] = get_args(Sort)


@dataclass(slots=True, frozen=True)
class Selection:
    """What to look at.

    Attributes:
        step: only targets of this optimizer step.
        kind: only this kind of fault.
        source: only hints of this source.
        limit: most targets that are shown.
        sort: `step`: the earliest; `jsd`: those that the hint changes most; `advantage`: those that the hint
            speaks most against; None: a random choice. Sorting by a measurement measures all that fit.
        seed: of the random choice.
    """

    step: int | None = None
    kind: str | None = None
    source: str | None = None
    limit: int = 10
    sort: Sort | None = None
    seed: int = 0

    def fitting(self, targets: Sequence[StepTarget]) -> list[StepTarget]:
        """The targets of this step, kind and source.

        Raises:
            InspectionError: there is none; the message counts those that there are.
        """
        left = list(targets)
        for name, wanted in (("step", self.step), ("kind", self.kind), ("source", self.source)):
            if wanted is None:
                continue
            here = [_field(entry, name) for entry in left]
            left = [entry for entry, value in zip(left, here, strict=True) if value == wanted]
            if not left:
                raise InspectionError(f"--{name} {wanted}: no target has it; there are {_counted(here)}")
        return left

    def to_measure(self, fitting: Sequence[StepTarget]) -> list[StepTarget]:
        """Those that have to be measured, in the order of the run."""
        if self.sort in ("jsd", "advantage") or len(fitting) <= self.limit:
            return list(fitting)
        if self.sort == "step":
            return sorted(fitting, key=lambda entry: entry.step)[: self.limit]
        chosen = random.Random(self.seed).sample(range(len(fitting)), self.limit)
        return [fitting[index] for index in sorted(chosen)]

    def to_show(self, measured: Iterable[TargetView]) -> list[TargetView]:
        """Those that are shown, in order."""
        views = sorted(measured, key=lambda view: (view.step, view.target.rollout_id, view.target.turn))
        if self.sort == "jsd":
            views.sort(key=lambda view: -view.jsd)
        elif self.sort == "advantage":
            views.sort(key=lambda view: view.advantage)
        return views[: self.limit]

    def in_words(self, fitting: int) -> str:
        """How the shown ones were chosen."""
        match self.sort:
            case "step":
                return "the earliest"
            case "jsd":
                return "the largest divergence first"
            case "advantage":
                return "those first that the hint speaks most against"
        return "all, by step" if fitting <= self.limit else f"a random choice (seed {self.seed}), by step"


def _field(entry: StepTarget, name: str) -> int | str:
    return entry.step if name == "step" else str(getattr(entry.target, name))


def _counted(values: Sequence[int | str]) -> str:
    counts = Counter(values)
    if isinstance(values[0], int):
        steps = sorted(counts)
        return f"targets of {len(steps)} steps from {steps[0]} to {steps[-1]}"
    return ", ".join(f"{value} ({count})" for value, count in counts.most_common())
