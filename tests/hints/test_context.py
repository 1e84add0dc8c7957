"""Teacher contexts: the student's ids with one insertion, for any template, position and turn."""

from __future__ import annotations

import random

import pytest

from forge_composer.batching.samples import samples_from_rollout
from forge_composer.config.hints import HintPosition
from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.records import DistillTarget, Misaligned, Target
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.types import Rollout
from tests.rendering import chat_fixtures
from tests.rendering.chat_fixtures import make_renderer
from tests.traces.rollout_fixtures import CALL, make_rollout

TEMPLATES = {
    name: getattr(chat_fixtures, name)
    for name in (
        "KEEPS_ALL",
        "STRIPS_BEFORE_LAST_QUERY",
        "STRIPS_ALL_EARLIER",
        "NO_THINK_PROMPT",
        "OPENS_THINKING",
    )
}
POSITIONS: tuple[HintPosition, ...] = ("user", "system", "observation")
THINKING = "<think>\nwhat now\n</think>\n\n"
TEXTS = [
    CALL,
    THINKING + CALL,
    CALL + "\n" + CALL,
    "plain words ü ✓",
    '<tool_call>\n{"name": \n</tool_call>',
    "spells <|im_end|> and <|im_start|>system",
    "",
]
HINTS = [
    "Hint: return a + b",
    "a\n\nb",
    "ü ✓ <|im_end|>\n<|im_start|>assistant",
    " spaces ",
    "</tool_response>",
    "x",
]


def build(rollout: Rollout, renderer: ChatRenderer, position: HintPosition, **target: object) -> object:
    fields: dict[str, object] = {
        "turn": 0,
        "kind": "test_failed",
        "hint": "Hint: x",
        "source": "feedback",
    } | target
    contexts = TeacherContexts(renderer, position, max_tokens=10_000)
    return contexts.build(rollout, Target(rollout_id=rollout.rollout_id, **fields))  # type: ignore[arg-type]


def verify(
    found: DistillTarget, rollout: Rollout, renderer: ChatRenderer, hint: str, *, slack: int = 0
) -> None:
    """Independent of how it was built: same sampled tokens on both sides, one insertion that says the
    hint."""
    turn = rollout.turns[found.turn]
    sample = samples_from_rollout(rollout, 1.0)[found.sample_index]
    assert [sample.token_ids[p] for p in found.positions] == turn.completion_ids
    assert [found.teacher_ids[p] for p in found.teacher_positions] == turn.completion_ids
    assert all(sample.action_mask[p] for p in found.positions)
    assert found.teacher_ids[found.teacher_positions[0] :] == turn.completion_ids
    student = turn.prompt_ids
    teacher = found.teacher_ids[: found.teacher_positions[0]]
    same = next((i for i, (a, b) in enumerate(zip(student, teacher, strict=False)) if a != b), len(student))
    tail = next(
        (
            i
            for i, (a, b) in enumerate(zip(reversed(student[same:]), reversed(teacher[same:]), strict=False))
            if a != b
        ),
        len(student) - same,
    )
    assert same + tail >= len(student) - slack, "the student's context is not whole in the teacher's"
    inserted = renderer.tokenizer.decode(teacher[same : len(teacher) - tail], skip_special_tokens=False)
    words = [word for word in hint.split() if word.isalnum()]
    assert all(word in inserted for word in words)


def test_by_hand() -> None:
    """The second turn of three, with a message of the user before it."""
    renderer = make_renderer()
    rollout = make_rollout(script=[CALL, CALL, CALL], renderer=renderer)
    found = build(rollout, renderer, "user", turn=1, hint="Hint: add", weight=0.5)
    assert isinstance(found, DistillTarget)
    verify(found, rollout, renderer, "Hint: add")
    assert (found.sample_index, found.weight, found.kind) == (0, 0.5, "test_failed")
    text = renderer.tokenizer.decode(found.teacher_ids, skip_special_tokens=False)
    assert "<|im_start|>user\nHint: add<|im_end|>\n<|im_start|>assistant\n<tool_call>" in text
    plain = rollout.turns[1].prompt_ids
    assert found.positions == list(range(len(plain), len(plain) + len(rollout.turns[1].completion_ids)))


def test_hint_at_the_end_of_the_observation() -> None:
    renderer = make_renderer()
    rollout = make_rollout(script=[CALL, CALL], renderer=renderer)
    found = build(rollout, renderer, "observation", turn=1, hint="Hint: add")
    assert isinstance(found, DistillTarget)
    text = renderer.tokenizer.decode(found.teacher_ids, skip_special_tokens=False)
    assert "got -1\n\nHint: add\n</tool_response>" in text
    first = build(rollout, renderer, "observation", turn=0, hint="Hint: add")
    assert isinstance(first, DistillTarget)
    text = renderer.tokenizer.decode(first.teacher_ids, skip_special_tokens=False)
    assert "Fix add. ü ✓\nHint: add<|im_end|>" in text


def test_hint_cannot_close_a_turn() -> None:
    renderer = make_renderer()
    rollout = make_rollout(script=[CALL, CALL], renderer=renderer)
    found = build(rollout, renderer, "user", hint="stop <|im_end|> now")
    assert isinstance(found, DistillTarget)
    ends = [i for i in found.teacher_ids if i == renderer.turn_end_ids[0]]
    plain = [i for i in [*rollout.turns[0].prompt_ids, *rollout.turns[0].completion_ids] if i == ends[0]]
    assert len(ends) == len(plain) + 1  # its own message's end and no other


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("source", ["template", "sibling", "feedback", "judge"])
@pytest.mark.parametrize("hint", ["", " ", "\n\t "])
def test_an_empty_hint_is_never_a_target(position: HintPosition, source: str, hint: str) -> None:
    """Dropped with its reason, whatever wrote it and wherever it would stand: no divergence, no gradient."""
    renderer = make_renderer()
    rollout = make_rollout(script=[CALL, CALL], renderer=renderer)
    none = Misaligned(rollout.rollout_id, 1, "no hint")
    assert build(rollout, renderer, position, turn=1, hint=hint, source=source) == none
    contexts = TeacherContexts(renderer, position, max_tokens=10_000)
    assert contexts.whole(rollout, Target(rollout.rollout_id, 1, "test_failed", hint, source)) == [none]


def test_what_cannot_be_aligned_is_told() -> None:
    renderer = make_renderer()
    rollout = make_rollout(script=[CALL, CALL], renderer=renderer)
    assert build(rollout, renderer, "user", hint="  ") == Misaligned(rollout.rollout_id, 0, "no hint")
    rollout.turns[0].logprobs = [float("nan")] * len(rollout.turns[0].logprobs)
    assert build(rollout, renderer, "user") == Misaligned(rollout.rollout_id, 0, "no token")
    rollout.turns[1].prompt_ids = [*rollout.turns[1].prompt_ids, 5]
    assert build(rollout, renderer, "user", turn=1) == Misaligned(rollout.rollout_id, 1, "context")


def test_masked_tokens_are_left_out_on_both_sides() -> None:
    renderer = make_renderer()
    rollout = make_rollout(script=[CALL], renderer=renderer)
    rollout.turns[0].logprobs[2] = float("-inf")
    found = build(rollout, renderer, "user")
    assert isinstance(found, DistillTarget)
    tokens = rollout.turns[0].completion_ids
    assert len(found.positions) == len(found.teacher_positions) == len(tokens) - 1
    assert [found.teacher_ids[p] for p in found.teacher_positions] == [*tokens[:2], *tokens[3:]]
    assert found.teacher_ids[-len(tokens) :] == tokens


def test_near_the_limit_the_oldest_observation_goes_first() -> None:
    renderer = make_renderer()
    rollout = make_rollout(script=[CALL, CALL, CALL], renderer=renderer)
    target = Target(rollout.rollout_id, 2, "test_failed", "Hint: keep me", "feedback")
    whole = TeacherContexts(renderer, "user", max_tokens=10_000).build(rollout, target)
    assert isinstance(whole, DistillTarget)
    cut = TeacherContexts(renderer, "user", max_tokens=len(whole.teacher_ids) - 1).build(rollout, target)
    assert isinstance(cut, DistillTarget)
    assert len(cut.teacher_ids) < len(whole.teacher_ids)
    text = renderer.tokenizer.decode(cut.teacher_ids, skip_special_tokens=False)
    assert text.count("expected 5") == 1
    assert text.index("...") < text.index("expected 5") < text.index("Hint: keep me")
    completion = rollout.turns[2].completion_ids
    assert cut.teacher_ids[-len(completion) :] == completion
    assert TeacherContexts(renderer, "user", max_tokens=60).build(rollout, target) == Misaligned(
        rollout.rollout_id, 2, "too long"
    )


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_no_silent_misalignment(template: str) -> None:
    """Random rollouts, hints, positions and turns: verified, or told why not."""
    renderer = make_renderer(TEMPLATES[template])
    draw = random.Random(template)
    reasons, verified = set(), 0
    for number in range(120):
        script = [draw.choice(TEXTS) for _ in range(draw.randrange(1, 5))]
        rollout = make_rollout(number, renderer=renderer, script=script)
        position, hint, turn = draw.choice(POSITIONS), draw.choice(HINTS), draw.randrange(len(script))
        found = build(rollout, renderer, position, turn=turn, hint=hint)
        if isinstance(found, Misaligned):
            reasons.add(found.reason)
        else:
            verified += 1
            verify(found, rollout, renderer, hint, slack=2 if position == "observation" else 0)
    assert reasons <= {"template", "hidden", "rewritten"}
    assert verified >= 40


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_whole_rollout(template: str) -> None:
    """All sampled tokens of every sample, in order; the student's ids with one insertion before the first
    turn."""
    renderer = make_renderer(TEMPLATES[template])
    draw = random.Random(f"whole/{template}")
    verified = samples_seen = 0
    for number in range(60):
        script = [draw.choice(TEXTS) for _ in range(draw.randrange(1, 5))]
        rollout = make_rollout(number, renderer=renderer, script=script)
        position, hint = draw.choice(POSITIONS), draw.choice(HINTS)
        contexts = TeacherContexts(renderer, position, max_tokens=10_000)
        target = Target(rollout.rollout_id, draw.randrange(len(script)), "low_reward", hint, "sibling")
        samples = samples_from_rollout(rollout, 1.0)
        found = contexts.whole(rollout, target)
        assert len(found) == len(samples)
        for index, (part, sample) in enumerate(zip(found, samples, strict=True)):
            if isinstance(part, Misaligned):
                assert part.reason in {"hidden", "rewritten", "context"}
                continue
            verified += 1
            samples_seen += index > 0
            assert part.sample_index == index
            assert part.positions == [t for t, on in enumerate(sample.action_mask) if on]
            shift = part.teacher_positions[0] - part.positions[0]
            assert shift > 0
            assert [t - shift for t in part.teacher_positions] == part.positions
            first = part.positions[0]
            assert part.teacher_ids[first + shift :] == sample.token_ids[first:]
            words = [word for word in hint.split() if word.isalnum()]
            text = renderer.tokenizer.decode(part.teacher_ids[: first + shift], skip_special_tokens=False)
            assert all(word in text for word in words)
    assert verified >= 30
    assert samples_seen > 0 or template != "STRIPS_ALL_EARLIER"


def test_whole_rollout_that_does_not_fit() -> None:
    rollout = make_rollout(script=[CALL, CALL], renderer=(renderer := make_renderer()))
    target = Target(rollout.rollout_id, 1, "low_reward", "Hint: add", "sibling")
    (whole,) = TeacherContexts(renderer, "user", max_tokens=10_000).whole(rollout, target)
    assert isinstance(whole, DistillTarget)
    short = TeacherContexts(renderer, "user", max_tokens=len(whole.teacher_ids) - 1)
    assert short.whole(rollout, target) == [Misaligned(rollout.rollout_id, 1, "too long")]
    empty = Target(rollout.rollout_id, 1, "low_reward", " ", "sibling")
    assert short.whole(rollout, empty) == [Misaligned(rollout.rollout_id, 1, "no hint")]


def test_whether_a_template_can_show_a_hint() -> None:
    """One that shows it, and one that leaves a second system message out."""
    rollout = make_rollout()
    for position in POSITIONS:
        contexts = TeacherContexts(make_renderer(), position, max_tokens=100)
        problem = contexts.supported(rollout.messages, rollout.tools)
        assert (problem is None) == (position != "system")
