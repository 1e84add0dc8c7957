"""What the tiny policy learns from: hints that are obeyed, practice that looks like the real thing."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from forge_composer.envs import prompts
from forge_composer.envs.micro_grammar import space
from forge_composer.envs.micro_tasks import make_task
from forge_composer.hints.texts import DEMONSTRATION
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import to_message
from forge_composer.types import Message, ParsedAction, ToolCall
from forge_composer.warmup.traces import (
    PracticeIds,
    Trace,
    WarmupSkill,
    make_trace,
    practice_pairs,
    trace_ids,
)
from forge_composer.warmup.training import WarmupConfig

SHOWN = DEMONSTRATION.format(body="")


@pytest.fixture(scope="module")
def renderer(checkout: Path) -> ChatRenderer:
    return ChatRenderer.from_folder(checkout / "assets" / "tiny_policy")


def traces(count: int, **skill: float) -> list[Trace]:
    rng = random.Random(0)
    tasks = [make_task("easy", "train", index, hidden_tests=1) for index in range(12)]
    return [make_trace(rng.choice(tasks), WarmupSkill(**skill), rng) for _ in range(count)]


def written(trace: Trace, turn: int) -> str:
    body: str = trace.turns[turn][0].tool_calls[0].arguments["body"]
    return body


def hint_before(trace: Trace, turn: int) -> str | None:
    """The body that a demonstration shows in the last message before a turn."""
    before = trace.prompt if turn == 0 else trace.turns[turn - 1][1]
    text = before[-1]["content"]
    return text.split(SHOWN)[1] if SHOWN in text else None


def test_demonstrations_are_obeyed_right_or_wrong() -> None:
    """Always hinted, always obeyed: the body shown is the body written, before either turn."""
    found = {0: 0, 1: 0}
    for trace in traces(
        200, hint_share=1.0, feedback_hints=0.0, obeyed=1.0, bare_share=0.0, first_right=0.0, other_body=0.5
    ):
        for turn in range(len(trace.turns) - 1):
            shown = hint_before(trace, turn)
            if shown is not None:
                found[turn] += 1
                assert written(trace, turn) == shown
    assert found[0] > 60
    assert found[1] > 60


def test_half_of_the_demonstrations_show_another_body() -> None:
    rng = random.Random(1)
    task = make_task("easy", "train", 3, hidden_tests=1)
    skill = WarmupSkill(hint_share=1.0, feedback_hints=0.0, obeyed=1.0, bare_share=1.0)
    shown = [hint_before(make_trace(task, skill, rng), 0) for _ in range(400)]
    others = sum(body != task.reference_body for body in shown)
    assert None not in shown
    assert 160 < others < 240


def test_without_hints_there_are_none() -> None:
    for trace in traces(50, hint_share=0.0):
        texts = [message["content"] for message in trace.prompt]
        texts += [message["content"] for _, answers in trace.turns for message in answers]
        assert not any("Hint:" in text for text in texts)


def test_practice_answers_follow_the_hint() -> None:
    bodies = {spec.body for spec in space("easy").train}
    assert bodies
    for head, hint, body in itertools.islice(practice_pairs("easy", 0), 200):
        assert head.startswith("def ")
        assert hint is None or hint == DEMONSTRATION.format(body=body)


@pytest.mark.parametrize("own_message", [True, False])
def test_practice_has_the_ids_of_a_conversation(renderer: ChatRenderer, own_message: bool) -> None:
    """The template that was rendered once gives what rendering each conversation gives, up to the turn's
    end."""
    ids_of = PracticeIds(renderer)
    for head, hint, body in itertools.islice(practice_pairs("easy", 5), 20):
        prompt = [Message(role="user", content=head)]
        if hint is not None and own_message:
            prompt.append(Message(role="user", content=hint))
        elif hint is not None:
            prompt = [Message(role="user", content=f"{head}\n{hint}")]
        action = ParsedAction(text="", tool_calls=(ToolCall("call_0", prompts.WRITE_BODY, {"body": body}),))
        before = renderer.initial_ids(prompt, [])
        *answer, end = renderer.turn_ids([*prompt, to_message(action)], [])
        assert end == renderer.turn_end_ids[0]
        ids, own = ids_of(head, hint, body, own_message=own_message)
        assert ids == before + answer
        assert own == [False] * len(before) + [True] * len(answer)


def test_masks_cover_what_the_agent_wrote(renderer: ChatRenderer) -> None:
    for trace in traces(5, hint_share=0.5):
        ids, own = trace_ids(trace, renderer)
        said = renderer.decode([token for token, mine in zip(ids, own, strict=True) if mine])
        assert said.count("<tool_call>") == sum(len(action.tool_calls) for action, _ in trace.turns)
        assert "Hint:" not in said


def test_a_novice_obeys_and_is_hardly_ever_right_alone() -> None:
    ((_, skill),) = WarmupConfig.novice().phases
    rng, tasks = random.Random(2), [make_task("easy", "train", index, hidden_tests=1) for index in range(40)]
    hinted, alone = Counter[bool](), Counter[bool]()
    for _ in range(800):
        task = rng.choice(tasks)
        trace = make_trace(task, skill, rng)
        shown = hint_before(trace, 0)
        if shown is not None:
            hinted[written(trace, 0) == shown] += 1
        elif "Hint" not in trace.prompt[-1]["content"]:
            alone[written(trace, 0) == task.reference_body] += 1
    assert hinted[False] == 0 < hinted[True]
    assert alone[True] / alone.total() < 0.06  # 0.02, and functions without a similar one


def test_recipes_that_go_on_from_a_policy_do_not_teach_the_tasks() -> None:
    """Nine demonstrations in ten show another function's body."""
    for config in (WarmupConfig.obedient(), WarmupConfig.novice()):
        ((_, skill),) = config.phases
        assert skill.other_body == 0.9
        assert skill.obeyed == 1.0
    assert WarmupConfig.novice().practice_steps == 0  # the practice shows each sentence with its own body
