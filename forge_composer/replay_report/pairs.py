"""Pairs out of the replayed steps, tokenised where there is a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from forge_composer.preferences.extraction import PairExtractor
from forge_composer.preferences.records import PreferencePair
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.replay_report.report import Pairs
from forge_composer.replay_report.settings import ReplaySettings


async def make_pairs(
    steps: Sequence[ReplayedStep],
    traces: Sequence[str],
    settings: ReplaySettings,
    renderer: ChatRenderer | None,
) -> Pairs:
    """The pairs, in the order of the steps: equal steps give equal pairs in every start.

    Args:
        steps: the replayed steps. One with missing calls gives a pair if the others are enough.
        traces: ids of all replayed traces.
        settings: quorum, lengths.
        renderer: of the policy; None: pairs of text.
    """
    extractor = PairExtractor(
        settings.replay,
        renderer=renderer,
        render_missing=renderer is not None,
        memory=max(1, len(steps)),
    )
    made: list[PreferencePair] = []
    skipped: Counter[str] = Counter()
    for step in steps:
        found = await extractor.extract(step)
        if isinstance(found, PreferencePair):
            made.append(found)
        else:
            skipped[str(found)] += 1
    counts = Counter(pair.trace for pair in made)
    return Pairs(tuple(made), skipped, {trace: counts[trace] for trace in traces})
