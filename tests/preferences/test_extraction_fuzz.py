"""Whatever the teachers send: each step gives a pair or a reason, and a pair is what it says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.codec import dumps, pair_from_json, pair_to_json
from forge_composer.preferences.extraction import PairExtractor, SkipReason
from forge_composer.preferences.records import PreferencePair
from forge_composer.preferences.replay import replayed_step
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.teachers.actions import canonical_action
from forge_composer.teachers.kinds import ReplyKind
from tests.preferences.replayed import body, reply, token_state
from tests.rendering.chat_fixtures import make_renderer

RENDERER = make_renderer()
PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", '{"name": "read"}', "\n", "x"]
)
SPEECH = st.lists(PIECES | st.text(max_size=6), max_size=6).map("".join)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.sampled_from([1, 1.0, True, None, "return x+1", "return (x + 1)", "'a'", "", [1], {"c": 1.0}])
    | SPEECH,
    max_size=2,
)
NAMES = st.sampled_from(["read", "read", "submit", "nothing"])
GOOD = st.builds(lambda name, arguments: body(name, json.dumps(arguments)), NAMES, ARGUMENTS)
RAW = st.builds(body, NAMES, st.none() | st.text(max_size=12), st.none() | SPEECH)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "tool_calls", "error"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)
REPLY = st.one_of(GOOD, GOOD, GOOD, RAW, ANYTHING, st.sampled_from(list(ReplyKind)[1:]))
SAID = st.one_of(
    SPEECH,
    st.builds(
        lambda call: f"<tool_call>\n{json.dumps(call)}\n</tool_call>",
        st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS}),
    ),
)
FAMILIES = st.lists(st.sampled_from("ABC"), min_size=1, max_size=4)


def check(
    said: str, families: list[str], samples: list[list[Any]], options: dict[str, Any], tokens: bool
) -> PreferencePair | SkipReason:
    config = ReplayConfig(max_length_ratio=1000.0, **options)
    at = token_state(RENDERER, said)
    replies = [
        reply(at, f"t{number}", family, answer, sample=sample)
        for sample, answers in enumerate(samples)
        for number, (family, answer) in enumerate(zip(families, answers, strict=False))
    ]
    step = replayed_step(at, replies, config)
    assert [vote.kind for vote in step.votes] == [answer.kind.value for answer in replies]
    extractor = PairExtractor(config, renderer=RENDERER if tokens else None)
    found = asyncio.run(extractor.extract(step))
    assert extractor.metrics()["replay/steps"] == 1.0
    if not isinstance(found, PreferencePair):
        assert found in SkipReason
        assert extractor.counts == {found: 1}
        return found
    chosen = canonical_action(found.chosen, text=config.text)
    assert chosen is not None
    assert chosen != canonical_action(found.rejected, text=config.text)
    supporters = {vote.family for vote in step.step_votes().votes if vote.action == chosen}
    answered = {vote.family for vote in step.step_votes().votes if vote.action is not None}
    assert set(found.families) == supporters
    assert len(supporters) >= min(config.quorum, len(answered)) >= config.min_quorum
    assert found.weight == len(supporters) / len(answered)
    if found.tokens is not None:
        for ids, action in ((found.tokens.chosen_ids, chosen), (found.tokens.rejected_ids, step.student)):
            assert canonical_action(parse_action(RENDERER.decode(ids)), text=config.text) == action
            assert sum(token in RENDERER.turn_end_ids for token in ids[-1:]) == 1
    assert pair_from_json(json.loads(dumps(pair_to_json(found)))) == found
    return found


CASE = {
    "said": SAID,
    "families": FAMILIES,
    "samples": st.lists(st.lists(REPLY, min_size=4, max_size=4), min_size=1, max_size=2),
    "options": st.fixed_dictionaries(
        {
            "quorum": st.just(2),
            "min_quorum": st.sampled_from([1, 2]),
            "text": st.sampled_from(["exact", "whitespace", "words", "any"]),
        }
    ),
    "tokens": st.booleans(),
}


@given(**CASE)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_replies(**case: Any) -> None:
    check(**case)


@pytest.mark.slow
@given(**CASE)
@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_ten_thousand_replies(**case: Any) -> None:
    check(**case)


@given(arguments=ARGUMENTS, others=st.lists(REPLY, max_size=2))
@settings(max_examples=60, deadline=None)
def test_two_that_say_the_same_give_a_pair(arguments: dict[str, Any], others: list[Any]) -> None:
    """So that the fuzz is not of reasons alone."""
    answers = [body("read", json.dumps(arguments)) for _ in range(2)]
    found = check("no", ["A", "B"], [answers], {}, tokens=False)
    assert isinstance(found, PreferencePair)
    assert found.chosen.tool_calls[0].arguments == arguments
