"""Each limit: held, not held, open."""

from __future__ import annotations

from typing import Any

import pytest

from forge_composer.config.replay import ReplayLimits
from forge_composer.replay_report.opinions import draws_for
from forge_composer.replay_report.teachers import percentiles
from forge_composer.replay_report.verdict import judge

LIMITS = ReplayLimits(usd_per_trace=2.0, latency_p95_s=10.0, errors=1, pairs_per_trace=3.0, p_value=0.05)
GOOD: dict[str, Any] = {
    "usd_per_trace": 2.0,
    "latency_p95_s": 10.0,
    "errors": 1,
    "pairs_per_trace": 3.0,
    "p_value": 0.05,
}


def results(*, whole: bool = True, **changes: Any) -> dict[str, str]:
    return {check.name: check.result for check in judge(LIMITS, whole=whole, **(GOOD | changes))}


def test_a_limit_itself_is_held() -> None:
    assert set(results().values()) == {"pass"}
    assert list(results()) == list(ReplayLimits.model_fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("usd_per_trace", 2.01),
        ("latency_p95_s", 10.5),
        ("errors", 2),
        ("pairs_per_trace", 2.9),
        ("p_value", 0.06),
    ],
)
def test_each_limit_can_fail_alone(name: str, value: float) -> None:
    found = results(**{name: value})
    assert found.pop(name) == "fail"
    assert set(found.values()) == {"pass"}


def test_with_calls_missing_only_what_grows_can_fail() -> None:
    assert set(results(whole=False).values()) == {"undecided"}
    found = results(whole=False, usd_per_trace=3.0, errors=5, latency_p95_s=99.0, pairs_per_trace=0.0)
    assert found["usd_per_trace"] == found["errors"] == "fail"
    assert found["latency_p95_s"] == found["pairs_per_trace"] == "undecided"


def test_what_was_not_measured_is_open() -> None:
    assert results(latency_p95_s=None)["latency_p95_s"] == "undecided"


def test_percentiles_interpolate() -> None:
    found = percentiles([float(value) for value in range(101)])
    assert found is not None
    assert (found.p50, found.p95, found.p99) == (50.0, 95.0, 99.0)
    assert percentiles([]) is None
    one = percentiles([2.5])
    assert one is not None
    assert one.p99 == 2.5


def test_draws_shrink_with_the_replay() -> None:
    assert [draws_for(steps) for steps in (0, 50, 2000, 4000, 10**6)] == [1000, 1000, 1000, 500, 200]
    assert 1 / (1 + draws_for(10**6)) < ReplayLimits().p_value  # p can still pass
