"""What one step of distillation does, to first order: as much as the gradient says, and nothing elsewhere.

The policy is the tiny one, which obeys a demonstration. In a turn that wrote a wrong body, the hint shows the
right one; the first token where the two differ is what the teacher puts right.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge_composer.batching.packing import pack_samples
from forge_composer.batching.samples import samples_from_rollout
from forge_composer.envs import prompts
from forge_composer.envs.micro_tasks import function_count, make_task
from forge_composer.hints.context import TeacherContexts
from forge_composer.hints.records import DistillTarget, Target
from forge_composer.hints.texts import DEMONSTRATION
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rendering.tool_calls import parse_action, to_message
from forge_composer.types import Rollout, TrainingSample, Turn
from tests.training.training_fixtures import full_gradients, one_rank

SEQ_LEN = 640
STEP = 1e-4
"""Size of the step along the gradient: small enough for a first-order term, large enough for float32."""


def one_case(renderer: ChatRenderer, seed: int) -> tuple[TrainingSample, DistillTarget, int, int]:
    """A rollout of two turns whose first wrote a wrong body, with a hint that shows the right one.

    Returns the sample, the target, the position of the first wrong token, and the right token there.
    """
    rng = random.Random(seed)
    task = make_task("easy", "train", rng.randrange(function_count("easy", "train")))
    (wrong,) = task.plausible_wrong_bodies(rng, 1)
    messages = prompts.initial_messages(task.module_source)

    def said(body: str) -> list[int]:
        call = f'<tool_call>\n{{"name": "write_body", "arguments": {{"body": "{body}"}}}}\n</tool_call>'
        history = [*messages, to_message(parse_action(call, id_prefix="call"))]
        return renderer.turn_ids(history, prompts.TOOLS)

    rollout = Rollout("r", 0, 0, task.task_id, 0, messages=messages, tools=prompts.TOOLS)
    ids = renderer.initial_ids(messages, prompts.TOOLS)
    for number in range(2):
        completion = said(wrong)
        action = parse_action(renderer.decode(completion), id_prefix=f"call_{number}")
        turn = Turn(
            prompt_ids=list(ids),
            completion_ids=completion,
            logprobs=[-1.0] * len(completion),
            versions=[0] * len(completion),
            finish_reason="stop",
            action=action,
            opens_sample=number == 0,
        )
        turn.observations = ["written"]
        rollout.turns.append(turn)
        history = [*messages, *(m for _ in range(number + 1) for m in (to_message(action),))]
        suffix = renderer.continuation_ids(history, [{"role": "tool", "content": "written"}], prompts.TOOLS)
        assert suffix is not None
        ids = [*turn.prompt_ids, *turn.completion_ids, *suffix]
    hint = DEMONSTRATION.format(body=task.reference_body)
    target = TeacherContexts(renderer, "user", max_tokens=SEQ_LEN).build(
        rollout, Target("r", 0, "test_failed", hint, "sibling")
    )
    assert isinstance(target, DistillTarget)
    (sample,) = samples_from_rollout(rollout, 0.0)
    sample.policy_gradient = False
    sample.targets = [target]
    right = said(task.reference_body)
    start = target.positions[0]
    at = next(i for i, token in enumerate(right) if sample.token_ids[start + i] != token)
    return sample, target, start + at, right[at]


def gradient_by_hand(
    model: Any, sample: TrainingSample, target: DistillTarget
) -> tuple[Tensor, dict[str, Tensor]]:
    """Student logits [L, V], and parameter gradients of the mean JSD over the target's tokens, from the
    closed form of the gradient for logits: zero wherever no targeted token is predicted."""
    logits = model(torch.tensor([sample.token_ids])).logits[0]
    with torch.no_grad():
        theirs = model(torch.tensor([target.teacher_ids])).logits[0]
    at = torch.tensor(target.positions) - 1
    student = torch.softmax(logits[at].detach().double(), -1)
    teacher = torch.softmax(theirs[torch.tensor(target.teacher_positions) - 1].double(), -1)
    log_ratio = (student / (0.5 * student + 0.5 * teacher)).log()
    inner = 0.5 * student * (log_ratio - (student * log_ratio).sum(-1, keepdim=True))
    upstream = torch.zeros_like(logits)
    upstream[at] = (inner / len(target.positions)).float()
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(logits, list(named.values()), upstream, retain_graph=True)
    return logits, dict(zip(named, gradients, strict=True))


@torch.no_grad()
def teacher_logprobs(model: Any, target: DistillTarget, position: int) -> Tensor:
    """What the hinted context says of the token at a position of the sample."""
    logits = model(torch.tensor([target.teacher_ids])).logits[0]
    at = target.teacher_positions[target.positions.index(position)] - 1
    return torch.log_softmax(logits[at], -1)


def test_one_step_to_first_order(checkout: Path) -> None:
    """For cases in which the teacher takes up the hint (most do):

    - the trainer's gradient is the closed form's, which is zero outside the targeted turn;
    - the right token's log-probability rises by what the gradient predicts, and the wrong one's falls.
    """
    folder = checkout / "assets" / "tiny_policy"
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(folder))
    for seed in (2, 3, 5):
        sample, target, position, right = one_case(renderer, seed)
        model = AutoModelForCausalLM.from_pretrained(folder)
        logits, by_hand = gradient_by_hand(model, sample, target)
        sdpo = {"weight": 1.0, "teacher": "live", "is_clip": 0.0}
        with one_rank(folder, sdpo=sdpo, seq_len=SEQ_LEN) as trainer:
            batch = pack_samples([sample], seq_len=SEQ_LEN, dp_degree=1, rows_per_microbatch=1, version=0)
            metrics = trainer.accumulate_gradients(batch)
            theirs = full_gradients(trainer)["layers.1.attention.qkv_linear.wq.weight"]
            trainer.optimizers.zero_grad()
        assert metrics["sdpo/jsd"] > 1e-3
        mine = by_hand["model.layers.1.self_attn.q_proj.weight"]
        torch.testing.assert_close(theirs, mine, atol=1e-6, rtol=1e-3)

        wrong = sample.token_ids[position]
        logprobs = torch.log_softmax(logits[position - 1], -1)
        hinted = teacher_logprobs(model, target, position)
        assert hinted[right] > logprobs[right]
        assert hinted[wrong] < logprobs[wrong]
        size = sum(float(g.pow(2).sum()) for g in by_hand.values()) ** 0.5
        predicted = {}
        for token in (right, wrong):
            slopes = torch.autograd.grad(logprobs[token], list(model.parameters()), retain_graph=True)
            dots = (float((s * g).sum()) for s, g in zip(slopes, by_hand.values(), strict=True))
            predicted[token] = -STEP / size * sum(dots)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), by_hand.values(), strict=True):
                parameter -= STEP / size * gradient
            after = torch.log_softmax(model(torch.tensor([sample.token_ids])).logits[0, position - 1], -1)
        changes = after - logprobs.detach()
        for token, change in predicted.items():
            assert float(changes[token]) == pytest.approx(change, rel=0.05, abs=2e-6), seed
        assert predicted[right] > 0 > predicted[wrong]
