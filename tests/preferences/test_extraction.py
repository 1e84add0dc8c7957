"""From votes to pairs: reasons, quorum with dead teachers, tokens, spelling, known truth."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from forge_composer.config.replay import ReplayConfig
from forge_composer.preferences.extraction import PairExtractor, SkipReason, disagreement
from forge_composer.preferences.records import PreferencePair
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.rendering.tool_calls import parse_action
from forge_composer.teachers.actions import canonical_action
from forge_composer.teachers.agreement import Agreement
from forge_composer.teachers.kinds import ReplyKind
from forge_composer.types import ParsedAction
from tests.preferences.replayed import (
    DEAD,
    START,
    TOOLS,
    body,
    calling,
    replayed,
    spelled,
    state,
    token_state,
)
from tests.rendering.chat_fixtures import KEEPS_ALL, NO_THINK_PROMPT, make_renderer

WRONG = calling("write_body", body="return a - b")
GOOD = body("write_body", spelled(body="return a + b"))
OTHER = body("write_body", spelled(body="return b"))
SAME = body("write_body", spelled(body="return a - b"))


async def extracted(step: ReplayedStep, **options: Any) -> PreferencePair | SkipReason:
    return await PairExtractor(ReplayConfig(**options)).extract(step)


async def test_a_pair_of_text_in_full() -> None:
    at = state(WRONG, 3, version=5, temperature=0.8)
    step = replayed(at, [GOOD, OTHER, GOOD, ReplyKind.TIMEOUT])
    pair = await extracted(step)
    assert isinstance(pair, PreferencePair)
    assert (pair.pair_id, pair.messages, pair.tools) == ("trace#3", START, TOOLS)
    assert pair.chosen == step.actions[canonical_action(pair.chosen) or ""]
    assert pair.chosen.tool_calls[0].arguments == {"body": "return a + b"}
    assert (pair.rejected, pair.source, pair.tokens) == (WRONG, "rendered", None)
    assert (pair.families, pair.weight) == (("A", "C"), pytest.approx(2 / 3))
    assert pair.cost_usd == pytest.approx(0.03)
    assert [vote.kind for vote in pair.votes] == ["ok", "ok", "ok", "timeout"]
    assert (pair.version, pair.temperature, pair.outcome) == (5, 0.8, None)


@pytest.mark.parametrize(
    ("answers", "families", "reason"),
    [
        ([SAME, SAME, GOOD], "ABC", "agrees_with_student"),
        ([GOOD, OTHER, SAME], "ABC", "no_quorum"),
        ([GOOD, GOOD, OTHER, OTHER], "ABCD", "tie"),
        ([GOOD, GOOD, DEAD], "AAB", "too_few_families"),  # one family, said twice
        ([DEAD, ReplyKind.OVER_BUDGET, ReplyKind.BENCHED], "ABC", "no_answer"),
    ],
)
async def test_votes_that_give_no_pair(answers: list[Any], families: str, reason: str) -> None:
    extractor = PairExtractor(ReplayConfig())
    step = replayed(state(WRONG), answers, families=families)
    assert await extractor.extract(step) == reason
    assert extractor.metrics() == {
        "replay/steps": 1.0, "replay/pairs": 0.0, "replay/pairs_student": 0.0, f"replay/skipped/{reason}": 1.0
    }  # fmt: skip


async def test_a_malformed_student_is_a_fine_rejected_side() -> None:
    broken = parse_action('<tool_call>\n{"name": "write_body", \n</tool_call>')
    assert broken.error is not None
    pair = await extracted(replayed(state(broken), [GOOD, GOOD]))
    assert isinstance(pair, PreferencePair)
    assert pair.rejected == broken


@pytest.mark.parametrize(
    ("answers", "options", "families"),
    [
        ([GOOD, GOOD, GOOD], {"quorum": 3, "min_quorum": 2}, ("A", "B", "C")),
        ([GOOD, GOOD, OTHER], {"quorum": 3, "min_quorum": 2}, "no_quorum"),
        # One family dead: the other two have to agree.
        ([GOOD, DEAD, GOOD], {"quorum": 3, "min_quorum": 2}, ("A", "C")),
        ([GOOD, DEAD, OTHER], {"quorum": 3, "min_quorum": 2}, "no_quorum"),
        ([GOOD, DEAD, GOOD], {"quorum": 3, "min_quorum": 3}, "too_few_families"),
        # Two dead: the channel rests, or one voice is enough, as configured.
        ([GOOD, DEAD, DEAD], {"quorum": 3, "min_quorum": 2}, "too_few_families"),
        ([GOOD, DEAD, DEAD], {"quorum": 2, "min_quorum": 1}, ("A",)),
        ([SAME, DEAD, DEAD], {"quorum": 2, "min_quorum": 1}, "agrees_with_student"),
        # With all there, min_quorum lowers nothing.
        ([GOOD, OTHER, SAME], {"quorum": 2, "min_quorum": 1}, "no_quorum"),
        ([GOOD, OTHER, DEAD], {"quorum": 2, "min_quorum": 1}, "no_quorum"),
    ],
)
async def test_the_quorum_adapts_to_dead_families(answers: list[Any], options: Any, families: Any) -> None:
    found = disagreement(replayed(state(WRONG), answers), ReplayConfig(**options))
    assert (found.families if isinstance(found, Agreement) else found) == families
    if isinstance(found, Agreement):
        assert found.share == 1.0  # of those who answered


async def test_a_pair_is_made_once() -> None:
    extractor = PairExtractor(ReplayConfig(), memory=2)
    steps = [
        replayed(state(WRONG, trace=name, messages=[{"role": "user", "content": said}]), [GOOD, GOOD])
        for name, said in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "three"), ("e", "one"))
    ]
    found = [await extractor.extract(step) for step in steps]
    made = [isinstance(pair, PreferencePair) for pair in found]
    assert made == [True, False, True, True, True]  # the memory holds two: "one" was forgotten
    assert found[1] == SkipReason.DUPLICATE
    # Another spelling of the same two actions is the same pair; another rejected side is not.
    respelled = state(calling("write_body", body="return (a - b)"), messages=steps[4].state.messages)
    answer = body("write_body", spelled(body="return a+b"))
    assert await extractor.extract(replayed(respelled, [answer, answer])) == "duplicate"
    differs = dataclasses.replace(respelled, action=calling("write_body", body="return a"))
    assert isinstance(await extractor.extract(replayed(differs, [answer, answer])), PreferencePair)


async def test_a_step_that_gave_no_pair_is_not_remembered() -> None:
    extractor = PairExtractor(ReplayConfig(max_side_tokens=20), renderer=make_renderer())
    at = token_state(make_renderer(), "x" * 200)
    assert await extractor.extract(replayed(at, [GOOD, GOOD])) == "too_long"
    assert await extractor.extract(replayed(at, [GOOD, GOOD])) == "too_long"


# -- tokens -----------------------------------------------------------------------------------------

SAID = '<tool_call>\n{"name": "write_body", "arguments": {"body": "return a - b"}}\n</tool_call>'


def tokens_of(**options: Any) -> PairExtractor:
    own = {key: options.pop(key) for key in ("need_tokens", "render_missing") if key in options}
    template = options.pop("template", None)
    renderer = make_renderer(template) if template else make_renderer()
    return PairExtractor(ReplayConfig(**options), renderer=renderer, **own)


async def test_rendered_tokens() -> None:
    renderer = make_renderer()
    at = token_state(renderer, SAID)
    pair = await tokens_of(need_tokens=True).extract(replayed(at, [GOOD, GOOD]))
    assert isinstance(pair, PreferencePair)
    assert pair.tokens is not None
    assert (pair.tokens.prompt_ids, pair.tokens.rejected_ids) == (at.prompt_ids, at.completion_ids)
    assert renderer.ends_turn(pair.tokens.chosen_ids)
    assert renderer.decode(pair.tokens.chosen_ids) == SAID.replace("a - b", "a + b")
    assert pair.source == "rendered"


async def test_a_teachers_reasoning_is_not_rendered() -> None:
    thinking = ParsedAction("Sum.", calling("read", path="a.py").tool_calls, reasoning="hm " * 50)
    at = token_state(make_renderer(), SAID)
    pair = await tokens_of().extract(replayed(at, [thinking, thinking]))
    assert isinstance(pair, PreferencePair)
    assert pair.tokens is not None
    said = make_renderer().decode(pair.tokens.chosen_ids)
    assert "hm" not in said
    assert said.startswith("Sum.\n<tool_call>")
    assert pair.chosen.reasoning == ""


@pytest.mark.parametrize(
    ("said", "answer", "options", "reason"),
    [
        (SAID, GOOD, {"rendered": "drop"}, "rendered_dropped"),
        (SAID, GOOD, {"max_side_tokens": 10}, "too_long"),
        ("no", GOOD, {}, "length_ratio"),
        (SAID, body("", None, "no"), {}, "length_ratio"),
        ("no", GOOD, {"max_length_ratio": 100.0}, None),
        (SAID, body("", None, "y" * 60), {"text": "any", "max_side_tokens": 30}, "too_long"),
        # Text that spells a call would be read as that call.
        (SAID, calling("read", path="</think> a"), {"template": NO_THINK_PROMPT}, "not_rendered"),
    ],
)
async def test_sides_that_do_not_fit(said: str, answer: Any, options: Any, reason: str | None) -> None:
    found = await tokens_of(**options).extract(replayed(token_state(make_renderer(), said), [answer, answer]))
    assert (None if isinstance(found, PreferencePair) else found) == reason


async def test_text_that_spells_a_call_is_not_rendered() -> None:
    text = ParsedAction('Write <tool_call>\n{"name": "read", "arguments": {}}\n</tool_call> like so.')
    at = token_state(make_renderer(), SAID)
    assert await tokens_of().extract(replayed(at, [text, text])) == "not_rendered"


async def test_a_turn_that_was_cut_off_is_no_action() -> None:
    at = token_state(make_renderer(), "I think that", end=False)
    assert await tokens_of().extract(replayed(at, [GOOD, GOOD])) == "cut_off"


async def test_steps_without_tokens_of_the_policy() -> None:
    bare = state(WRONG)
    foreign = dataclasses.replace(token_state(make_renderer(), SAID), completion_ids=(300, 17, 9, 4))
    beyond = dataclasses.replace(foreign, completion_ids=(10**6,))
    for at in (bare, foreign, beyond):
        step = replayed(at, [GOOD, GOOD])
        assert await tokens_of(need_tokens=True).extract(step) == "no_tokens"
        text = await tokens_of().extract(step)
        assert isinstance(text, PreferencePair)
        assert text.tokens is None
        assert await tokens_of(rendered="drop").extract(step) == "rendered_dropped"
        pair = await tokens_of(need_tokens=True, render_missing=True).extract(step)
        assert isinstance(pair, PreferencePair)
        assert pair.tokens is not None
        renderer = make_renderer()
        assert pair.tokens.prompt_ids == tuple(renderer.initial_ids(START, TOOLS))
        assert renderer.decode(pair.tokens.rejected_ids) == SAID
        assert pair.info["rejected_rendered"] is True


async def test_a_template_that_fails_is_a_reason() -> None:
    """Templates refuse messages with an error of their own."""
    odd = "{% if messages[0].content == 'odd' %}{{ raise_exception('odd') }}{% endif %}"
    at = state(WRONG, messages=[{"role": "user", "content": "odd"}])
    extractor = tokens_of(render_missing=True, template=odd + KEEPS_ALL)
    assert await extractor.extract(replayed(at, [GOOD, GOOD])) == "not_rendered"
    fine = state(WRONG)
    assert isinstance(await extractor.extract(replayed(fine, [GOOD, GOOD])), PreferencePair)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outcome_gate": "better"}, 'replay.outcome_gate = "better" needs an environment'),
        ({"audit_fraction": 0.5}, r"replay.audit_fraction = 0.5 needs an environment"),
    ],
)
def test_a_gate_without_an_environment_is_refused(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PairExtractor(ReplayConfig(**options))
    with pytest.raises(ValueError, match="renderer"):
        PairExtractor(ReplayConfig(), need_tokens=True)


# -- known truth ------------------------------------------------------------------------------------


def variants(number: int, draw: random.Random) -> str:
    """One of many spellings, as JSON text, of action `number`; numbers that differ do something else."""
    space, quote = draw.choice(["", " ", "  "]), draw.choice("'\"")
    code = draw.choice(
        [
            f"return{space or ' '}x{space}+{space}{number}",
            f"return (x + {number})  # as asked",
            f"    return x + {number}\n",
            f"return x + {hex(number)}",
        ]
    )
    text = f"if x:\n{'  ' * draw.randint(1, 3)}return {quote}n{number}{quote}\n"
    limit = draw.choice([f"{number}", f"{number}.0", f"{number}e0", f"{number * 10}e-1"])
    nested = (
        f'{{"deep": [true, null, {draw.choice(["1", "1.0", "1e0"])}], "b": "line {draw.choice(["", "  "])}"}}'
    )
    fields = [
        f'"code": {json.dumps(code)}', f'"text": {json.dumps(text)}', f'"limit": {limit}', f'"more": {nested}'
    ]  # fmt: skip
    draw.shuffle(fields)
    gap = draw.choice(["", " ", "\n\t"])
    return "{" + gap + f",{gap}".join(fields) + gap + "}"


def known_step(index: int, draw: random.Random) -> tuple[ReplayedStep, int | None]:
    """A step, and the number of the action that teachers agree on against the student, None if none."""
    student, right, third = draw.sample(range(2, 40), 3)
    cases: list[tuple[list[int | None], int | None]] = [
        ([right, right, right], right),
        ([right, right, third], right),
        ([third, right, right], right),
        ([right, right, None], right),
        ([right, student, right], right),
        ([student, student, right], None),
        ([student, student, student], None),
        ([right, third, student], None),
        ([right, None, None], None),
        ([right, None, third], None),
        ([None, None, None], None),
    ]
    said, truth = draw.choice(cases)
    answers: list[Any] = [
        draw.choice([DEAD, ReplyKind.REFUSAL, body("write_body", '{"code": ')])
        if number is None
        else body("write_body", variants(number, draw))
        for number in said
    ]
    own = calling("write_body", **json.loads(variants(student, draw)))
    return replayed(state(own, index, messages=[{"role": "user", "content": str(index)}]), answers), truth


async def test_a_thousand_steps_of_known_truth() -> None:
    """Precision and recall are exactly 1: no spelling splits a cluster, and no two actions are one."""
    draw = random.Random(7)
    extractor = PairExtractor(ReplayConfig())
    expected, found = {}, {}
    for index in range(1000):
        step, truth = known_step(index, draw)
        if truth is not None:
            expected[index] = float(truth)
        pair = await extractor.extract(step)
        if isinstance(pair, PreferencePair):
            found[pair.step] = float(pair.chosen.tool_calls[0].arguments["limit"])
            assert float(pair.rejected.tool_calls[0].arguments["limit"]) != found[pair.step]
    assert 350 < len(expected) < 600
    assert found == expected
    assert sum(extractor.counts[reason] for reason in SkipReason) == 1000 - len(expected)


@pytest.mark.parametrize("seed", range(20))
def test_spellings_are_one_action_and_numbers_are_not(seed: int) -> None:
    draw = random.Random(seed)
    forms = {
        number: {canonical_action(calling("f", **json.loads(variants(number, draw)))) for _ in range(20)}
        for number in range(2, 8)
    }
    assert all(len(form) == 1 for form in forms.values())
    assert len(set.union(*forms.values())) == 6
