"""What each source says, on rollouts of the real environment."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from forge_composer.config.hints import HintsConfig, StyleRule
from forge_composer.envs.feature_deletion import FeatureDeletionEnvironment
from forge_composer.envs.micro_tasks import make_task, trusted_report
from forge_composer.hints import texts
from forge_composer.hints.sources import (
    FeedbackHints,
    HintRequest,
    HintSource,
    SiblingHints,
    TemplateHints,
    make_sources,
)
from forge_composer.hints.targets import Fault, faults
from forge_composer.types import Rollout
from forge_composer.warmup import traces
from tests.hints.micro_rollouts import MALFORMED, RUN, SUBMIT, call, environment, play, write
from tests.traces.rollout_fixtures import CALL, make_rollout

TASK = make_task("easy", "train", 5)
RIGHT = TASK.reference_body
WRONG = 'return t[:-2] + "d"'
TOOLS = "read, write_body, run_tests, submit"


@pytest.fixture(scope="module")
def env() -> FeatureDeletionEnvironment:
    return environment()


def request(
    rollout: Rollout,
    fault: Fault | None = None,
    successes: Sequence[Rollout] = (),
    *,
    seed: int = 0,
    max_chars: int = 600,
) -> HintRequest:
    fault = fault or faults(rollout, succeeded=False)[0]
    return HintRequest(fault, rollout, successes, random.Random(seed), max_chars)


async def test_templates(env: FeatureDeletionEnvironment) -> None:
    source = TemplateHints(HintsConfig())
    rollout = play(env, [MALFORMED, call("test"), "Done.", call("submit", now=1), SUBMIT + RUN])
    said = {
        fault.kind: await source.write(request(rollout, fault)) for fault in faults(rollout, succeeded=True)
    }
    form = f'Hint: a tool call is one JSON object with "name" and "arguments". Tools: {TOOLS}.'
    assert said == {
        "malformed_call": form,
        "unknown_tool": f"Hint: the tools are {TOOLS}.",
        "no_call": f"Hint: call a tool. Tools: {TOOLS}.",
        "bad_arguments": "Hint: bad arguments for submit: expected none, got now.",
        "episode_over": "Hint: nothing follows a submission.",
    }
    for kind in ("test_failed", "low_reward", "of_another_environment"):
        assert await source.write(request(rollout, Fault(0, kind, "x"))) is None
    assert await source.write(request(rollout, Fault(0, "bad_arguments", ""))) is None
    assert await source.write(request(rollout, Fault(0, "truncated_turn", ""))) == "Hint: be brief."


async def test_style_rule_speaks_for_itself(env: FeatureDeletionEnvironment) -> None:
    rule = StyleRule(name="no_print", pattern="print", hint="Hint: {print} nothing.")
    source = TemplateHints(HintsConfig(style_rules=(rule,)))
    rollout = play(env, [SUBMIT])
    assert await source.write(request(rollout, Fault(0, "style/no_print", ""))) == "Hint: {print} nothing."
    assert await source.write(request(rollout, Fault(0, "style/other", ""))) is None


async def test_feedback_is_the_first_failing_test_in_the_form_of_the_warm_up(
    env: FeatureDeletionEnvironment,
) -> None:
    rollout = play(env, [write(WRONG) + RUN, SUBMIT])
    feedback = trusted_report(TASK, WRONG).splitlines()[0]
    hint = await FeedbackHints().write(request(rollout))
    assert hint == f"Hint: an earlier attempt failed: {feedback}"
    assert hint == traces.HINT_FEEDBACK.format(feedback=feedback)
    assert await FeedbackHints().write(request(rollout, Fault(0, "low_reward", ""))) is None


async def test_feedback_that_the_context_holds_is_no_news(env: FeatureDeletionEnvironment) -> None:
    rollout = play(env, [write(WRONG) + RUN, write(WRONG) + RUN, SUBMIT])
    first, again = (f for f in faults(rollout, succeeded=False) if f.kind == "test_failed")
    assert first.message == again.message
    assert await FeedbackHints().write(request(rollout, first)) is not None
    assert await FeedbackHints().write(request(rollout, again)) is None


async def test_sibling_demonstrates_in_the_form_of_the_warm_up(env: FeatureDeletionEnvironment) -> None:
    failed = play(env, [write(WRONG) + SUBMIT])
    sibling = play(env, [write("return t") + RUN, write(RIGHT) + RUN, SUBMIT], index=1)
    hint = await SiblingHints(HintsConfig()).write(request(failed, successes=[sibling]))
    assert hint == f"Hint: this body is right:\n{RIGHT}" == traces.HINT_DEMONSTRATION.format(body=RIGHT)


async def test_sibling_is_never_the_rollout_itself_and_never_says_what_was_done(
    env: FeatureDeletionEnvironment,
) -> None:
    source = SiblingHints(HintsConfig())
    own = play(env, [write("return t") + RUN, write(RIGHT) + SUBMIT])
    assert await source.write(request(own, successes=[own])) is None
    same = play(env, [write(WRONG) + SUBMIT], index=1)
    assert await source.write(request(play(env, [write(f"{WRONG} ") + RUN]), successes=[same])) is None


async def test_sibling_shows_a_body_to_one_that_wrote_none(env: FeatureDeletionEnvironment) -> None:
    sibling = play(env, [write(RIGHT) + SUBMIT], index=1)
    hint = await SiblingHints(HintsConfig()).write(request(play(env, [SUBMIT]), successes=[sibling]))
    assert hint == texts.DEMONSTRATION.format(body=RIGHT)


async def test_sibling_has_nothing_to_say_on_form_and_style(env: FeatureDeletionEnvironment) -> None:
    sibling = play(env, [write(RIGHT) + SUBMIT], index=1)
    rollout = play(env, [MALFORMED, SUBMIT])
    for kind in ("malformed_call", "no_call", "style/no_print"):
        asked = request(rollout, Fault(0, kind, "x"), [sibling])
        assert await SiblingHints(HintsConfig()).write(asked) is None


async def test_sibling_is_chosen_at_random_by_the_seed(env: FeatureDeletionEnvironment) -> None:
    """Not always the shortest, nor the first: all of them, about equally often."""
    failed = play(env, [write(WRONG) + SUBMIT])
    bodies = [RIGHT, f"x = 1\n{RIGHT}", f"y = 1\nz = 2\n{RIGHT}"]
    successes = [play(env, [write(body) + SUBMIT], index=1 + i) for i, body in enumerate(bodies)]
    source = SiblingHints(HintsConfig())
    said = [await source.write(request(failed, successes=successes, seed=seed)) for seed in range(300)]
    again = [await source.write(request(failed, successes=successes, seed=seed)) for seed in range(300)]
    assert said == again
    counts = [said.count(texts.DEMONSTRATION.format(body=body)) for body in bodies]
    assert sum(counts) == 300
    assert min(counts) > 70


async def test_demonstration_that_is_too_long_is_left_out_whole(env: FeatureDeletionEnvironment) -> None:
    failed = play(env, [write(WRONG) + SUBMIT])
    long = play(env, [write(f"x = '{'a' * 300}'\n{RIGHT}") + SUBMIT], index=1)
    short = play(env, [write(RIGHT) + SUBMIT], index=2)
    source = SiblingHints(HintsConfig())
    for seed in range(10):
        asked = request(failed, successes=[long, short], seed=seed, max_chars=200)
        assert await source.write(asked) == texts.DEMONSTRATION.format(body=RIGHT)
    assert await source.write(request(failed, successes=[long], max_chars=200)) is None


async def test_thinking_of_a_demonstration(env: FeatureDeletionEnvironment) -> None:
    failed = play(env, [write(WRONG) + SUBMIT])
    thought = "<think>\ntwo letters off\n</think>\n\n"
    sibling = play(env, [thought + write(RIGHT) + SUBMIT], index=1)
    asked = request(failed, successes=[sibling])
    plain = texts.DEMONSTRATION.format(body=RIGHT)
    assert await SiblingHints(HintsConfig()).write(asked) == plain
    kept = await SiblingHints(HintsConfig(strip_thinking=False)).write(asked)
    assert kept == f"Hint: this led to success:\ntwo letters off\n\n{plain}"


async def test_demonstration_of_other_tools_is_the_call() -> None:
    """And the text where there is none."""
    failed = make_rollout(0, script=["nothing"], reward=0.0)
    source = SiblingHints(HintsConfig())
    fault = Fault(0, "low_reward", "")
    hint = await source.write(request(failed, fault, [make_rollout(1, script=[CALL])]))
    assert hint == (
        'Hint: this action was right:\n{"name": "read", "arguments": {"path": "a.py", "x": [1, 2.5, null]}}'
    )
    said = make_rollout(2, script=["Forty-two ü."])
    said.turns[0].feedback = []
    assert await source.write(request(failed, fault, [said])) == "Hint: this action was right:\nForty-two ü."


def test_sources_come_in_their_order() -> None:
    sources: dict[str, HintSource] = dict(make_sources(HintsConfig(sources=("feedback", "template"))))
    assert list(sources) == ["feedback", "template"]


def test_every_template_is_of_a_kind_that_occurs() -> None:
    from forge_composer.hints.targets import FORM_KINDS, REPEATED, TRUNCATED

    assert set(texts.TEMPLATES) == FORM_KINDS | {REPEATED, TRUNCATED}
