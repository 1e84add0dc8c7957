"""Many targets in a few numbers."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from forge_composer.inspection.records import NO_EFFECT, Summary, TargetView


def summarize(views: Sequence[TargetView]) -> Summary | None:
    """The numbers over some targets; None if there are none."""
    if not views:
        return None
    tokens = [token for view in views for token in view.tokens]
    return Summary(
        targets=len(views),
        tokens=len(tokens),
        jsd=statistics.fmean(token.jsd for token in tokens),
        advantage=statistics.fmean(token.advantage for token in tokens),
        positive=sum(view.advantage > 0 for view in views) / len(views),
        no_effect=sum(view.jsd < NO_EFFECT for view in views) / len(views),
    )


def summarize_by(views: Sequence[TargetView], key: Callable[[TargetView], str]) -> dict[str, Summary]:
    """The numbers by kind or source, the one with the most targets first."""
    groups: dict[str, list[TargetView]] = defaultdict(list)
    for view in views:
        groups[key(view)].append(view)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: summary for name, members in ordered if (summary := summarize(members)) is not None}
