"""What the environment says of a pair: both sides are played to their end.

Both episodes leave the same state of the same task, take one side's action each, and go on with the policy
under the same seed, so that luck after the step is shared. One episode a side is a noisy verdict on one pair;
over many pairs its mean is not.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from forge_composer.config.replay import OutcomeGate
from forge_composer.preferences.records import PreferencePair
from forge_composer.rollout.episode import EpisodeRunner, derived_seed
from forge_composer.rollout.fork import Fork, GivenTurn, fork_failure, run_fork
from forge_composer.services import Sampler
from forge_composer.types import Rollout

Verdict = Literal["better", "equal", "worse"]


@dataclass(slots=True, frozen=True)
class Outcome:
    """The rewards of the two episodes of a pair."""

    chosen: float
    rejected: float

    @property
    def verdict(self) -> Verdict:
        """Of the chosen side."""
        if self.chosen == self.rejected:
            return "equal"
        return "better" if self.chosen > self.rejected else "worse"

    def passes(self, gate: OutcomeGate) -> bool:
        """Whether the gate keeps the pair."""
        match gate:
            case "off":
                return True
            case "not_worse":
                return self.verdict != "worse"
            case "better":
                return self.verdict == "better"


@dataclass(slots=True)
class OutcomeCounts:
    """What the pairs that were played came to. `void` holds those without a verdict, by reason."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    void: Counter[str] = field(default_factory=Counter)
    gains: list[float] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """The first message of each reason."""

    def add(self, outcome: Outcome) -> None:
        """Count a verdict."""
        self.verdicts[outcome.verdict] += 1
        self.gains.append(outcome.chosen - outcome.rejected)

    def drop(self, reason: str, message: str) -> None:
        """Count a pair without a verdict."""
        self.void[reason] += 1
        self.errors.setdefault(reason, message)

    def metrics(self) -> dict[str, float]:
        """Over the pairs with a verdict: the shares whose chosen side had the better, an equal, the worse
        reward, and the mean gain. What nothing was there to measure is left out."""
        pairs = self.verdicts.total()
        numbers = {"replay/audit_pairs": float(pairs), "replay/audit_void": float(self.void.total())}
        if pairs:
            numbers |= {
                f"replay/audit_{verdict}": self.verdicts[verdict] / pairs
                for verdict in ("better", "equal", "worse")
            }
            numbers["replay/audit_gain"] = math.fsum(self.gains) / pairs
        return numbers


class OutcomeJudge:
    """Plays the two sides of pairs.

    Attributes:
        counts: what they came to.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        sampler: Sampler,
        *,
        max_concurrent: int = 2,
        seed: int = 0,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> None:
        """See the class.

        Args:
            runner: plays the episodes, under its limits.
            sampler: the policy, which goes on after the step.
            max_concurrent: most episodes, and so environment sessions, at once.
            seed: the run's.
            on_rollout: gets each episode as it ends, a void one too.

        Raises:
            ValueError: max_concurrent is below 1.
        """
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent = {max_concurrent}: expected at least 1")
        self.runner, self.sampler, self.seed = runner, sampler, seed
        self.counts = OutcomeCounts()
        self._slots = asyncio.Semaphore(max_concurrent)
        self._on_rollout = on_rollout

    def audits(self, pair: PreferencePair, fraction: float) -> bool:
        """Whether the pair is in a sample of this share; depends on the seed and the pair's name alone."""
        return random.Random(f"audit/{self.seed}/{pair.pair_id}").random() < fraction

    async def play(self, pair: PreferencePair, recorded: Rollout | None) -> Outcome | None:
        """The rewards of both sides; None, counted, if an episode is void or there is no record to enter."""
        where = f"pair {pair.pair_id}"
        if recorded is None:
            self.counts.drop("no_rollout", f"{where}: its trace is no rollout of an environment of ours")
            return None
        try:
            forks = self._forks(pair, recorded)
        except ValueError as error:
            self.counts.drop("no_fork", str(error))
            return None
        chosen, rejected = await asyncio.gather(*map(self._run, forks))
        for rollout in (chosen, rejected):
            if (reason := fork_failure(rollout)) is not None:
                self.counts.drop(reason, f"{where}: {rollout.error}")
                return None
        assert chosen.reward is not None
        assert rejected.reward is not None
        outcome = Outcome(chosen.reward, rejected.reward)
        self.counts.add(outcome)
        return outcome

    def _forks(self, pair: PreferencePair, recorded: Rollout) -> tuple[Fork, Fork]:
        seed = derived_seed("outcome", self.seed, pair.trace, pair.step)
        name, tokens = f"{recorded.rollout_id}+{pair.step}", pair.tokens
        chosen = GivenTurn(pair.chosen, tokens.chosen_ids if tokens is not None else ())
        rejected = GivenTurn(pair.rejected, tokens.rejected_ids if tokens is not None else ())
        return (
            Fork(recorded, pair.step, chosen, f"{name}.chosen", seed),
            Fork(recorded, pair.step, rejected, f"{name}.rejected", seed),
        )

    async def _run(self, fork: Fork) -> Rollout:
        async with self._slots:
            rollout = await run_fork(fork, self.runner, self.sampler)
        if self._on_rollout is not None:
            self._on_rollout(rollout)
        return rollout
