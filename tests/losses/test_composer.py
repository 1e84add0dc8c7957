"""The sum of the channels: switched-off ones leave no trace; any split of a batch gives one gradient."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_composer.kernels import token_logprobs
from forge_composer.losses.composer import Channel, composer_loss
from forge_composer.losses.config import GRPOConfig, ReplayDPOConfig, SDPOConfig
from forge_composer.losses.grpo import grpo_loss
from forge_composer.losses.replay_dpo import replay_dpo_loss, sum_logprobs
from forge_composer.losses.sdpo import sdpo_loss, sdpo_token_weights
from tests.training.ranks import run_ranks

VOCAB, WIDTH = 23, 8
ALPHA, BETA = 0.7, 0.3


class Batch:
    """Tokens with what each channel needs of them: GRPO tokens, distilled tokens, preference pairs."""

    def __init__(self, grpo: int, distilled: int, pairs: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        def tokens(*shape: int) -> Tensor:
            return torch.randint(VOCAB, shape, generator=draw)

        self.inputs, self.targets = tensor(grpo, WIDTH), tokens(grpo)
        self.advantages, self.generator = tensor(grpo), -tensor(grpo).abs()
        self.mask = torch.rand(grpo, generator=draw) < 0.8
        self.plain, self.hinted = tensor(distilled, WIDTH), tensor(distilled, WIDTH)
        self.distilled, self.distilled_generator = tokens(distilled), -tensor(distilled).abs()
        self.sides, self.sides_targets = tensor(pairs, 2, 3, WIDTH), tokens(pairs, 2, 3)
        self.references, self.agreement = -tensor(pairs, 2).abs(), torch.rand(pairs, generator=draw)

    def part(self, which: dict[str, slice]) -> Batch:
        """Some of the tokens and pairs of each channel."""
        made = object.__new__(Batch)
        for channel, names in {
            "grpo": ("inputs", "targets", "advantages", "generator", "mask"),
            "distilled": ("plain", "hinted", "distilled", "distilled_generator"),
            "pairs": ("sides", "sides_targets", "references", "agreement"),
        }.items():
            for name in names:
                setattr(made, name, getattr(self, name)[which[channel]])
        return made


def model() -> nn.Module:
    """The same weights wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB))


def channels(policy: nn.Module, batch: Batch, whole: Batch, weights: dict[str, float]) -> list[Channel]:
    """Three channels on a part of `whole`, each divided by its own count over the whole."""

    def grpo() -> Tensor:
        logprobs, _ = token_logprobs(policy(batch.inputs), batch.targets)
        return grpo_loss(
            logprobs,
            logprobs.detach(),
            batch.generator,
            batch.advantages,
            batch.mask,
            config=GRPOConfig(aggregation="token_mean"),
            divisor=float(whole.mask.sum()),
        ).loss

    def sdpo() -> Tensor:
        student = policy(batch.plain)
        with torch.no_grad():
            teacher = policy(batch.hinted)
            logprobs, _ = token_logprobs(student, batch.distilled)
        config = SDPOConfig()
        weight = sdpo_token_weights(
            logprobs,
            batch.distilled_generator,
            torch.ones(len(logprobs), dtype=torch.bool),
            config=config,
            divisor=len(whole.distilled),
        )
        return sdpo_loss(student, teacher, weight, config=config).loss

    def replay_dpo() -> Tensor:
        pairs = len(batch.sides)
        logprobs, _ = token_logprobs(policy(batch.sides).flatten(0, 2), batch.sides_targets.flatten())
        sequence = torch.arange(2 * pairs).repeat_interleave(3)
        sums = sum_logprobs(logprobs, torch.ones_like(logprobs).bool(), sequence, 2 * pairs).view(pairs, 2)
        return replay_dpo_loss(
            sums[:, 0],
            sums[:, 1],
            batch.references[:, 0],
            batch.references[:, 1],
            batch.agreement,
            torch.ones(pairs, dtype=torch.bool),
            config=ReplayDPOConfig(),
            divisor=len(whole.sides),
        ).loss

    computes = {"grpo": grpo, "sdpo": sdpo, "replay_dpo": replay_dpo}
    return [Channel(name, weights[name], compute) for name, compute in computes.items()]


def gradients(policy: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


ALL = {"grpo": 1.0, "sdpo": ALPHA, "replay_dpo": BETA}


def never() -> Tensor:
    raise AssertionError("a channel of weight 0 was entered")


@pytest.mark.parametrize("off", [("sdpo",), ("replay_dpo",), ("sdpo", "replay_dpo"), ("grpo",)])
def test_a_channel_of_weight_zero_leaves_no_trace(off: tuple[str, ...]) -> None:
    """Not entered; loss and gradients bit for bit those of a sum without it."""
    batch = Batch(20, 12, 5)
    results = []
    for present in (True, False):
        policy = model()
        made = channels(policy, batch, batch, ALL | dict.fromkeys(off, 0.0))
        if present:
            made = [Channel(c.name, c.weight, never) if c.name in off else c for c in made]
        else:
            made = [c for c in made if c.name not in off]
        result = composer_loss(made)
        result.total.backward()
        assert result.parts.keys() == ALL.keys() - set(off)
        results.append([result.total.detach(), *gradients(policy)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_total_by_hand() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    made = [
        Channel("grpo", 1.0, lambda: 2 * x),
        Channel("sdpo", 0.5, lambda: x**2),
        Channel("replay_dpo", 0.1, lambda: -x),
    ]
    result = composer_loss(made)
    result.total.backward()
    assert result.total.item() == pytest.approx(6 + 4.5 - 0.3)
    parts = {name: part.item() for name, part in result.parts.items()}
    assert parts == {"grpo": 6.0, "sdpo": 9.0, "replay_dpo": -3.0}
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(2 + 3 - 0.1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([Channel("a", 1.0, never), Channel("a", 1.0, never)], "one name"),
        ([Channel("a", -1.0, never)], "at least 0"),
        ([Channel("a", 0.0, never)], "every channel"),
        ([], "every channel"),
    ],
)
def test_bad_channels_are_refused(made: list[Channel], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        composer_loss(made)


def split(whole: Batch, places: int, seed: int) -> list[Batch]:
    """Parts of uneven sizes, some of them empty."""
    draw = random.Random(seed)
    sizes = {"grpo": len(whole.inputs), "distilled": len(whole.plain), "pairs": len(whole.sides)}
    cuts = {}
    for channel, count in sizes.items():
        bounds = sorted([0, count, *(draw.randrange(count + 1) for _ in range(places - 1))])
        cuts[channel] = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    return [whole.part({channel: cut[place] for channel, cut in cuts.items()}) for place in range(places)]


def accumulate(parts: list[Batch], whole: Batch) -> tuple[float, list[np.ndarray[Any, Any]]]:
    policy, loss = model(), 0.0
    for part in parts:
        result = composer_loss(channels(policy, part, whole, ALL))
        result.total.backward()
        loss += result.total.item()
    return loss, [gradient.numpy() for gradient in gradients(policy)]


def on_ranks(microbatches: int, empty_rank: bool) -> tuple[float, list[np.ndarray[Any, Any]]]:
    """Worker: this rank's share, summed over the ranks."""
    dist.init_process_group("gloo")
    whole = Batch(40, 17, 7)
    rank, world = dist.get_rank(), dist.get_world_size()
    if empty_rank:
        nothing = whole.part(dict.fromkeys(("grpo", "distilled", "pairs"), slice(0, 0)))
        parts = [whole] if rank == 0 else [nothing]
    else:
        parts = split(whole, world * microbatches, seed=3)[rank::world]
    loss, grads = accumulate(parts, whole)
    summed = [torch.tensor(loss, dtype=torch.float64), *(torch.from_numpy(gradient) for gradient in grads)]
    for tensor in summed:
        dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float(summed[0]), [tensor.numpy() for tensor in summed[1:]]


def assert_same(result: tuple[float, list[Any]], expected: tuple[float, list[Any]]) -> None:
    assert result[0] == pytest.approx(expected[0], rel=1e-5)
    for gradient, wanted in zip(result[1], expected[1], strict=True):
        assert np.linalg.norm(gradient - wanted) < 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("places", [2, 5, 40])
def test_any_number_of_micro_batches_gives_one_gradient(places: int) -> None:
    whole = Batch(40, 17, 7)
    expected = accumulate([whole], whole)
    assert_same(accumulate(split(whole, places, seed=places), whole), expected)


@pytest.mark.parametrize("empty_rank", [False, True])
def test_any_number_of_ranks_gives_one_gradient(empty_rank: bool) -> None:
    """Two ranks with three uneven micro-batches each; one rank with nothing at all, which must not hang."""
    whole = Batch(40, 17, 7)
    for result in run_ranks(on_ranks, 2, 3, empty_rank):
        assert_same(result, accumulate([whole], whole))


def test_nothing_anywhere_is_zero() -> None:
    """No token, no target, no pair: loss 0, gradients 0, no NaN."""
    nothing = Batch(0, 0, 0)
    loss, grads = accumulate([nothing], nothing)
    assert loss == 0.0
    assert all((gradient == 0).all() for gradient in grads)
