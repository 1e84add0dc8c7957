"""vLLM's in-process engine, one step at a time: admit, step, swap weights, step on.

Everything here blocks and is to be called from one thread only; `forge_composer.generation.engine` puts an
asyncio face on it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

import torch

from forge_composer.config.schema import GeneratorConfig
from forge_composer.generation.requests import LiveRequest
from forge_composer.generation.vllm_compat import engine_args, prepare_environment


class GenerationError(RuntimeError):
    """A request or the engine failed; the message says how."""


class Stepper:
    """One vLLM replica.

    Weights change between two steps only, and requests in flight go on with the KV blocks they have; each
    sampled token is recorded with the version that its step used. The prefix cache is salted: a request
    admitted after an update finds no block that older weights have filled.
    """

    def __init__(
        self,
        model: str,
        config: GeneratorConfig,
        *,
        device: str,
        seed: int,
        weight_transfer: str | None = None,
    ) -> None:
        """Build the engine, which takes seconds.

        Raises:
            GenerationError: vLLM holds weights where an update cannot reach them.
        """
        prepare_environment(device, eager=config.enforce_eager)
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.llm_engine import LLMEngine

        args = engine_args(config, model=model, device=device, seed=seed, weight_transfer=weight_transfer)
        self._engine = LLMEngine.from_engine_args(args)
        self.vocab_size: int = self._engine.model_config.get_vocab_size()
        self._tokens_prompt = TokensPrompt
        self.version = 0
        self._loads = 0
        self._live: dict[str, LiveRequest] = {}
        self._keys = itertools.count()
        packed = [name for worker in self._engine.collective_rpc("composer_check") for name in worker]
        if packed:
            self.shutdown()
            raise GenerationError(
                f"vLLM packed {len(packed)} weights ({packed[0]}, ...) for this CPU, so they cannot be "
                "updated in place; use a machine without that packing (AMX, zentorch) or dtype float32"
            )

    @property
    def busy(self) -> bool:
        """True while a request is unfinished."""
        return bool(self._live)

    def add(self, request: LiveRequest) -> None:
        """Admit a request; the next step may already sample for it.

        Raises:
            ValueError: vLLM refuses the request.
        """
        request.key = f"r{next(self._keys)}"
        salt = f"{self.version}.{self._loads}"
        prompt = self._tokens_prompt(prompt_token_ids=request.prompt_ids, cache_salt=salt)
        self._engine.add_request(request.key, prompt, request.params)
        self._live[request.key] = request

    def abort(self, request: LiveRequest) -> None:
        """Take a request out of the engine; nothing happens if it is not there."""
        if self._live.pop(request.key, None) is not None:
            self._engine.abort_request([request.key])

    def step(self) -> list[LiveRequest]:
        """One engine step; returns the requests that it finished."""
        finished: list[LiveRequest] = []
        for output in self._engine.step():
            request = self._live.get(output.request_id)
            if request is not None and self._record(request, output):
                del self._live[request.key]
                finished.append(request)
        return finished

    def _record(self, request: LiveRequest, output: Any) -> bool:
        """Append a step's delta to the request; True if that was its last."""
        if output.prompt_logprobs and not request.prompt_logprobs:
            after = zip(output.prompt_logprobs[1:], request.prompt_ids[1:], strict=True)
            request.prompt_logprobs = [position[token].logprob for position, token in after]
        (delta,) = output.outputs
        for token, logprobs in zip(delta.token_ids, delta.logprobs or (), strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprobs[token].logprob)
            request.versions.append(self.version)
            for asked_for in request.params.logprob_token_ids or ():
                request.last_logprob = logprobs[asked_for].logprob
        if output.finished:
            request.finish_reason = delta.finish_reason or "error"
            request.cached_tokens = output.num_cached_tokens or 0
            request.ended_at = time.perf_counter()
        return bool(output.finished)

    def load(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copy tensors (Hugging Face names, any dtype) into the live parameters; returns seconds.

        Raises:
            GenerationError: tensors are missing or do not fit. The model is unusable then.
        """
        start = time.perf_counter()
        try:
            missing = self._engine.collective_rpc("composer_load", args=(list(named_tensors),))[0]
        except Exception as error:
            raise GenerationError(f"weights of version {version} do not fit the model: {error!r}") from error
        if missing:
            raise GenerationError(
                f"weights of version {version} lack {len(missing)} of the model's parameters: {missing[:4]}"
            )
        self._adopt(version)
        return time.perf_counter() - start

    def transfer(self, version: int, init: dict[str, Any] | None, updates: list[dict[str, Any]]) -> float:
        """Take weights through vLLM's own weight-transfer API; returns seconds."""
        start = time.perf_counter()
        if init is not None:
            self._engine.collective_rpc("init_weight_transfer_engine", args=(init,))
        self._engine.collective_rpc("start_weight_update")
        for update in updates:
            self._engine.collective_rpc("update_weights", args=(update,))
        self._engine.collective_rpc("finish_weight_update")
        self._adopt(version)
        return time.perf_counter() - start

    def _adopt(self, version: int) -> None:
        """Make the loaded weights `version`; requests without a token yet start afresh under them."""
        self.version = version
        self._loads += 1
        for request in [s for s in self._live.values() if not s.token_ids]:
            self.abort(request)
            self.add(request)

    def score_temperature(self, temperature: float) -> None:
        """Temperature of the prompt log-probabilities of the steps that follow."""
        self._engine.collective_rpc("composer_score_temperature", args=(temperature,))

    def clear_prefix_cache(self) -> None:
        """Forget all cached KV blocks. Only while nothing is in flight."""
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Give the model's memory and vLLM's process groups back."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
