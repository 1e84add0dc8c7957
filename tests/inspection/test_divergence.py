"""The numbers of a target against a computation of their own in float64, and what cannot be aligned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_composer.hints.records import Target
from forge_composer.inspection.divergence import inspect_run
from forge_composer.inspection.load import read_run
from forge_composer.inspection.policy import Policy
from forge_composer.inspection.records import Inspection, InspectionError, Summary, TargetView
from forge_composer.inspection.selection import Selection
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.traces.store import TraceWriter
from forge_composer.types import Rollout
from tests.inspection.run_fixtures import HINT, POLICY, failed, make_run, renderer, rollouts, wrote
from tests.traces.rollout_fixtures import make_rollout

OPENING = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load(POLICY)


@pytest.fixture(scope="module")
def exact() -> Any:
    """The same weights in float64."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(POLICY), dtype=torch.float64)
    return model.eval()


def inspect(folder: Path, policy: Policy, **selection: Any) -> Inspection:
    return inspect_run(read_run(folder), policy, Selection(**selection))


def log_probs(model: Any, context: list[int], sampled: list[int], temperature: float) -> torch.Tensor:
    """[N, V], from whole logits."""
    with torch.no_grad():
        logits = model(torch.tensor([context + sampled])).logits[0]
    return torch.log_softmax(logits[len(context) - 1 : -1] / temperature, dim=-1)


def divergence(p_s: torch.Tensor, p_t: torch.Tensor, beta: float) -> list[float]:
    """Generalized JSD from log-probabilities, by its definition."""
    if beta == 0.0:
        return ((p_t - p_s) * p_t.exp()).sum(1).tolist()
    if beta == 1.0:
        return ((p_s - p_t) * p_s.exp()).sum(1).tolist()
    m = (beta * p_t.exp() + (1 - beta) * p_s.exp()).log()
    return (beta * ((p_t - m) * p_t.exp()).sum(1) + (1 - beta) * ((p_s - m) * p_s.exp()).sum(1)).tolist()


def hinted(prompt: list[int], hint: str, position: str) -> list[int]:
    """The prompt with the hint, made by cutting and joining its text."""
    tokenizer = renderer().tokenizer
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.endswith(OPENING)
    before = text.removesuffix(OPENING)
    if position == "observation":
        end = "\n</tool_response><|im_end|>\n"
        assert before.endswith(end)
        before = f"{before.removesuffix(end)}\n{hint}{end}"
    else:
        before += f"<|im_start|>{position}\n{hint}<|im_end|>\n"
    ids: list[int] = tokenizer.encode(before + OPENING, add_special_tokens=False)
    return ids


@pytest.mark.parametrize(
    ("position", "beta", "temperature", "sampled_at"),
    [
        ("user", 0.5, 1.0, 1.0),
        ("system", 0.3, 0.7, 1.3),
        ("observation", 0.0, 1.0, 1.0),
        ("user", 1.0, 2.0, 1.0),
    ],
)
def test_numbers_are_those_of_float64(
    tmp_path: Path,
    policy: Policy,
    exact: Any,
    position: str,
    beta: float,
    temperature: float,
    sampled_at: float,
) -> None:
    folder = make_run(
        tmp_path / "run",
        *("--hints.position", position, "--loss.sdpo.divergence_beta", str(beta)),
        *("--loss.sdpo.temperature", str(temperature), "--generator.sampling.temperature", str(sampled_at)),
    )
    (view,) = inspect(folder, policy, step=1, source="sibling").shown
    turn = rollouts()[0].turns[1]
    contexts = (turn.prompt_ids, hinted(turn.prompt_ids, HINT, position))
    cool = [log_probs(exact, context, turn.completion_ids, temperature) for context in contexts]
    student, teacher = (log_probs(exact, context, turn.completion_ids, sampled_at) for context in contexts)
    tokens = view.tokens
    assert [token.token_id for token in tokens] == turn.completion_ids
    assert [token.jsd for token in tokens] == pytest.approx(divergence(*cool, beta), abs=2e-5)
    picked = torch.tensor(turn.completion_ids)[:, None]
    for name, side in (("student_logprob", student), ("teacher_logprob", teacher)):
        expected = side.gather(1, picked)[:, 0].tolist()
        assert [getattr(token, name) for token in tokens] == pytest.approx(expected, abs=1e-4)
    best = teacher.exp().max(dim=1)
    assert [token.best_id for token in tokens] == best.indices.tolist()
    assert [token.best_probability for token in tokens] == pytest.approx(best.values.tolist(), abs=1e-4)
    gain = (teacher - student).gather(1, picked).mean().item()
    assert view.advantage == pytest.approx(gain, abs=1e-4)
    assert view.jsd == pytest.approx(sum(divergence(*cool, beta)) / len(tokens), abs=2e-5)
    assert view.jsd > 1e-4  # the hint does something


def test_top_k_is_measured_as_it_is_trained(tmp_path: Path, policy: Policy, exact: Any) -> None:
    """The student's 3 likeliest tokens and all others as one more: three kinds of probability by hand."""
    folder = make_run(tmp_path / "run", "--loss.sdpo.top_k", "3")
    (view,) = inspect(folder, policy, step=1, source="sibling").shown
    turn = rollouts()[0].turns[1]
    student, teacher = (
        log_probs(exact, context, turn.completion_ids, 1.0).exp()
        for context in (turn.prompt_ids, hinted(turn.prompt_ids, HINT, "user"))
    )
    top = student.topk(3, dim=1).indices
    sides = []
    for side in (student, teacher):
        kept = side.gather(1, top)
        sides.append(torch.cat([kept, 1 - kept.sum(1, keepdim=True)], dim=1).log())
    assert [token.jsd for token in view.tokens] == pytest.approx(divergence(*sides, 0.5), abs=2e-5)
    assert inspect(folder, policy).settings["loss.sdpo.top_k"] == 3


def test_a_view_says_what_happened(tmp_path: Path, policy: Policy) -> None:
    """Context, answer and the inserted text of the second of two turns."""
    (view,) = inspect(make_run(tmp_path / "run"), policy, step=1, source="sibling").shown
    observed = [("environment", "add(2, 3): expected 5, got -1\n")]
    assert [turn.number for turn in view.turns] == [1]
    assert (view.turns[0].before, view.answers) == (observed, observed)
    assert (view.rollout_turns, view.reward, view.task_id) == (2, 0.0, "micro-0")
    assert "".join(token.text for token in view.tokens) == wrote("return b") + "<|im_end|>"
    assert HINT in view.context.inserted
    plain = view.context.before + view.context.after
    assert plain == renderer().tokenizer.decode(rollouts()[0].turns[1].prompt_ids)
    assert not view.context.shortened


def test_tokens_that_are_not_trained_are_left_out(tmp_path: Path, policy: Policy) -> None:
    whole = inspect(make_run(tmp_path / "a"), policy, step=1, source="sibling").shown[0]
    rollout = rollouts()[0]
    rollout.turns[1].logprobs[2] = float("nan")
    folder = run_of(tmp_path / "b", rollout, Target(rollout.rollout_id, 1, "test_failed", HINT, "sibling"))
    part = inspect(folder, policy).shown[0]
    assert part.tokens == [*whole.tokens[:2], *whole.tokens[3:]]


def test_whole_rollouts(tmp_path: Path, policy: Policy, exact: Any) -> None:
    """`hints.scope = "rollout"`: both turns, with the hint before the first one."""
    folder = make_run(tmp_path / "run", "--hints.scope", "rollout")
    (view,) = inspect(folder, policy, step=1, source="sibling").shown
    first, second = rollouts()[0].turns
    assert [turn.number for turn in view.turns] == [0, 1]
    assert [token.token_id for token in view.tokens] == first.completion_ids + second.completion_ids
    start = hinted(first.prompt_ids, HINT, "user")
    context = [*start, *second.prompt_ids[len(first.prompt_ids) :]]
    sides = [log_probs(exact, prompt, second.completion_ids, 1.0) for prompt in (second.prompt_ids, context)]
    found = [token.jsd for token in view.turns[1].tokens]
    assert found == pytest.approx(divergence(sides[0], sides[1], 0.5), abs=2e-5)
    assert view.answers == [("environment", "add(2, 3): expected 5, got -1\n")]


def test_summaries_by_hand(tmp_path: Path, policy: Policy) -> None:
    inspection = inspect(make_run(tmp_path / "run"), policy)
    assert list(inspection.by_kind) == ["low_reward", "test_failed"]
    assert list(inspection.by_source) == ["feedback", "sibling"]
    assert inspection.total is not None
    assert inspection.total.targets == inspection.found == len(inspection.shown) == 4
    views = [view for view in inspection.shown if view.target.source == "feedback"]
    tokens = [token for view in views for token in view.tokens]
    summary = inspection.by_source["feedback"]
    assert (summary.targets, summary.tokens) == (2, len(tokens))
    assert summary.jsd == pytest.approx(sum(token.jsd for token in tokens) / len(tokens))
    gains = [token.teacher_logprob - token.student_logprob for token in tokens]
    assert summary.advantage == pytest.approx(sum(gains) / len(tokens))
    assert summary.positive == sum(view.advantage > 0 for view in views) / 2
    assert summary.no_effect == 0.0
    assert inspection.total.tokens == sum(part.tokens for part in inspection.by_kind.values())


def run_of(folder: Path, rollout: Rollout, *found: Target, options: tuple[str, ...] = ()) -> Path:
    """A run whose trace holds one rollout."""
    make_run(folder, *options, pairs=[(1, target) for target in found])
    (folder / "traces" / "train.jsonl").unlink()
    with TraceWriter(folder / "traces" / "train.jsonl") as writer:
        writer.append(rollout)
    return folder


def test_mismatches_are_shown_and_counted(tmp_path: Path, policy: Policy) -> None:
    """A context that renders otherwise, a rollout that is not there, a turn that is not there, an empty
    hint; what is left is measured."""
    rollout = rollouts()[0]
    changed = rollout.turns[1]
    changed.prompt_ids = [*changed.prompt_ids[:-1], changed.prompt_ids[-1] + 1]
    name = rollout.rollout_id
    folder = run_of(
        tmp_path / "run",
        rollout,
        Target(name, 1, "test_failed", HINT, "sibling"),
        Target("train-000009-000", 0, "test_failed", HINT, "sibling"),
        Target(name, 2, "test_failed", HINT, "sibling"),
        Target(name, 0, "test_failed", " ", "feedback"),
        Target(name, 0, "test_failed", HINT, "sibling"),
    )
    inspection = inspect(folder, policy)
    assert sorted(found.reason for found in inspection.unaligned) == [
        "context",
        "no hint",
        "no rollout",
        "no turn",
    ]
    assert all(len(found.explanation) > len(found.reason) for found in inspection.unaligned)
    assert [view.target.turn for view in inspection.shown] == [0]
    assert inspection.total is not None
    assert inspection.total.targets == 1


def test_another_tokenizer_gives_mismatches_and_no_numbers(tmp_path: Path, tiny_qwen3_dir: Path) -> None:
    inspection = inspect(make_run(tmp_path / "run"), Policy.load(tiny_qwen3_dir))
    reasons = {found.target.turn: found.reason for found in inspection.unaligned}
    assert reasons == {0: "context", 1: "template"}  # that template writes no calls
    assert len(inspection.unaligned) == 4
    assert inspection.shown == []
    assert inspection.total is None


def test_near_the_limit_old_observations_go(tmp_path: Path, policy: Policy) -> None:
    """With room for the hint but not for both observations, the view says that something is left out."""
    rollout = failed(0, "return a - b", "return b", "return c")
    target = Target(rollout.rollout_id, 2, "test_failed", HINT, "sibling")
    whole = inspect(run_of(tmp_path / "a", rollout, target), policy).shown[0]
    assert not whole.context.shortened
    turn = rollout.turns[2]
    longest = len(hinted(turn.prompt_ids, HINT, "user")) + len(turn.completion_ids)
    limit = ("--trainer.seq_len", str(longest - 1))
    cut = inspect(run_of(tmp_path / "b", rollout, target, options=limit), policy).shown[0]
    assert cut.context.shortened
    assert "..." in cut.context.inserted
    short = ("--trainer.seq_len", "60")
    (none,) = inspect(run_of(tmp_path / "c", rollout, target, options=short), policy).unaligned
    assert none.reason == "too long"


def test_a_rewriting_template_is_followed(tmp_path: Path, policy: Policy) -> None:
    """Turns that open a sample of their own: the second sample's turn is measured in its own context."""
    rollout = make_rollout(0, renderer=renderer(), script=[wrote("return a"), wrote("return b")], reward=0.0)
    rollout.turns[1].opens_sample = True
    target = Target(rollout.rollout_id, 1, "test_failed", HINT, "sibling")
    (apart,) = inspect(run_of(tmp_path / "a", rollout, target), policy).shown
    rollout.turns[1].opens_sample = False
    (joined,) = inspect(run_of(tmp_path / "b", rollout, target), policy).shown
    assert apart.turns == joined.turns
    assert math.isfinite(apart.jsd)


def test_a_policy_with_fewer_tokens_is_refused(tmp_path: Path, tiny_qwen3_dir: Path, policy: Policy) -> None:
    """The run's tokenizer, but a model of 259 tokens."""
    small = Policy.load(tiny_qwen3_dir)
    small.renderer = ChatRenderer.from_folder(POLICY)
    with pytest.raises(InspectionError, match=r"has 259 tokens, the run used token 7\d\d; name with --model"):
        inspect(make_run(tmp_path / "run"), small)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    damaged = Policy.load(POLICY)
    with torch.no_grad():
        damaged._model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(
        InspectionError, match=r"tiny_policy: .* undefined values for train-000000-000, turn 1"
    ):
        inspect(make_run(tmp_path / "run"), damaged)


def test_only_the_wanted_logits_are_made(policy: Policy, exact: Any) -> None:
    ids = rollouts()[0].turns[1].prompt_ids
    shapes = []
    hook = policy._model.lm_head.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape)))
    found = policy.logits(ids, [3, 7, 8])
    hook.remove()
    assert shapes == [(1, 3, 768)]
    with torch.no_grad():
        expected = exact(torch.tensor([ids])).logits[0, [2, 6, 7]]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("sort", "key"), [("jsd", lambda view: -view.jsd), ("advantage", lambda v: v.advantage)]
)
def test_sorted_by_measurement(tmp_path: Path, policy: Policy, sort: Any, key: Any) -> None:
    """The two first of four; the summary is over all four."""
    folder = make_run(tmp_path / "run")
    everything: list[TargetView] = list(inspect(folder, policy).shown)
    inspection = inspect(folder, policy, sort=sort, limit=2)
    assert inspection.shown == sorted(everything, key=key)[:2]
    total: Summary | None = inspection.total
    assert total is not None
    assert total.targets == 4
