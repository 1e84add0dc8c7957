"""The controller: asynchronous GRPO from tasks to published weights.

::

    TaskOrder --> _produce ---- admit (slots bound the lag) ----+
                     |                                          |
                     v                                          |
              run_group x many       Environments (OpenEnv)     |
                 EpisodeRunner <---- start/step/end             |
                     |        <----- generate  ---------- Generators (vLLM), each token tagged with
                     |                                          ^        the version that sampled it
            every rollout --> Recorder (trace, before anything  |
                     |                  else happens to it)     |
                     v                                          |
               RolloutBuffer  (strict order, refuses stale groups)
                     |  take_batch(version)                     |
                     v                                          |
              advantages -> samples (+ targets: failed turns,   |
                     |    each with a hint and the teacher's    |
                     |    context), pairs (ReplayChannel, fed   |
                     |    with finished groups) -> packed       |
                     |    GlobalBatch                           |
                     v                                          |
               Trainer.train_step (FSDP2/TP), version += 1      |
                     |                                          |
                     +--- publish(version) -> manifest -> update + verify log-probabilities
                     |
                     +--- release(slots): groups that start now start on the new version

Two coroutines share the controller: `_produce` starts groups as slots come free, `_train` takes batches.
With `loop.max_policy_lag = 0` the slots of one batch come free only after the update that it led to, so
the two alternate; rollouts then run in lockstep (`rollout/lockstep.py`) and a seed fixes every number.

Nothing waits without a bound: slots bound the groups in flight, each call to another process has a
deadline, and a run in which nothing can be trained on stops with the reason (`NoProgressError`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from forge_composer.batching.packing import GlobalBatch, pack_samples
from forge_composer.batching.preference_rows import TokenPair
from forge_composer.batching.samples import samples_from_rollout
from forge_composer.buffers.pair_files import save_pairs
from forge_composer.buffers.rollout_buffer import BatchTicket, NoProgressError
from forge_composer.config.schema import Config
from forge_composer.hints.channel import FeedbackChannel
from forge_composer.metrics.aggregate import group_metrics
from forge_composer.parts import Parts
from forge_composer.preferences.channel import ReplayChannel
from forge_composer.rollout.groups import GroupSpec, advantages_of, run_group
from forge_composer.rollout.lockstep import LockstepGate
from forge_composer.rollout.tasks import TaskOrder
from forge_composer.services import Sampler
from forge_composer.types import Rollout, RolloutGroup, ScoreRequest, TrainingSample


class WeightMismatchError(RuntimeError):
    """A generator's log-probabilities differ from the trainer's right after a weight update."""


class Controller:
    """Runs `config.loop.steps` optimizer steps; see the module's docstring for the data flow."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self.config = config
        self.parts = parts
        self.version = 0
        """Policy version of the trainer, and of the generators between updates."""
        self.synchronous = config.loop.max_policy_lag == 0
        self.tasks = TaskOrder(config.environment.train_tasks, config.seed)
        self.feedback: FeedbackChannel | None = None
        if config.loss.sdpo.weight > 0:
            recorder = parts.recorder
            self.feedback = FeedbackChannel(
                config, parts.runner, parts.generators, record=recorder.targets, warn=recorder.warn
            )
        self.replay: ReplayChannel | None = None
        if config.loss.replay_dpo.weight > 0:
            self.replay = self._replay_channel(parts)

    def _replay_channel(self, parts: Parts) -> ReplayChannel:
        if parts.teachers is None or parts.pairs is None:
            raise ValueError("loss.replay_dpo.weight is above 0: the run needs teachers and a pair buffer")
        recorder = parts.recorder
        return ReplayChannel(
            self.config,
            parts.runner,
            parts.generators,
            parts.teachers,
            parts.pairs,
            parts.trainer,
            record=recorder.pairs,
            record_rollout=recorder.rollout,
            warn=recorder.warn,
        )

    async def run(self) -> None:
        """Publish version 0, evaluate, train, evaluate again.

        Raises:
            NoProgressError: nothing to train on came for as long as configured.
            CollapseError: the run distils, and `hints.guard` was told to stop it.
            WeightMismatchError: an update left a generator with other weights (float32 only).
        """
        await self._publish()
        await self.evaluate()
        producer = asyncio.create_task(self._produce(), name="produce")
        trainer = asyncio.create_task(self._train(), name="train")
        try:
            done, _ = await asyncio.wait({producer, trainer}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a producer ends first only by an error
            await trainer
        finally:
            await self._stop(producer, trainer)
        await self.evaluate()

    async def _stop(self, *tasks: asyncio.Task[None]) -> None:
        try:
            async with asyncio.timeout(self.config.runtime.stop_timeout_s):
                await self.parts.buffer.close()
        except Exception as error:  # the buffer may be what failed
            self.parts.recorder.warn(f"the rollout buffer did not close: {error!r}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.replay is not None:
            await self.replay.close()

    # -- producing ----------------------------------------------------------------------------------

    async def _produce(self) -> None:
        """Start a group for each free slot until the buffer closes."""
        most = self.config.loop.groups_per_step if self.synchronous else 1
        async with asyncio.TaskGroup() as groups:
            while ids := await self.parts.buffer.admit(most):
                if self.synchronous:
                    await self._round(ids)
                    continue
                for group_id in ids:
                    groups.create_task(self._one_group(group_id))

    async def _round(self, group_ids: Sequence[int]) -> None:
        """Run groups in lockstep; hand them in, in order, once all have ended."""
        gate = LockstepGate(self.parts.generators)
        gate.join(len(group_ids) * self.config.rollout.group_size)
        with self._recording_in_order() as record:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run_group(i, gate, record)) for i in group_ids]
        for task in running:
            await self._hand_in(task.result())

    async def _one_group(self, group_id: int) -> None:
        await self._hand_in(
            await self._run_group(group_id, self.parts.generators, self.parts.recorder.rollout)
        )

    async def _hand_in(self, group: RolloutGroup) -> None:
        if self.replay is not None:
            self.replay.submit(group.rollouts)
        await self.parts.buffer.put(group)

    async def _run_group(
        self, group_id: int, sampler: Sampler, record: Callable[[Rollout], None]
    ) -> RolloutGroup:
        spec = GroupSpec(
            name="train",
            group_id=group_id,
            task_index=self.tasks[group_id],
            split="train",
            size=self.config.rollout.group_size,
            seed=self.config.seed,
            temperature=self.config.generator.sampling.temperature,
            start_version=self.version,
        )
        return await run_group(
            spec, self.parts.runner, sampler, retries=self.config.rollout.retries, record=record
        )

    @contextmanager
    def _recording_in_order(self) -> Iterator[Callable[[Rollout], None]]:
        """Collect rollouts and record them by id at the end, also when the block is interrupted."""
        ended: list[Rollout] = []
        try:
            yield ended.append
        finally:
            for rollout in sorted(ended, key=lambda rollout: rollout.rollout_id):
                self.parts.recorder.rollout(rollout)

    # -- training -----------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Take batches, train, publish, until the configured number of steps is done."""
        loop = self.config.loop
        untrainable = 0
        skipped = {"rollout/skipped": 0.0, "time/skipped_s": 0.0}
        while self.version < loop.steps:
            began = time.perf_counter()
            ticket = await self.parts.buffer.take_batch(self.version)
            waited = time.perf_counter() - began
            if ticket.closed:
                return
            metrics = self._batch_metrics(ticket)
            probe = samples = self._samples(ticket)
            if self.config.loss.grpo.weight == 0:
                samples = []
            if self.feedback is not None:
                groups = [*ticket.groups, *ticket.zero_variance]
                samples, counts = await self.feedback.add_targets(samples, groups, self.version)
                metrics |= counts
            pairs: list[TokenPair] = []
            if self.replay is not None:
                pairs, counts = await self.replay.pairs(self.version)
                metrics |= counts
            if not pairs and not any(any(sample.action_mask) for sample in samples):
                untrainable += 1
                self._untrainable(untrainable, ticket)
                await self.parts.buffer.release(ticket.slots)
                skipped["rollout/skipped"] += sum(len(group.rollouts) for group in ticket.resolved)
                skipped["time/skipped_s"] += time.perf_counter() - began
                continue
            metrics |= skipped
            untrainable, skipped = 0, dict.fromkeys(skipped, 0.0)
            metrics |= await self._update(samples, pairs, probe or samples)
            if self.feedback is not None:
                self.feedback.watch(metrics)
            metrics |= {"time/wait_s": waited, "time/step_s": time.perf_counter() - began}
            self.parts.recorder.step(self.version, metrics)
            if self.synchronous:  # an evaluation has the sessions to itself
                await self._after_step()
            if self.version < loop.steps:  # after the last step nothing new is started
                await self.parts.buffer.release(ticket.slots)
            if not self.synchronous:
                await self._after_step()

    async def _after_step(self) -> None:
        every = self.config.trainer.checkpoint_every
        if every and self.version % every == 0:
            await self._save_checkpoint()
        every = self.config.loop.eval_every
        if every and self.version % every == 0 and self.version < self.config.loop.steps:
            await self.evaluate()

    async def _save_checkpoint(self) -> None:
        await self.parts.trainer.save_checkpoint(self.version)
        if self.parts.pairs is not None:
            state = await self.parts.pairs.state_dict()
            folder, keep = self.config.output_dir / "checkpoints", self.config.trainer.keep_checkpoints
            await asyncio.to_thread(save_pairs, folder, self.version, state, keep=keep)

    def _samples(self, ticket: BatchTicket) -> list[TrainingSample]:
        samples: list[TrainingSample] = []
        for group in ticket.groups:
            advantages = advantages_of(group, self.config.rollout, self.config.loss.grpo)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True):
                if advantage is not None:
                    samples.extend(samples_from_rollout(rollout, advantage))
        return samples

    def _batch_metrics(self, ticket: BatchTicket) -> dict[str, float]:
        metrics = group_metrics(ticket.resolved, version=self.version)
        return metrics | {
            "groups/trained": float(len(ticket.groups)),
            "groups/zero_variance": float(len(ticket.zero_variance)),
            "groups/unscorable": float(len(ticket.unscorable)),
            "groups/stale": float(len(ticket.stale)),
            "buffer/depth": float(ticket.depth),
        }

    def _untrainable(self, in_a_row: int, ticket: BatchTicket) -> None:
        """Warn; raise once it has lasted as long as configured."""
        message = (
            f"batch without anything to train on ({in_a_row} in a row): "
            f"{len(ticket.zero_variance)} groups without variance, {len(ticket.unscorable)} unscorable, "
            f"{len(ticket.stale)} stale, {len(ticket.groups)} masked"
        )
        self.parts.recorder.warn(message)
        if in_a_row >= self.config.loop.max_untrainable_batches:
            raise NoProgressError(f"{message}; loop.max_untrainable_batches is reached")

    async def _update(
        self,
        samples: Sequence[TrainingSample],
        pairs: Sequence[TokenPair],
        probe: Sequence[TrainingSample],
    ) -> dict[str, float]:
        """One optimizer step, and the new weights in every generator; `probe` is scored by both."""
        began = time.perf_counter()
        batch = self._pack(samples, pairs)
        metrics = await self.parts.trainer.train_step(batch)
        self.version += 1
        trained = time.perf_counter()
        metrics |= {"batch/" + key: value for key, value in batch.stats().items()}
        metrics["time/train_s"] = trained - began
        metrics |= await self._publish(probe)
        return metrics

    def _pack(self, samples: Sequence[TrainingSample], pairs: Sequence[TokenPair]) -> GlobalBatch:
        parallelism = self.config.trainer.parallelism
        return pack_samples(
            samples,
            seq_len=self.config.trainer.seq_len,
            dp_degree=parallelism.dp_replicate * parallelism.dp_shard,
            rows_per_microbatch=self.config.trainer.rows_per_microbatch,
            version=self.version,
            sdpo_scale=1.0 if self.feedback is None else self.feedback.scale,
            pairs=pairs,
        )

    # -- weights ------------------------------------------------------------------------------------

    async def _publish(self, samples: Sequence[TrainingSample] = ()) -> dict[str, float]:
        """Publish the trainer's weights, load them into every generator, compare log-probabilities."""
        began = time.perf_counter()
        manifest = await self.parts.trainer.publish(self.version)
        published = time.perf_counter()
        load_s = await self.parts.generators.update(manifest)
        updated = time.perf_counter()
        metrics = {
            "time/publish_s": published - began,
            "time/update_s": updated - published,
            "time/load_s": load_s,
        }
        metrics |= await self._verify(samples)
        metrics["time/verify_s"] = time.perf_counter() - updated
        return metrics

    async def _verify(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Largest and mean |log-probability(generator) - log-probability(trainer)| on sampled tokens."""
        probe = list(samples)[: self.config.weights.verify_sequences]
        if not probe:
            return {}
        requests = [ScoreRequest(tuple(sample.token_ids)) for sample in probe]
        reference, replicas = await asyncio.gather(
            self.parts.trainer.score(requests), self.parts.generators.score(requests)
        )
        differences = [
            abs(theirs[t - 1] - ours[t - 1])
            for replica in replicas
            for sample, ours, theirs in zip(probe, reference, replica, strict=True)
            for t in range(1, len(sample))
            if sample.action_mask[t]
        ]
        worst = max(differences, default=0.0)
        if not worst <= self.config.weights.verify_tolerance:  # NaN counts as a mismatch
            self._mismatch(worst)
        return {
            "weights/logprob_diff_max": worst,
            "weights/logprob_diff_mean": math.fsum(differences) / max(len(differences), 1),
        }

    def _mismatch(self, worst: float) -> None:
        message = (
            f"after the update to version {self.version} a generator's log-probabilities differ from the "
            f"trainer's by up to {worst:.3g} "
            f"(weights.verify_tolerance = {self.config.weights.verify_tolerance:g})"
        )
        if self.config.trainer.dtype == "float32":
            raise WeightMismatchError(message)
        self.parts.recorder.warn(message)

    # -- evaluation ---------------------------------------------------------------------------------

    async def evaluate(self) -> None:
        """One sampled episode on each of the first `loop.eval_tasks` held-out tasks."""
        total = self.config.loop.eval_tasks
        if not total:
            return
        environment = self.config.environment
        window = environment.workers * environment.sessions_per_worker
        rollouts: list[Rollout] = []
        for first in range(0, total, window):
            rollouts += await self._evaluate_tasks(range(first, min(first + window, total)))
        self.parts.recorder.evaluation(self.version, rollouts)
        if self.feedback is not None:
            self.feedback.watch_evaluation(rollouts)

    async def _evaluate_tasks(self, task_indices: range) -> list[Rollout]:
        sampler: Sampler = self.parts.generators
        if self.synchronous:
            sampler = gate = LockstepGate(self.parts.generators)
            gate.join(len(task_indices))
        retries = self.config.rollout.retries
        with self._recording_in_order() as record:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        run_group(
                            self._evaluation_spec(index),
                            self.parts.runner,
                            sampler,
                            retries=retries,
                            record=record,
                        )
                    )
                    for index in task_indices
                ]
        return [rollout for task in running for rollout in task.result().rollouts]

    def _evaluation_spec(self, index: int) -> GroupSpec:
        return GroupSpec(
            name=f"eval-v{self.version:05d}",
            group_id=index,
            task_index=index,
            split="eval",
            size=1,
            seed=self.config.seed,
            temperature=self.config.loop.eval_temperature,
            start_version=self.version,
        )
