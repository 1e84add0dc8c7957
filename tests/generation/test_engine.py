"""The generation engine against transformers: what it samples, scores, and does when weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_composer.types import Completion, SamplingRequest, ScoreRequest

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
PROMPT = tuple(range(10, 30))
LONG_PROMPT = tuple(3 + (7 * i) % 90 for i in range(300))
"""Longer than two KV blocks (128 tokens on CPU), so that the prefix cache can serve it."""

Reference = Callable[..., torch.Tensor]
Model = tuple[Any, Path]


@pytest.fixture(scope="module")
def engine(start_host: Callable[..., Any], old_model: Model) -> Iterator[Any]:
    host = start_host(old_model[1])
    yield host
    host.close()


@pytest.fixture(autouse=True)
def old_weights(engine: Any, old_model: Model, tensors_of: Callable[..., Any]) -> None:
    """Every test starts from the old weights, as version 0, with an empty prefix cache."""
    engine.run(load, 0, tensors_of(old_model[0]))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **changes: Any) -> SamplingRequest:
    options: dict[str, Any] = {"max_new_tokens": 32, "seed": 7, **changes}
    return SamplingRequest(name, prompt, **options)


def assert_sampled_from(
    model: Any,
    asked: SamplingRequest,
    got: Completion,
    reference: Reference,
    temperature: float | None = None,
) -> None:
    """The completion's logprobs are the model's, at the request's temperature."""
    scored = reference(model, [*asked.prompt_ids, *got.token_ids], temperature or asked.temperature)
    found = torch.tensor(got.logprobs)
    torch.testing.assert_close(found, scored[len(asked.prompt_ids) - 1 :], atol=TOLERANCE, rtol=0)


async def load(engine: Any, version: int, tensors: dict[str, torch.Tensor]) -> float:
    seconds: float = await engine.load_weights(version, tensors.items())
    return seconds


async def batch(engine: Any, requests: list[SamplingRequest]) -> list[Completion]:
    completions: list[Completion] = await engine.generate_batch(requests)
    return completions


async def score(engine: Any, requests: list[ScoreRequest]) -> list[list[float]]:
    scores: list[list[float]] = await engine.score(requests)
    return scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(
    engine: Any, old_model: Model, reference: Reference, temperature: float
) -> None:
    asked = [request(f"r{i}", PROMPT[: 5 + i], seed=i, temperature=temperature) for i in range(6)]
    for one, got in zip(asked, engine.run(batch, asked), strict=True):
        assert got.request_id == one.request_id
        assert len(got.token_ids) == len(got.versions) == 32
        assert got.finish_reason == "length"
        assert set(got.versions) == {0}
        assert 0 < got.seconds < 60
        assert_sampled_from(old_model[0], one, got, reference)


def test_greedy_takes_the_most_likely_token(engine: Any, old_model: Model, reference: Reference) -> None:
    (got,) = engine.run(batch, [request(temperature=0.0)])
    with torch.no_grad():
        logits = old_model[0](torch.tensor([[*PROMPT, *got.token_ids]])).logits[0]
    assert got.token_ids == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert_sampled_from(old_model[0], request(temperature=0.0), got, reference, temperature=1.0)


def test_top_p_logprobs_are_renormalised(engine: Any, old_model: Model) -> None:
    (got,) = engine.run(batch, [request(top_p=0.5)])
    with torch.no_grad():
        logits = old_model[0](torch.tensor([[*PROMPT, *got.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for row, token, logprob in zip(logits.softmax(-1), got.token_ids, got.logprobs, strict=True):
        ranked, order = row.sort(descending=True)
        kept = int((ranked.cumsum(0) < 0.5).sum()) + 1
        assert token in order[:kept].tolist()
        assert logprob == pytest.approx((row[token] / ranked[:kept].sum()).log().item(), abs=TOLERANCE)


def test_stops_at_a_stop_token_and_keeps_it(engine: Any, old_model: Model, reference: Reference) -> None:
    stops = tuple(range(0, 96, 4))
    asked = [request(f"r{i}", seed=i, max_new_tokens=200, stop_token_ids=stops) for i in range(4)]
    for one, got in zip(asked, engine.run(batch, asked), strict=True):
        assert got.finish_reason == "stop"
        assert got.token_ids[-1] in stops
        assert not set(got.token_ids[:-1]) & set(stops)
        assert_sampled_from(old_model[0], one, got, reference)


def test_checkpoints_end_token_does_not_stop_unasked(engine: Any) -> None:
    # The model's config names token 1 as its end of text.
    got = engine.run(batch, [request(f"r{i}", seed=i, max_new_tokens=400) for i in range(4)])
    assert any(1 in one.token_ids[:-1] for one in got)
    assert all(len(one.token_ids) == 400 for one in got)


def test_same_batch_same_result_and_seeds_matter(engine: Any) -> None:
    asked = [request(f"r{i}", seed=i) for i in range(8)]
    first, second = engine.run(batch, asked), engine.run(batch, asked)
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert [one.logprobs for one in first] == [one.logprobs for one in second]
    assert len({tuple(one.token_ids) for one in first}) == len(asked)


def test_more_requests_than_sequences(engine: Any, old_model: Model, reference: Reference) -> None:
    asked = [
        request(f"r{i}", seed=i, max_new_tokens=5 + i) for i in range(20)
    ]  # the engine decodes 8 at once
    got = engine.run(batch, asked)
    assert [len(one.token_ids) for one in got] == [5 + i for i in range(20)]
    assert_sampled_from(old_model[0], asked[-1], got[-1], reference)


def test_more_prompt_tokens_than_a_step_takes(engine: Any, old_model: Model, reference: Reference) -> None:
    # Prompts without common blocks, 2,800 tokens in all: they cannot all be computed in one step.
    prompts = [tuple(3 + (i * j + i) % 90 for j in range(350)) for i in range(1, 9)]
    asked = [request(f"r{i}", prompt, seed=i) for i, prompt in enumerate(prompts)]
    got = engine.run(batch, asked)
    for one, completion in zip(asked, got, strict=True):
        assert_sampled_from(old_model[0], one, completion, reference)
    assert [one.token_ids for one in got] == [one.token_ids for one in engine.run(batch, asked)]


def test_too_little_kv_cache_for_all_at_once(
    start_host: Callable[..., Any], old_model: Model, reference: Reference
) -> None:
    host = start_host(old_model[1], kv_cache_gib=8 / 2**13)  # 8 blocks of 128 tokens at 1 KiB a token
    asked = [request(f"r{i}", LONG_PROMPT[i:120], seed=i, max_new_tokens=250) for i in range(6)]
    for one, got in zip(asked, host.run(batch, asked), strict=True):  # 3 blocks each at the end
        assert len(got.token_ids) == 250
        assert_sampled_from(old_model[0], one, got, reference)
    host.close()


async def join_late(engine: Any, long: SamplingRequest, short: SamplingRequest) -> list[str]:
    ended: list[str] = []

    async def one(asked: SamplingRequest) -> None:
        ended.append((await engine.generate(asked)).request_id)

    first = asyncio.create_task(one(long))
    await _decoding(engine)
    await asyncio.gather(one(short), first)
    return ended


async def _decoding(engine: Any, tokens: int = 10) -> None:
    """Wait until a request has that many tokens."""
    while not any(len(live.token_ids) >= tokens for live in engine._waiting):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_requests_join_those_being_decoded(engine: Any) -> None:
    ended = engine.run(join_late, request("long", max_new_tokens=400), request("short", max_new_tokens=4))
    assert ended == ["short", "long"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score(engine: Any, old_model: Model, reference: Reference, temperature: float) -> None:
    lengths = (2, 3, 60, 200, 512)  # 512 is the whole context
    asked = [ScoreRequest((LONG_PROMPT * 2)[:n], temperature) for n in lengths]
    for one, got in zip(asked, engine.run(score, asked), strict=True):
        wanted = reference(old_model[0], list(one.token_ids), temperature)
        torch.testing.assert_close(torch.tensor(got), wanted, atol=TOLERANCE, rtol=0)


async def sample_then_score(engine: Any, asked: list[SamplingRequest]) -> tuple[list[Completion], Any]:
    """Score what was sampled, each at its own temperature, in one call and while others are sampled."""
    got = await engine.generate_batch(asked)
    sequences = [
        ScoreRequest((*a.prompt_ids, *g.token_ids), a.temperature) for a, g in zip(asked, got, strict=True)
    ]
    again, scores = await asyncio.gather(engine.generate_batch(asked), engine.score(sequences))
    assert [g.token_ids for g in again] == [g.token_ids for g in got]
    for before, after in zip(got, again, strict=True):
        torch.testing.assert_close(before.logprobs, after.logprobs, atol=1e-5, rtol=0)
    return got, scores


def test_score_agrees_with_sampling(engine: Any) -> None:
    asked = [request(f"r{i}", seed=i, temperature=(1.0, 0.7, 1.3)[i % 3]) for i in range(6)]
    for got, scores in zip(*engine.run(sample_then_score, asked), strict=True):
        torch.testing.assert_close(scores[len(PROMPT) - 1 :], got.logprobs, atol=1e-5, rtol=0)


def test_single_token_has_no_score(engine: Any) -> None:
    assert engine.run(score, [ScoreRequest((5,)), ScoreRequest((5, 6))])[0] == []


@pytest.mark.parametrize("head", [False, True], ids=["without-lm_head", "with-lm_head"])
def test_new_tied_weights_are_the_ones_that_sample(
    engine: Any, new_model: Model, reference: Reference, tensors_of: Callable[..., Any], head: bool
) -> None:
    tensors = tensors_of(new_model[0])
    if head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    seconds = engine.run(load, 1, tensors)
    assert 0 < seconds < 5
    asked = [request(f"r{i}", seed=i, temperature=(1.0, 0.7)[i % 2]) for i in range(4)]
    for one, got in zip(asked, engine.run(batch, asked), strict=True):
        assert set(got.versions) == {1}
        assert_sampled_from(new_model[0], one, got, reference)
    (scores,) = engine.run(score, [ScoreRequest(LONG_PROMPT)])
    wanted = reference(new_model[0], list(LONG_PROMPT))
    torch.testing.assert_close(torch.tensor(scores), wanted, atol=TOLERANCE, rtol=0)


def test_updated_engine_equals_a_fresh_one(
    engine: Any, start_host: Callable[..., Any], new_model: Model, tensors_of: Callable[..., Any]
) -> None:
    asked = [request(f"r{i}", LONG_PROMPT[: 20 + i], seed=i, max_new_tokens=64) for i in range(4)]
    asked += [request(f"g{i}", LONG_PROMPT[: 20 + i], temperature=0.0, max_new_tokens=64) for i in range(4)]
    engine.run(load, 1, tensors_of(new_model[0]))
    updated = engine.run(batch, asked)
    host = start_host(new_model[1])
    fresh = host.run(batch, asked)
    printed = host.close()
    assert [one.token_ids for one in updated] == [one.token_ids for one in fresh]
    assert [one.logprobs for one in updated] == [one.logprobs for one in fresh]
    assert "INFO" not in printed
    assert "it/s" not in printed  # no progress bars


async def update_in_flight(
    engine: Any, asked: list[SamplingRequest], tensors: dict[str, torch.Tensor]
) -> list[Completion]:
    running = asyncio.create_task(engine.generate_batch(asked))
    await _decoding(engine)
    await engine.load_weights(1, tensors.items())
    completions: list[Completion] = await running
    return completions


def test_update_under_requests_in_flight(
    engine: Any, old_model: Model, new_model: Model, reference: Reference, tensors_of: Callable[..., Any]
) -> None:
    # Eight are decoded; four wait, with the same prompt, and start only after the update.
    asked = [request(f"r{i}", LONG_PROMPT, seed=i, max_new_tokens=200) for i in range(12)]
    completions = engine.run(update_in_flight, asked, tensors_of(new_model[0]))
    for one, got in zip(asked[:8], completions[:8], strict=True):
        assert len(got.token_ids) == 200
        assert got.versions == sorted(got.versions)
        assert set(got.versions) == {0, 1}
        swap = got.versions.index(1)
        scored = reference(old_model[0], [*one.prompt_ids, *got.token_ids])[len(LONG_PROMPT) - 1 :]
        found = torch.tensor(got.logprobs)
        torch.testing.assert_close(found[:swap], scored[:swap], atol=TOLERANCE, rtol=0)
        assert (found[swap:] - scored[swap:]).abs().max() > 0.1  # the new weights have other opinions
    for one, got in zip(asked[8:], completions[8:], strict=True):
        assert set(got.versions) == {1}
        assert_sampled_from(new_model[0], one, got, reference)


async def prefix_cache(
    engine: Any, asked: SamplingRequest, tensors: dict[str, torch.Tensor]
) -> tuple[list[Completion], list[int]]:
    completions, cached = [], [engine.cached_tokens]
    for version in (None, None, 1, None):
        if version is not None:
            await engine.load_weights(version, tensors.items())
        completions.append(await engine.generate(asked))
        cached.append(engine.cached_tokens)
    return completions, [after - before for before, after in pairwise(cached)]


def test_prefix_cache_serves_one_version_only(
    engine: Any, old_model: Model, new_model: Model, reference: Reference, tensors_of: Callable[..., Any]
) -> None:
    asked = request("r", LONG_PROMPT)
    completions, hits = engine.run(prefix_cache, asked, tensors_of(new_model[0]))
    assert hits == [0, 256, 0, 256]  # two whole blocks, and none across the update
    for model, got in zip([old_model, old_model, new_model, new_model], completions, strict=True):
        assert_sampled_from(model[0], asked, got, reference)


async def time_out(
    engine: Any, asked: SamplingRequest, other: SamplingRequest
) -> tuple[bool, int, Completion]:
    beside = asyncio.create_task(engine.generate(other))
    cancelled = asyncio.create_task(engine.generate(asked))
    await _decoding(engine)
    timed_out = False
    try:
        await asyncio.wait_for(cancelled, 0.001)
    except TimeoutError:
        timed_out = True
    completion = await beside
    for _ in range(100):
        if not engine._stepper.busy:
            break
        await asyncio.sleep(0.01)
    return timed_out, len(engine._stepper._live) + engine.in_flight, completion


def test_timeout_aborts_the_request(engine: Any, old_model: Model, reference: Reference) -> None:
    other = request("other", seed=3, max_new_tokens=40)
    timed_out, left, completion = engine.run(time_out, request("r", max_new_tokens=480), other)
    assert timed_out
    assert left == 0
    assert_sampled_from(old_model[0], other, completion, reference)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": (1,) * 500}, "need 532 tokens, generator.max_model_len is 512"),
        ({"prompt": (1, 96)}, r"token ids must lie in 0\.\.95"),
        ({"prompt": ()}, "has no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": 0.001}, "neither 0"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
    ],
)
def test_unfit_requests_raise(engine: Any, changes: dict[str, Any], reason: str) -> None:
    fit, unfit = request("fit"), request("unfit", **changes)
    with pytest.raises(ValueError, match=reason):
        engine.run(batch, [fit, unfit])
    (got,) = engine.run(batch, [fit])
    assert len(got.token_ids) == 32


def test_score_of_unfit_sequences_raises(engine: Any) -> None:
    with pytest.raises(ValueError, match="need 513 tokens"):
        engine.run(score, [ScoreRequest((1,) * 513)])
    with pytest.raises(ValueError, match=r"temperature 0\.0 is below"):
        engine.run(score, [ScoreRequest((1, 2), 0.0)])


async def private_parts(engine: Any) -> dict[str, Any]:
    """What vllm_compat assumes of vLLM, as it is in a running engine."""
    import os
    import sys

    import vllm
    import vllm._custom_ops as ops

    from forge_composer.generation import vllm_compat

    runner = engine._stepper._engine.model_executor.driver_worker.model_runner
    return {
        "version": vllm_compat.version_of(vllm.__version__),
        "onednn": ops._supports_onednn,
        "packed": vllm_compat.packed_weights(runner.model),
        "emptied": vllm_compat.packed_weights(_emptied()),
        "tied": runner.model.lm_head.weight is runner.model.model.embed_tokens.weight,
        "processed": runner.sampler.logprobs_mode,
        "static": isinstance(type(runner.sampler).__dict__["compute_logprobs"], staticmethod),
        "usage": os.environ["VLLM_NO_USAGE_STATS"],
        "one_process": "vllm.v1.engine.core" in sys.modules,
    }


def _emptied() -> Any:
    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.nn.Parameter(torch.empty(0))
    return layer


def test_contract_with_vllm(engine: Any) -> None:
    from forge_composer.generation.vllm_compat import SUPPORTED

    assert engine.run(private_parts) == {
        "version": SUPPORTED,
        "onednn": False,
        "packed": [],
        "emptied": ["weight"],
        "tied": True,
        "processed": "processed_logprobs",
        "static": True,
        "usage": "1",
        "one_process": True,
    }


async def break_it(engine: Any, asked: SamplingRequest, tensors: dict[str, torch.Tensor]) -> list[str]:
    """An update that lacks a tensor, with a request in flight; then every kind of call; then the end."""
    running = asyncio.create_task(engine.generate(asked))
    await _decoding(engine)
    calls = [
        lambda: engine.load_weights(1, tensors.items()),
        lambda: running,
        lambda: engine.generate(asked),
        lambda: engine.load_weights(2, tensors.items()),
    ]
    errors = []
    for call in calls:
        try:
            await asyncio.wait_for(call(), 20)
            errors.append("none")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    await engine.close()
    return errors


def test_a_broken_update_stops_the_engine(
    start_host: Callable[..., Any],
    qwen3: Callable[..., Any],
    tmp_path: Path,
    reference: Reference,
    tensors_of: Callable[..., Any],
) -> None:
    untied, other = qwen3(2, tied=False), qwen3(3, tied=False)
    untied.save_pretrained(tmp_path)
    host = start_host(tmp_path)
    host.run(load, 1, tensors_of(other))  # an untied head is updated, too
    asked = request("r", max_new_tokens=400)
    (got,) = host.run(batch, [request("r")])
    assert_sampled_from(other, request("r"), got, reference)

    lacking = tensors_of(other)
    del lacking["model.layers.1.mlp.down_proj.weight"]
    errors = host.run(break_it, asked, lacking)
    assert "lack 1 of the model's parameters: ['model.layers.1.mlp.down_proj.weight']" in errors[0]
    assert all(error.startswith("GenerationError: ") for error in errors)
    assert all("out of order" in error for error in errors[1:])
    host.close()
