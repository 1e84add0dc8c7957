"""Requests as vLLM takes them, and what has been sampled for them so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_composer.types import SamplingRequest, ScoreRequest

MIN_TEMPERATURE = 0.01
"""vLLM silently raises smaller positive temperatures to this."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in the engine and what has been sampled for it so far."""

    prompt_ids: list[int]
    params: Any
    """vLLM's SamplingParams."""
    key: str = ""
    """The engine's name for it; changes when the request starts afresh."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probabilities (nats) of prompt tokens 1..n-1, where they were asked for."""
    last_logprob: float = 0.0
    """Log-probability of a scored sequence's last token."""
    cached_tokens: int = 0
    """Prompt tokens whose KV blocks were in the prefix cache."""
    finish_reason: str | None = None
    ended_at: float = 0.0
    """`time.perf_counter()` at the last token."""


def sampling_request(request: SamplingRequest, *, vocab_size: int, max_model_len: int) -> LiveRequest:
    """The engine's request for one completion.

    Raises:
        ValueError: it does not fit the context or the vocabulary, or a sampling parameter is out of range.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    name = f"request {request.request_id}"
    _check_ids(name, request.prompt_ids, vocab_size)
    if request.max_new_tokens < 1:
        raise ValueError(f"{name}: max_new_tokens is {request.max_new_tokens}; it must be at least 1")
    _check_length(name, len(request.prompt_ids) + request.max_new_tokens, max_model_len)
    if not 0 < request.top_p <= 1:
        raise ValueError(f"{name}: top_p is {request.top_p}; it must lie above 0 and at most at 1")
    if 0 < request.temperature < MIN_TEMPERATURE or request.temperature < 0:
        raise ValueError(
            f"{name}: temperature {request.temperature} is neither 0 (greedy) nor at least {MIN_TEMPERATURE}"
        )
    params = SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        # The request says what ends a turn; the checkpoint's end-of-text does so only if it is listed.
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    return LiveRequest(list(request.prompt_ids), params)


def scoring_request(request: ScoreRequest, *, vocab_size: int, max_model_len: int) -> LiveRequest | None:
    """The engine's request for the log-probabilities of a sequence; None for a single token, which has none.

    All tokens but the last are the prompt. The last is scored where the engine samples, so that a sequence
    may fill the whole context, and what it samples there is thrown away.

    Raises:
        ValueError: the sequence does not fit the context or the vocabulary.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    name = f"sequence of {len(request.token_ids)} tokens to score"
    _check_ids(name, request.token_ids, vocab_size)
    _check_length(name, len(request.token_ids), max_model_len)
    if request.temperature < MIN_TEMPERATURE:
        raise ValueError(f"{name}: temperature {request.temperature} is below {MIN_TEMPERATURE}")
    if len(request.token_ids) == 1:
        return None
    params = SamplingParams(
        max_tokens=1,
        temperature=request.temperature,
        seed=0,
        ignore_eos=True,
        prompt_logprobs=0,
        logprob_token_ids=[request.token_ids[-1]],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    return LiveRequest(list(request.token_ids[:-1]), params)


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise ValueError(f"{name}: it has no tokens")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise ValueError(f"{name}: token ids must lie in 0..{vocab_size - 1}, the policy's vocabulary")


def _check_length(name: str, length: int, max_model_len: int) -> None:
    if length > max_model_len:
        raise ValueError(
            f"{name}: prompt and completion need {length} tokens, generator.max_model_len is {max_model_len}"
        )
