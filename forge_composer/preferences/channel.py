"""The trace-replay channel as the controller sees it: finished rollouts in, scored pairs out.

::

    finished rollouts --> chosen steps --> queue (bounded) --> TeacherReplay (own process): all teachers
                                                                    |
          PairExtractor: quorum, student's own samples, outcome gate <--- ReplayedStep
                    |
                    v
              PairBuffer (own process) --- pairs without a reference ---> Trainer.score --> references
                    |
                    +--- sample(version) --> TokenPair --> the step's GlobalBatch

Nothing here holds up rollouts or training: steps are asked about by workers of their own, and a step of the
optimizer takes the pairs that are ready. With `loop.max_policy_lag = 0` it waits for those of the rollouts
that it is trained on, and takes all steps together and in order, so that a seed fixes every number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from forge_composer.batching.preference_rows import TokenPair
from forge_composer.config.schema import Config
from forge_composer.losses.schedule import scheduled_share
from forge_composer.preferences.extraction import PairExtractor
from forge_composer.preferences.outcome import OutcomeJudge
from forge_composer.preferences.records import PreferencePair
from forge_composer.preferences.replay import ReplayedStep
from forge_composer.preferences.steps import (
    StepState,
    choose_steps,
    rollout_is_replayed,
    steps_of_rollout,
)
from forge_composer.preferences.student import StudentSampler
from forge_composer.rollout.episode import EpisodeRunner
from forge_composer.rollout.lockstep import Waiting, sample_together
from forge_composer.services import Generators, PairStore, Sampler, TeacherReplay, Trainer
from forge_composer.types import Completion, Rollout, SamplingRequest, ScoreRequest

MOST_SCORED = 256
"""Pairs that get their reference in one step, at most."""
FAILURES = 5
"""Calls to the replay service that fail in a row before the channel rests for good."""


class ReplayChannel:
    """Pairs for the trainer; there only with `loss.replay_dpo.weight` above 0."""

    def __init__(
        self,
        config: Config,
        runner: EpisodeRunner,
        generators: Generators,
        teachers: TeacherReplay,
        store: PairStore,
        trainer: Trainer,
        *,
        record: Callable[[Sequence[PreferencePair]], None],
        record_rollout: Callable[[Rollout], None],
        warn: Callable[[str], None],
    ) -> None:
        """Take the parts.

        Args:
            config: the run's.
            runner: plays the episodes of the outcome gate, and knows the policy's chat template.
            generators: sample the policy.
            teachers: are asked.
            store: keeps the pairs.
            trainer: computes the references.
            record: called with the pairs of a step, before anything else happens to them.
            record_rollout: called with each episode of the outcome gate.
            warn: tells the user.
        """
        self.config, self.replay = config, config.replay
        self.teachers, self.store, self.trainer = teachers, store, trainer
        self.synchronous = config.loop.max_policy_lag == 0
        self.counts: Counter[str] = Counter()
        self.extractor = self._extractor(runner, generators, record_rollout)
        self._record, self._warn = record, warn
        self._queue: deque[StepState] = deque()
        self._arrived = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._failures = 0
        self._told: set[str] = set()

    def _extractor(
        self, runner: EpisodeRunner, generators: Generators, record_rollout: Callable[[Rollout], None]
    ) -> PairExtractor:
        config = self.config
        sampler: Sampler = _Together(generators) if self.synchronous else generators
        student = StudentSampler(
            sampler,
            runner.renderer,
            self.replay,
            max_model_len=config.generator.max_model_len,
            seed=config.seed,
        )
        judge = None
        if self.replay.outcome_gate != "off" or self.replay.audit_fraction > 0:
            judge = OutcomeJudge(
                runner,
                sampler,
                max_concurrent=1 if self.synchronous else 2,
                seed=config.seed,
                on_rollout=record_rollout,
            )
        return PairExtractor(
            self.replay, renderer=runner.renderer, student=student, judge=judge, need_tokens=True
        )

    # -- from rollouts to pairs -----------------------------------------------------------------------

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Take finished rollouts; returns at once. Beyond `replay.queue` steps the oldest are given up."""
        for rollout in rollouts:
            if self.resting or not rollout_is_replayed(rollout, self.replay):
                continue
            self._queue.extend(choose_steps(steps_of_rollout(rollout), self.replay))
        while len(self._queue) > self.replay.queue:
            self._queue.popleft()
            self.counts["given_up"] += 1
        self._arrived.set()
        if not self.synchronous and not self._workers:
            self._workers = [
                asyncio.create_task(self._work(), name=f"replay-{number}")
                for number in range(self.replay.concurrency)
            ]

    @property
    def resting(self) -> bool:
        """Whether the replay service failed so often that it is not asked any more."""
        return self._failures >= FAILURES

    async def _work(self) -> None:
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            await self._keep([await self._ask(self._queue.popleft())])

    async def settle(self) -> None:
        """Work off the queue: ask about all steps, then extract in order."""
        slots = asyncio.Semaphore(self.replay.concurrency)

        async def ask(state: StepState) -> ReplayedStep | None:
            async with slots:
                return await self._ask(state)

        states, self._queue = list(self._queue), deque()
        await self._keep(await asyncio.gather(*map(ask, states)))

    async def _ask(self, state: StepState) -> ReplayedStep | None:
        """The teachers' answers to a step. A service that fails costs a pair and never the run."""
        if self.resting:
            return None
        try:
            # The record stays here: the teachers' process has no use for it.
            asked = await self.teachers.replay(dataclasses.replace(state, rollout=None))
        except Exception as error:
            self._failed(error)
            return None
        self._failures = 0
        return dataclasses.replace(asked, state=state)

    async def _keep(self, asked: Sequence[ReplayedStep | None]) -> None:
        """Record and store the pairs of steps."""
        steps = [step for step in asked if step is not None]
        results = await asyncio.gather(*map(self.extractor.extract, steps), return_exceptions=True)
        pairs = [found for found in results if isinstance(found, PreferencePair)]
        for error in results:
            if isinstance(error, Exception):
                self.counts["failed"] += 1
                told = f"replay: a step gave no pair: {type(error).__name__}: {error}"
                self._warn_once("extract", told)
        if not pairs:
            return
        self._record(pairs)
        try:
            await self.store.put(pairs)
        except Exception as error:
            self.counts["lost"] += len(pairs)
            self._warn_once("store", f"replay: the pair buffer took no pairs (they are recorded): {error}")

    def _failed(self, error: Exception) -> None:
        self.counts["failed"] += 1
        self._failures += 1
        self._warn_once("service", f"replay: the teachers could not be asked: {error}")
        if self.resting:
            self._queue.clear()
            self._warn_once("rest", f"replay: {FAILURES} calls failed in a row; the channel rests now")

    # -- from pairs to a batch ------------------------------------------------------------------------

    def rests(self, step: int) -> bool:
        """Whether the schedule leaves nothing of beta in a step (from 0)."""
        return scheduled_share(self.config.loss.replay_dpo.schedule, step, self.config.loop.steps) == 0.0

    async def pairs(self, version: int) -> tuple[list[TokenPair], dict[str, float]]:
        """The pairs of one optimizer step, and metrics; none where none is ready.

        Args:
            version: policy version of the trainer; also the optimizer step, from 0.
        """
        began = time.perf_counter()
        if self.synchronous:
            await self.settle()
        if self.replay.buffer.reference == "at_insert":
            await self._score()
        found: list[TokenPair] = []
        if not self.rests(version):
            found = await self.store.sample(version, self.replay.buffer.pairs_per_step)
        metrics = await self._metrics()
        return found, metrics | {"time/pairs_s": time.perf_counter() - began}

    async def _score(self) -> None:
        """References of the pairs that came in, under the weights as they are."""
        pairs = await self.store.unscored(MOST_SCORED)
        requests = [request for pair in pairs for request in _score_requests(pair)]
        if not requests:
            return
        scores = await self.trainer.score(requests)
        sums = iter(scores)
        references = {}
        for pair in pairs:
            assert pair.tokens is not None
            chosen = _sum_of_side(next(sums), len(pair.tokens.chosen_ids))
            references[pair.pair_id] = (chosen, _sum_of_side(next(sums), len(pair.tokens.rejected_ids)))
        await self.store.set_references(references)

    async def _metrics(self) -> dict[str, float]:
        metrics = self.extractor.metrics()
        metrics |= {f"pairs/{name}": float(value) for name, value in (await self.store.stats()).items()}
        metrics |= {f"replay/{name}": float(count) for name, count in sorted(self.counts.items())}
        metrics["replay/queued"] = float(len(self._queue))
        if not self.resting:
            try:
                totals = await self.teachers.totals()
            except Exception as error:
                self._failed(error)
            else:
                metrics |= {f"teachers/{name}": value for name, value in totals.items()}
        return metrics

    async def close(self) -> None:
        """End the workers; requests in flight are cancelled."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers = []

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._warn(message)


class _Together:
    """A `Sampler` that sends the requests of one moment as one batch, in order of their ids.

    What else is in a batch changes the last digits of a sum: with all steps of a round taken together, this
    makes them repeatable.
    """

    def __init__(self, generators: Generators) -> None:
        self._generators = generators
        self._waiting: list[Waiting] = []
        self._flushes: set[asyncio.Task[None]] = set()

    async def generate(self, request: SamplingRequest) -> Completion:
        """Sample one completion, together with all that are asked for before the event loop goes on."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((request, future))
        return await future

    def _send(self) -> None:
        batch = sorted(self._waiting, key=lambda item: item[0].request_id)
        self._waiting = []
        task = asyncio.get_running_loop().create_task(sample_together(self._generators, batch))
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)


def _score_requests(pair: PreferencePair) -> tuple[ScoreRequest, ScoreRequest]:
    assert pair.tokens is not None
    tokens = pair.tokens
    return (
        ScoreRequest(tokens.prompt_ids + tokens.chosen_ids, pair.temperature),
        ScoreRequest(tokens.prompt_ids + tokens.rejected_ids, pair.temperature),
    )


def _sum_of_side(logprobs: Sequence[float], length: int) -> float:
    """Log-probability of a sequence's last tokens."""
    return math.fsum(logprobs[len(logprobs) - length :])
