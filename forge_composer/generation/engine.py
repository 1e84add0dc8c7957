"""The generation engine: one vLLM replica that samples, scores and takes new weights, for asyncio callers.

```
generate / generate_batch / score / load_weights          (the caller's event loop)
        |  commands, in order                    ^  results through futures
        v                                        |
   engine thread:  run the commands -> one step -> run the commands -> one step ...
```

vLLM runs in this process but in a thread of its own, so that the event loop goes on answering while a step
computes (docs/decisions/0004-in-process-llmengine.md). Whatever is asked for takes effect between two steps:
requests join those being decoded (continuous batching), and weights change under requests in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from forge_composer.config.schema import GeneratorConfig, ModelConfig
from forge_composer.generation.requests import LiveRequest, sampling_request, scoring_request
from forge_composer.generation.stepper import GenerationError, Stepper
from forge_composer.types import Completion, FinishReason, SamplingRequest, ScoreRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class _Command:
    """Something to do on the engine thread between two steps."""

    run: Callable[[], Any]
    done: asyncio.Future[Any]
    live: LiveRequest | None = None
    """Set for an admission: `done` is then resolved when the sequence ends, not when it is admitted."""


class GenerationEngine:
    """One vLLM replica.

    Several engines in one process, or an engine beside a trainer, do not go together: vLLM changes settings
    of the whole process. `await start()` comes first and `await close()` last, on the same event loop.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: GeneratorConfig,
        *,
        device: str,
        seed: int,
        weight_transfer: str | None = None,
    ) -> None:
        """Remember the settings; nothing is loaded yet.

        `device` is `cpu` or `cuda`; `weight_transfer` a backend of vLLM's weight-transfer API, where the run
        uses that transport.
        """
        self._model = model
        self._config = config
        self._device = device
        self._seed = seed
        self._weight_transfer = weight_transfer
        self._thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="vllm-engine")
        self._stepper: Stepper | None = None
        self._loop: asyncio.Task[None] | None = None
        self._commands: list[_Command] = []
        self._waiting: dict[LiveRequest, asyncio.Future[Any]] = {}
        self._wake = asyncio.Event()
        self._scoring = asyncio.Lock()
        self._failure: BaseException | None = None
        self._closing = False
        self.prompt_tokens = 0
        """Prompt tokens of all completions so far."""
        self.cached_tokens = 0
        """Those of them that the prefix cache served."""

    @property
    def version(self) -> int:
        """The policy version whose weights are in force; 0 is the checkpoint that the engine started from."""
        return 0 if self._stepper is None else self._stepper.version

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + sum(command.live is not None for command in self._commands)

    async def start(self) -> float:
        """Load the model and run a first batch, so that the next is not slowed by it; returns seconds.

        Raises:
            GenerationError: this vLLM cannot update weights in place.
        """
        start = time.perf_counter()
        self._stepper = await asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        self._loop = asyncio.create_task(self._run(), name="generation-engine")
        length = min(8, self._config.max_model_len - 4)
        warm = [
            SamplingRequest(f"warm-up-{i}", (i % self._stepper.vocab_size,) * max(1, length), 2, seed=i)
            for i in range(min(4, self._config.max_num_seqs))
        ]
        await self.generate_batch(warm)
        await self.score([ScoreRequest(warm[0].prompt_ids + warm[0].prompt_ids[:1])])
        await self._post(self._stepper.clear_prefix_cache)
        return time.perf_counter() - start

    def _build(self) -> Stepper:
        return Stepper(
            str(self._model.path),
            self._config,
            device=self._device,
            seed=self._seed,
            weight_transfer=self._weight_transfer,
        )

    async def generate(self, request: SamplingRequest) -> Completion:
        """Sample one completion; cancelling the call takes the request out of the engine.

        Temperature 0 is greedy; the log-probabilities are those at temperature 1 then.

        Raises:
            ValueError: the request does not fit the engine (context, vocabulary, sampling parameters).
            GenerationError: the engine failed or was closed.
        """
        (completion,) = await self.generate_batch([request])
        return completion

    async def generate_batch(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample several completions, admitted before the next step and in the given order.

        On an otherwise idle engine the same batch under the same weights gives the same tokens.

        Raises:
            ValueError: a request does not fit; none of them is admitted then.
            GenerationError: the engine failed or was closed; the other requests are aborted then.
        """
        start = time.perf_counter()
        fits = self._fits()
        lives = [sampling_request(request, **fits) for request in requests]
        await self._complete(lives)
        return [
            Completion(
                request_id=request.request_id,
                token_ids=live.token_ids,
                logprobs=live.logprobs,
                versions=live.versions,
                finish_reason=cast(FinishReason, live.finish_reason),
                seconds=live.ended_at - start,
            )
            for request, live in zip(requests, lives, strict=True)
        ]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Log-probabilities (nats) of tokens 1..n-1 of each sequence, at its temperature.

        Raises:
            ValueError: a sequence is empty, longer than the context, or has ids outside the vocabulary.
            GenerationError: the engine failed or was closed.
        """
        fits = self._fits()
        lives = [scoring_request(request, **fits) for request in requests]
        async with self._scoring:  # the temperature of prompt log-probabilities is one setting of the engine
            for temperature in dict.fromkeys(request.temperature for request in requests):
                await self._post(partial(self._started.score_temperature, temperature))
                pairs = zip(requests, lives, strict=True)
                await self._complete([live for r, live in pairs if live and r.temperature == temperature])
        return [[] if live is None else [*live.prompt_logprobs, live.last_logprob] for live in lives]

    async def load_weights(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Put new weights in place between two steps; returns the seconds that the engine stood still.

        `named_tensors` has Hugging Face names and every parameter; it is read on the engine's thread, and
        is read to its end even if this call is cancelled. Requests in flight go on under the new weights.

        Raises:
            GenerationError: the tensors do not fit the model. The engine is broken from then on.
        """
        return await self._update(lambda: self._started.load(version, named_tensors))

    async def transfer_weights(
        self, version: int, init: dict[str, Any] | None, updates: list[dict[str, Any]]
    ) -> float:
        """Like `load_weights`, through vLLM's own weight-transfer API: its init and update payloads."""
        return await self._update(lambda: self._started.transfer(version, init, updates))

    async def close(self) -> None:
        """End the engine; requests in flight fail. May be called more than once."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if self._loop is not None:
            await self._loop
        self._fail(GenerationError("the engine was closed"))
        if self._stepper is not None:
            stepper, self._stepper = self._stepper, None
            await asyncio.get_running_loop().run_in_executor(self._thread, stepper.shutdown)
        self._thread.shutdown()

    # What happens between the caller's event loop and the engine thread.

    def _fits(self) -> dict[str, int]:
        """What a request must fit."""
        return {"vocab_size": self._started.vocab_size, "max_model_len": self._config.max_model_len}

    @property
    def _started(self) -> Stepper:
        if self._stepper is None:
            raise GenerationError("the engine is closed" if self._closing else "the engine was not started")
        return self._stepper

    def _post(self, run: Callable[[], Any], live: LiveRequest | None = None) -> asyncio.Future[Any]:
        """Queue a command for the next gap between steps."""
        if self._failure is not None:
            raise GenerationError(f"the engine is out of order: {self._failure}") from self._failure
        if self._closing or self._loop is None:
            raise GenerationError("the engine is closed" if self._closing else "the engine was not started")
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands.append(_Command(run, done, live))
        self._wake.set()
        return done

    async def _update(self, run: Callable[[], float]) -> float:
        """Run a weight update, to its end even if the caller is cancelled: it reads the caller's memory."""

        def guarded() -> float:
            try:
                return run()
            except BaseException as error:
                self._failure = error  # half-updated weights must not sample
                raise

        done = self._post(guarded)
        try:
            return cast(float, await asyncio.shield(done))
        except asyncio.CancelledError:
            await asyncio.wait([done])
            _ignore(done)
            raise

    async def _complete(self, lives: Sequence[LiveRequest]) -> None:
        """Admit requests together and wait until the last one ends."""
        stepper = self._started
        futures = [self._post(partial(stepper.add, live), live) for live in lives]
        try:
            await asyncio.gather(*futures)
        except BaseException:
            for live, future in zip(lives, futures, strict=True):
                future.cancel()
                self._waiting.pop(live, None)
            if self._failure is None and not self._closing:
                for live in lives:
                    self._post(partial(stepper.abort, live)).add_done_callback(_ignore)
            raise

    async def _run(self) -> None:
        """The loop: hand the commands and one step to the engine thread, then deliver what came of it."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            if not self._commands and not self._started.busy:
                self._wake.clear()
                await self._wake.wait()
                continue
            commands, self._commands = self._commands, []
            try:
                results, finished = await loop.run_in_executor(self._thread, self._turn, commands)
            except Exception as error:
                self._failure = error
                self._commands = commands + self._commands
                self._fail(GenerationError(f"the engine failed: {error!r}"))
                return
            self._deliver(commands, results, finished)
            if self._failure is not None:
                self._fail(GenerationError(f"the engine is out of order: {self._failure}"))
                return

    def _turn(self, commands: Sequence[_Command]) -> tuple[list[Any], list[LiveRequest]]:
        """On the engine thread: the commands, then one step. A command's error is its result."""
        results: list[Any] = []
        for command in commands:
            try:
                # A caller that gave up before its request was admitted does not get it admitted.
                results.append(None if command.live and command.done.cancelled() else command.run())
            except Exception as error:
                results.append(error)
        if self._failure is not None or not self._started.busy:
            return results, []
        return results, self._started.step()

    def _deliver(
        self, commands: Sequence[_Command], results: Sequence[Any], finished: Sequence[LiveRequest]
    ) -> None:
        for command, result in zip(commands, results, strict=True):
            if isinstance(result, Exception):
                if not command.done.done():
                    command.done.set_exception(result)
            elif not command.done.done():
                if command.live is None:
                    command.done.set_result(result)
                else:
                    self._waiting[command.live] = command.done
        for live in finished:
            self.prompt_tokens += len(live.prompt_ids)
            self.cached_tokens += live.cached_tokens
            future = self._waiting.pop(live, None)
            if future is None or future.done():
                continue
            if live.finish_reason in ("stop", "length"):
                future.set_result(None)
            else:
                future.set_exception(GenerationError(f"vLLM ended a request with {live.finish_reason!r}"))

    def _fail(self, error: GenerationError) -> None:
        """Hand `error` to everyone who waits."""
        waiting = [*self._waiting.values(), *(command.done for command in self._commands)]
        self._waiting, self._commands = {}, []
        for future in waiting:
            if not future.done():
                future.set_exception(error)


def _ignore(done: asyncio.Future[Any]) -> None:
    """Take note of a result that nobody waits for, so that asyncio does not complain about its error."""
    if not done.cancelled():
        done.exception()
