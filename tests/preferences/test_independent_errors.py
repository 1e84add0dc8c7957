"""Agreement of teachers that err independently, through the real extraction, against exact numbers."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.extraction import PairExtractor
from forge_composer.preferences.records import PreferencePair
from tests.preferences.replayed import calling, replayed, state

ACCURACY, ACTIONS = 0.8, 16
STEPS = 4000
"""The standard error of a yield of one half is then 0.8 points, so that 2 points are 2.5 of them; precisions
have a tenth of that."""


def exact(teachers: int, quorum: int) -> tuple[float, float]:
    """Precision and yield, by going through all answers; action 0 is right."""
    wrong = (1 - ACCURACY) / (ACTIONS - 1)
    right = made = 0.0
    for said in itertools.product(range(ACTIONS), repeat=teachers):
        probability = 1.0
        for action in said:
            probability *= wrong if action else ACCURACY
        ranked = Counter(said).most_common()
        tied = len(ranked) > 1 and ranked[1][1] == ranked[0][1]
        if ranked[0][1] >= quorum and not tied:
            made += probability
            right += probability * (ranked[0][0] == 0)
    return right / made, made


@pytest.mark.parametrize(
    ("teachers", "quorum", "precision", "share"),
    [(1, 1, 0.800, 1.0), (3, 2, 0.991, 0.904), (3, 3, 0.9999, 0.512)],
)
async def test_precision_and_yield(teachers: int, quorum: int, precision: float, share: float) -> None:
    assert exact(teachers, quorum) == pytest.approx((precision, share), abs=5e-4)
    draw = random.Random(f"{teachers}/{quorum}")
    extractor = PairExtractor(ReplayConfig(quorum=quorum, min_quorum=quorum))
    pairs = right = 0
    for index in range(STEPS):
        said = [0 if draw.random() < ACCURACY else draw.randrange(1, ACTIONS) for _ in range(teachers)]
        step = replayed(
            state(calling("read", n=-1), index, messages=[{"role": "user", "content": str(index)}]),
            [calling("read", n=action) for action in said],
        )
        pair = await extractor.extract(step)
        if isinstance(pair, PreferencePair):
            pairs += 1
            right += pair.chosen.tool_calls[0].arguments == {"n": 0}
    assert right / pairs == pytest.approx(precision, abs=0.02)
    assert pairs / STEPS == pytest.approx(share, abs=0.02)
