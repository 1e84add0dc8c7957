"""The pair buffer against a model of it, its draws, and its saved state."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forge_composer.batching.preference_rows import TokenPair
from forge_composer.buffers.pair_buffer import PairBuffer
from forge_composer.config.replay import PairBufferConfig
from forge_composer.preferences.records import PairTokens
from tests.buffers.pairs import make_pair, without_tokens

Value = TypeVar("Value")


def now(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """What the coroutine returns; it never waits, so it needs no event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: Value = done.value
        return value
    raise AssertionError("it waited")


def make_buffer(seed: int = 0, **options: Any) -> PairBuffer:
    return PairBuffer(PairBufferConfig(**options), seed=seed)


def numbers(sample: list[TokenPair]) -> list[int]:
    """Which pairs they are."""
    return [pair.context_ids[0] for pair in sample]


async def fill(buffer: PairBuffer, count: int, version: int = 0) -> None:
    """`count` pairs with references."""
    await buffer.put([make_pair(number, version) for number in range(count)])
    await buffer.set_references({make_pair(n).pair_id: (-1.0 - n, -2.0 - n) for n in range(count)})


async def test_a_pair_on_its_way() -> None:
    buffer = make_buffer(max_uses=2)
    await buffer.put([make_pair(4, version=3)])
    assert await buffer.sample(3, 5) == [], "it has no reference yet"
    assert await buffer.unscored(5) == [make_pair(4, version=3)]
    assert await buffer.unscored(5) == [], "somebody is at it"
    await buffer.set_references({"trace-1#1": (-3.5, -4.5), "gone#0": (-1.0, -1.0)})
    expected = TokenPair((4, 1, 2), (3, 4), (4, 5, 4), 0.1 + 1 / 7, -3.5, -4.5, 0.7)
    assert await buffer.sample(3, 5) == [expected]
    assert await buffer.stats() == {
        "depth": 1.0,
        "ready": 1.0,
        "inserted": 1.0,
        "dropped/capacity": 0.0,
        "dropped/stale": 0.0,
        "dropped/used": 0.0,
        "dropped/duplicate": 0.0,
    }
    assert await buffer.sample(4, 5) == [expected]
    assert await buffer.sample(5, 5) == []
    stats = await buffer.stats()
    assert (stats["depth"], stats["dropped/used"]) == (0.0, 1.0)


async def test_first_reference_stays() -> None:
    buffer = make_buffer()
    await fill(buffer, 1)
    await buffer.set_references({"trace-0#0": (-9.0, -9.0)})
    (pair,) = await buffer.sample(0, 1)
    assert (pair.reference_chosen, pair.reference_rejected) == (-1.0, -2.0)


async def test_with_the_initial_policy_as_reference_pairs_are_ready_at_once() -> None:
    buffer = make_buffer(reference="initial")
    await buffer.put([make_pair(4)])
    assert await buffer.unscored(5) == []
    (pair,) = await buffer.sample(0, 5)
    assert not pair.has_reference


async def test_age_counts_from_the_version_that_sampled() -> None:
    """Lag 2 of versions 3 and unknown: at 5 both are fresh, at 6 only the unknown one."""
    buffer = make_buffer(max_lag=2, max_uses=9, reference="initial")
    await buffer.put([make_pair(0, version=3), make_pair(1, version=-1)])
    assert sorted(numbers(await buffer.sample(5, 5))) == [0, 1]
    assert numbers(await buffer.sample(6, 5)) == [1]
    assert (await buffer.stats())["dropped/stale"] == 1.0
    assert numbers(await buffer.sample(10**6, 5)) == [1]


async def test_draw_depends_on_seed_step_and_contents_alone() -> None:
    """Not on the order of arrival; and other seeds and steps draw others."""

    async def draw(order: list[int], seed: int, version: int) -> list[int]:
        buffer = make_buffer(seed, reference="initial")
        for number in order:
            await buffer.put([make_pair(number)])
        return numbers(await buffer.sample(version, 6))

    first = await draw(list(range(30)), 0, 0)
    assert await draw(list(reversed(range(30))), 0, 0) == first
    assert await draw(list(range(30)), 1, 0) != first
    assert await draw(list(range(30)), 0, 1) != first


async def test_draw_is_uniform() -> None:
    """3 of 10 in 2,000 steps: each pair 600 times, each place of the draw evenly; 5 standard deviations."""
    buffer = make_buffer(reference="initial", max_uses=10**6, max_lag=10**6)
    await buffer.put([make_pair(number) for number in range(10)])
    draws = [numbers(await buffer.sample(version, 3)) for version in range(2000)]
    assert all(len(set(draw)) == 3 for draw in draws)
    counts = Counter(number for draw in draws for number in draw)
    assert all(abs(counts[number] - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7) for number in range(10))
    first = Counter(draw[0] for draw in draws)
    assert all(abs(first[number] - 200) < 5 * math.sqrt(2000 * 0.1 * 0.9) for number in range(10))


@pytest.mark.parametrize("tokens", [None, PairTokens((), (1,), (2,)), PairTokens((1,), (1,), ())])
async def test_pair_without_tokens_is_refused(tokens: PairTokens | None) -> None:
    buffer = make_buffer()
    with pytest.raises(ValueError, match="pair trace-0#1 has no tokens of a context and two sides"):
        await buffer.put([make_pair(0), dataclasses.replace(without_tokens(1), tokens=tokens)])
    assert (await buffer.stats())["inserted"] == 0.0


@pytest.mark.parametrize("value", [math.nan, -math.inf])
async def test_broken_reference_is_refused(value: float) -> None:
    buffer = make_buffer()
    await buffer.put([make_pair(0), make_pair(1)])
    with pytest.raises(ValueError, match="pair trace-0#1: its reference log-probabilities"):
        await buffer.set_references({"trace-0#0": (-1.0, -1.0), "trace-0#1": (-1.0, value)})
    assert (await buffer.stats())["ready"] == 0.0


async def test_restored_under_other_options() -> None:
    """Less room and fewer uses than when it was saved: the oldest and the used-up go, and are counted."""
    buffer = make_buffer(max_uses=3)
    await fill(buffer, 6)
    used = set(numbers(await buffer.sample(0, 2)))
    smaller = make_buffer(max_uses=1, capacity=3)
    await smaller.load_state_dict(await buffer.state_dict())
    left = [number for number in range(6) if number not in used][-3:]
    assert sorted(numbers(await smaller.sample(0, 9))) == left
    stats = await smaller.stats()
    assert (stats["inserted"], stats["dropped/capacity"], stats["dropped/used"]) == (6.0, 1.0, 5.0)


async def test_what_was_being_scored_is_handed_out_again_after_a_restore() -> None:
    buffer = make_buffer()
    await buffer.put([make_pair(0), make_pair(1)])
    await buffer.unscored(1)
    restored = make_buffer()
    await restored.load_state_dict(await buffer.state_dict())
    assert await restored.unscored(5) == [make_pair(0), make_pair(1)]


def broken_states() -> dict[str, tuple[Any, str]]:
    async def saved() -> dict[str, Any]:
        buffer = make_buffer()
        await fill(buffer, 2)
        state: dict[str, Any] = json.loads(json.dumps(await buffer.state_dict()))
        return state

    def changed(**changes: Any) -> dict[str, Any]:
        state = now(saved())
        state["entries"][1] |= changes
        return state

    state = now(saved())
    pair = state["entries"][1]["pair"]
    return {
        "a list": ([1], "no saved pair buffer"),
        "another format": (state | {"format": "other"}, "no saved pair buffer"),
        "no counts": ({k: v for k, v in state.items() if k != "dropped"}, "not complete: KeyError"),
        "one pair twice": (state | {"entries": [state["entries"][0]] * 2}, "two entries of one pair"),
        "no pair": (changed(pair=None), "entry 1: expected a JSON object"),
        "no weight": (changed(pair={k: v for k, v in pair.items() if k != "weight"}), "entry 1: weight"),
        "no tokens": (changed(pair=pair | {"tokens": None}), "entry 1: pair trace-0#1 has no tokens"),
        "half a reference": (changed(reference=[1.0]), "entry 1: not enough values"),
        "no number of uses": (changed(uses=None), "entry 1: TypeError"),
    }


@pytest.mark.parametrize("name", broken_states())
async def test_broken_state_is_refused_and_changes_nothing(name: str) -> None:
    state, message = broken_states()[name]
    buffer = make_buffer()
    await fill(buffer, 4)
    before = await buffer.state_dict()
    with pytest.raises(ValueError, match=message):
        await buffer.load_state_dict(state)
    assert await buffer.state_dict() == before


class BufferAgainstModel(RuleBasedStateMachine):
    """Any order of calls. The model is a list of dictionaries; restores happen in the midst of use."""

    @initialize(
        capacity=st.integers(1, 6),
        max_lag=st.integers(0, 3),
        max_uses=st.integers(1, 3),
        reference=st.sampled_from(["at_insert", "initial"]),
        seed=st.integers(0, 3),
    )
    def begin(self, seed: int, **options: Any) -> None:
        self.seed, self.options = seed, options
        self.buffer = make_buffer(seed, **options)
        self.model: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.version = 0

    def drop(self, gone: list[dict[str, Any]], why: str) -> None:
        self.model = [item for item in self.model if item not in gone]
        self.counts["dropped/" + why] += len(gone)

    def ready(self) -> list[dict[str, Any]]:
        initial = self.options["reference"] == "initial"
        return [item for item in self.model if initial or item["reference"] is not None]

    @rule(new=st.lists(st.integers(0, 14), max_size=5), lag=st.integers(-1, 4))
    def put(self, new: list[int], lag: int) -> None:
        version = -1 if lag < 0 else max(0, self.version - lag)
        now(self.buffer.put([make_pair(number, version) for number in new]))
        for number in new:
            if any(item["number"] == number for item in self.model):
                self.counts["dropped/duplicate"] += 1
                continue
            item = {"number": number, "version": version, "reference": None, "uses": 0, "asked": False}
            self.model.append(item)
            self.counts["inserted"] += 1
        self.drop(self.model[: max(0, len(self.model) - self.options["capacity"])], "capacity")

    @rule(most=st.integers(0, 4))
    def ask(self, most: int) -> None:
        found = now(self.buffer.unscored(most))
        waiting = [item for item in self.model if item["reference"] is None and not item["asked"]][:most]
        if self.options["reference"] == "initial":
            waiting = []
        assert found == [make_pair(item["number"], item["version"]) for item in waiting]
        for item in waiting:
            item["asked"] = True

    @rule(scored=st.sets(st.integers(0, 14), max_size=6), value=st.floats(-50, -0.1))
    def score(self, scored: set[int], value: float) -> None:
        now(self.buffer.set_references({make_pair(n).pair_id: (value, value - n) for n in scored}))
        for item in self.model:
            if item["number"] in scored and item["reference"] is None:
                item["reference"] = (value, value - item["number"])

    @rule(most=st.integers(0, 4), steps=st.integers(0, 2))
    def sample(self, most: int, steps: int) -> None:
        self.version += steps
        twin = self.restored()
        found = now(self.buffer.sample(self.version, most))
        assert now(twin.sample(self.version, most)) == found
        stale = [i for i in self.model if 0 <= i["version"] < self.version - self.options["max_lag"]]
        self.drop(stale, "stale")
        ready = {item["number"]: item for item in self.ready()}
        assert len(found) == len(set(numbers(found))) == min(most, len(ready))
        for pair in found:
            item = ready[pair.context_ids[0]]
            item["uses"] += 1
            chosen, rejected = item["reference"] or (None, None)
            assert (pair.reference_chosen, pair.reference_rejected) == (chosen, rejected)
        self.drop([item for item in self.model if item["uses"] >= self.options["max_uses"]], "used")

    def restored(self) -> PairBuffer:
        """Another buffer from the state, through JSON."""
        state = now(self.buffer.state_dict())
        twin = make_buffer(self.seed, **self.options)
        now(twin.load_state_dict(json.loads(json.dumps(state, allow_nan=False))))
        assert now(twin.state_dict()) == state
        return twin

    @rule()
    def restart(self) -> None:
        self.buffer = self.restored()
        for item in self.model:
            item["asked"] = False

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "buffer"):
            return
        stats = now(self.buffer.stats())
        assert stats.pop("depth") == len(self.model) <= self.options["capacity"]
        assert stats.pop("ready") == len(self.ready())
        assert {name: count for name, count in stats.items() if count} == +self.counts


TestBufferAgainstModel = BufferAgainstModel.TestCase
TestBufferAgainstModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
