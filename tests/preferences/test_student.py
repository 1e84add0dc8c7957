"""The chosen side in the policy's own words: which sample, and exactly its tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.extraction import PairExtractor
from forge_composer.preferences.records import PairTokens, PreferencePair
from forge_composer.preferences.student import StudentSampler
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.rollout.episode import derived_seed
from forge_composer.teachers.actions import canonical_action
from forge_composer.types import Completion, SamplingRequest
from tests.preferences.replayed import calling, replayed, state, token_state
from tests.rendering.chat_fixtures import make_renderer
from tests.rollout.micro_episodes import Policy, call

RENDERER = make_renderer()
SAID = call("write_body", body="return a - b")
AGREED = calling("write_body", body="return a + b")
FORM = canonical_action(AGREED) or ""
OWN = (
    call("write_body", body="return a * b"),
    call("write_body", body="return a+b"),
    "Let me see.\n" + call("write_body", body="return (a + b)"),
    call("write_body", body="return a+b"),
)
"""Samples 1 to 3 are the agreed action, in two ways."""


def says(*texts: str) -> Policy:
    return Policy(RENDERER, lambda prompt, request: texts[int(request.request_id.rpartition("-")[2])])


def sampler(policy: Any, seed: int = 0, max_model_len: int = 4000, **options: Any) -> StudentSampler:
    return StudentSampler(policy, RENDERER, ReplayConfig(**options), max_model_len=max_model_len, seed=seed)


def ids_of(text: str) -> tuple[int, ...]:
    return (*RENDERER.tokenizer.encode(text, add_special_tokens=False), RENDERER.turn_end_ids[0])


async def test_requests_and_samples() -> None:
    at = token_state(RENDERER, SAID, temperature=0.7, step=2)
    policy = says(*OWN)
    draw = await sampler(policy, seed=3).draw(at, FORM)
    assert (draw.samples, draw.matches) == (4, 3)
    assert draw.sample is not None
    assert draw.sample.completion_ids in {ids_of(OWN[1]), ids_of(OWN[2])}
    assert (draw.sample.canonical, draw.sample.version) == (FORM, 7)
    assert policy.requests == [
        SamplingRequest(
            request_id=f"trace#2/student-{number}",
            prompt_ids=at.prompt_ids or (),
            max_new_tokens=1024,
            seed=derived_seed("student", 3, "trace", 2, number),
            temperature=0.7,
            stop_token_ids=RENDERER.turn_end_ids,
        )
        for number in range(4)
    ]


async def test_each_way_of_saying_it_is_taken_as_often() -> None:
    """Distinct samples count once, whatever their length and their number."""
    at = token_state(RENDERER, SAID)
    taken: Counter[tuple[int, ...]] = Counter()
    for seed in range(200):
        draw = await sampler(says(*OWN), seed=seed).draw(at, FORM)
        assert draw.sample is not None
        taken[draw.sample.completion_ids] += 1
    assert set(taken) == {ids_of(OWN[1]), ids_of(OWN[2])}
    assert min(taken.values()) > 72  # 4 standard deviations below 100
    again = [(await sampler(says(*OWN), seed=5).draw(at, FORM)).sample for _ in range(2)]
    assert again[0] == again[1]


async def test_a_pair_of_own_words() -> None:
    at = token_state(RENDERER, SAID, version=4)
    config = ReplayConfig()
    policy = says(OWN[0], OWN[2], OWN[0], "cut")
    student = StudentSampler(policy, RENDERER, config, max_model_len=4000)
    extractor = PairExtractor(config, renderer=RENDERER, student=student, need_tokens=True)
    pair = await extractor.extract(replayed(at, [AGREED, AGREED]))
    assert isinstance(pair, PreferencePair)
    assert at.prompt_ids is not None
    assert at.completion_ids is not None
    assert pair.tokens == PairTokens(at.prompt_ids, ids_of(OWN[2]), at.completion_ids)
    assert (pair.source, pair.version) == ("student", 4)
    assert pair.chosen == parse_action(OWN[2])
    assert pair.info == {"student_samples": 4, "student_matches": 1, "chosen_version": 7}
    assert extractor.metrics()["replay/pairs_student"] == 1.0


@pytest.mark.parametrize("rendered", ["keep", "drop"])
async def test_without_a_match_the_action_is_rendered_or_dropped(rendered: Any) -> None:
    config = ReplayConfig(rendered=rendered, student_samples=2)
    student = StudentSampler(says(OWN[0], SAID), RENDERER, config, max_model_len=4000)
    extractor = PairExtractor(config, renderer=RENDERER, student=student)
    found = await extractor.extract(replayed(token_state(RENDERER, SAID), [AGREED, AGREED]))
    if rendered == "drop":
        assert found == "rendered_dropped"
        return
    assert isinstance(found, PreferencePair)
    assert (found.source, found.info) == ("rendered", {"student_samples": 2, "student_matches": 0})
    assert found.tokens is not None
    assert RENDERER.decode(found.tokens.chosen_ids) == SAID.replace("a - b", "a + b")


async def test_a_match_that_does_not_fit_is_not_taken() -> None:
    """Too long against the rejected side; the agreed action itself is short enough."""
    long = "Well. " * 100 + OWN[1]
    config = ReplayConfig(student_samples=1)
    student = StudentSampler(says(long), RENDERER, config, max_model_len=4000)
    extractor = PairExtractor(config, renderer=RENDERER, student=student)
    pair = await extractor.extract(replayed(token_state(RENDERER, SAID), [AGREED, AGREED]))
    assert isinstance(pair, PreferencePair)
    assert (pair.source, pair.info["student_matches"]) == ("rendered", 1)


async def test_samples_that_are_no_whole_turn() -> None:
    at = token_state(RENDERER, SAID)

    class Odd(Policy):
        async def generate(self, request: SamplingRequest) -> Completion:
            made = await super().generate(request)
            match request.request_id[-1]:
                case "0":
                    return dataclasses.replace(made, finish_reason="abort")
                case "1":
                    return dataclasses.replace(made, token_ids=made.token_ids[:-1])
                case "2":
                    raise ConnectionError("the generator is gone")
            return made

    policy = Odd(RENDERER, lambda prompt, request: OWN[1])
    student = sampler(policy)
    draw = await student.draw(at, FORM)
    assert (draw.samples, draw.matches) == (1, 1)
    assert student.counts == Counter(cut_off=2, failed=1, whole=1)
    assert student.error == "ConnectionError: the generator is gone"


async def test_room() -> None:
    at = token_state(RENDERER, SAID)
    assert at.prompt_ids is not None
    policy = says(*OWN)
    student = sampler(policy, max_model_len=len(at.prompt_ids) + 5)
    assert (await student.draw(at, FORM)).samples == 0
    assert {request.max_new_tokens for request in policy.requests} == {5}
    full = sampler(policy, max_model_len=len(at.prompt_ids))
    assert (await full.draw(at, FORM)).samples == 0
    assert full.counts == Counter(no_room=1)
    with pytest.raises(ValueError, match="trace#0 was recorded without its prompt ids"):
        await full.draw(state(calling("read")), FORM)


async def test_no_samples_when_none_are_wanted() -> None:
    policy = says(*OWN)
    config = ReplayConfig(student_samples=0)
    student = StudentSampler(policy, RENDERER, config, max_model_len=4000)
    extractor = PairExtractor(config, renderer=RENDERER, student=student)
    pair = await extractor.extract(replayed(token_state(RENDERER, SAID), [AGREED, AGREED]))
    assert isinstance(pair, PreferencePair)
    assert (pair.source, policy.requests) == ("rendered", [])
