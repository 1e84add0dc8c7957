"""The buffer of preference pairs between the trace replay and the trainer.

A pair comes in (`put`), gets its reference log-probabilities (`unscored`, `set_references`), is handed out to
optimizer steps (`sample`) and leaves: used up, too old, or for want of room. Which pairs a step gets depends
on the seed, the step and what is ready, and not on the order in which it came in. Nothing waits: a step
without a ready pair gets none.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge_composer.batching.preference_rows import TokenPair
from forge_composer.config.replay import PairBufferConfig
from forge_composer.preferences.codec import pair_from_json, pair_to_json
from forge_composer.preferences.records import PreferencePair

STATE_FORMAT = "forge_composer.pair_buffer/1"
"""Value of `format` in a saved buffer."""

DropReason = Literal["capacity", "stale", "used", "duplicate"]
DROP_REASONS: tuple[DropReason, ...] = ("capacity", "stale", "used", "duplicate")


@dataclass(slots=True)
class _Entry:
    """A pair in the buffer."""

    pair: PreferencePair
    reference: tuple[float, float] | None = None
    uses: int = 0
    handed_out: bool = False
    """Somebody computes its reference."""


class PairBuffer:
    """Pairs in order of arrival, by id. Safe for many coroutines of one event loop: no method awaits."""

    def __init__(self, config: PairBufferConfig, *, seed: int) -> None:
        """Take the options.

        Args:
            config: capacity, freshness, uses, kind of reference.
            seed: of the samples.
        """
        self.config, self.seed = config, seed
        self._entries: dict[str, _Entry] = {}
        self._inserted = 0
        self._dropped: Counter[str] = Counter()

    async def put(self, pairs: Sequence[PreferencePair]) -> None:
        """Take pairs in; the oldest go where there is no room. One whose id is here already is left out.

        Raises:
            ValueError: a pair has no tokens, or a context or side without any; none is taken in.
        """
        for pair in pairs:
            _check_tokens(pair)
        for pair in pairs:
            if pair.pair_id in self._entries:
                self._dropped["duplicate"] += 1
                continue
            self._entries[pair.pair_id] = _Entry(pair)
            self._inserted += 1
        self._make_room()

    def _make_room(self) -> None:
        while len(self._entries) > self.config.capacity:
            self._drop(next(iter(self._entries)), "capacity")

    def _drop(self, pair_id: str, why: DropReason) -> None:
        del self._entries[pair_id]
        self._dropped[why] += 1

    # -- references ---------------------------------------------------------------------------------

    async def unscored(self, most: int) -> list[PreferencePair]:
        """Pairs without a reference, oldest first; each is handed out once until `load_state_dict`.

        None with `reference = "initial"`: the trainer has the reference itself.
        """
        if self.config.reference == "initial":
            return []
        waiting = [
            entry for entry in self._entries.values() if entry.reference is None and not entry.handed_out
        ][:most]
        for entry in waiting:
            entry.handed_out = True
        return [entry.pair for entry in waiting]

    async def set_references(self, references: Mapping[str, tuple[float, float]]) -> None:
        """Summed log-probabilities (nats) of the chosen and the rejected side, by pair id.

        An id that is not here any more is passed over; a reference that is there already stays.

        Raises:
            ValueError: a value is not finite; none is taken.
        """
        for pair_id, reference in references.items():
            if not all(map(math.isfinite, reference)):
                raise ValueError(
                    f"pair {pair_id}: its reference log-probabilities are {reference}; the policy that "
                    "scored it is broken"
                )
        for pair_id, (chosen, rejected) in references.items():
            entry = self._entries.get(pair_id)
            if entry is not None and entry.reference is None:
                entry.reference = (float(chosen), float(rejected))

    # -- samples ------------------------------------------------------------------------------------

    def _is_ready(self, entry: _Entry) -> bool:
        return self.config.reference == "initial" or entry.reference is not None

    def _is_stale(self, entry: _Entry, version: int) -> bool:
        return entry.pair.version >= 0 and version - entry.pair.version > self.config.max_lag

    async def sample(self, version: int, most: int) -> list[TokenPair]:
        """Up to `most` fresh, ready pairs, drawn uniformly without replacement; one use of each is counted.

        The same buffer, seed and version give the same pairs. Pairs beyond `max_lag` versions are dropped
        before the draw (an unknown version never ages), pairs with `max_uses` uses after it.

        Args:
            version: policy version of the trainer; also the optimizer step, from 0.
            most: pairs at most.
        """
        for pair_id in [one for one, entry in self._entries.items() if self._is_stale(entry, version)]:
            self._drop(pair_id, "stale")
        ready = sorted(pair_id for pair_id, entry in self._entries.items() if self._is_ready(entry))
        drawn = random.Random(f"{self.seed}/{version}").sample(ready, min(most, len(ready)))
        return [self._use(pair_id) for pair_id in drawn]

    def _use(self, pair_id: str) -> TokenPair:
        entry = self._entries[pair_id]
        entry.uses += 1
        if entry.uses >= self.config.max_uses:
            self._drop(pair_id, "used")
        tokens = entry.pair.tokens
        assert tokens is not None
        chosen, rejected = entry.reference or (None, None)
        return TokenPair(
            context_ids=tokens.prompt_ids,
            chosen_ids=tokens.chosen_ids,
            rejected_ids=tokens.rejected_ids,
            weight=entry.pair.weight,
            reference_chosen=chosen,
            reference_rejected=rejected,
            temperature=entry.pair.temperature,
        )

    async def stats(self) -> dict[str, float]:
        """Pairs here (`depth`) and how many of them are `ready`; since the beginning of the run, how many
        came in (`inserted`), and how many left or were left out (`dropped/...`, by reason)."""
        ready = sum(map(self._is_ready, self._entries.values()))
        counts = {"depth": len(self._entries), "ready": ready, "inserted": self._inserted}
        counts |= {f"dropped/{why}": self._dropped[why] for why in DROP_REASONS}
        return {name: float(count) for name, count in counts.items()}

    # -- checkpoints --------------------------------------------------------------------------------

    async def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {
            "format": STATE_FORMAT,
            "inserted": self._inserted,
            "dropped": {why: self._dropped[why] for why in DROP_REASONS},
            "entries": [
                {
                    "pair": pair_to_json(entry.pair),
                    "reference": None if entry.reference is None else list(entry.reference),
                    "uses": entry.uses,
                }
                for entry in self._entries.values()
            ],
        }

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, in place of what is here.

        Under other options than it was saved with: what has no room, or was used as often as it may be, goes.

        Raises:
            ValueError: it is no saved buffer; the message names the entry, and the buffer stays as it was.
        """
        if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
            raise ValueError(f"no saved pair buffer: it has no format {STATE_FORMAT!r}")
        try:
            found = [_entry_from_json(number, item) for number, item in enumerate(state["entries"])]
            inserted = int(state["inserted"])
            dropped = Counter[str]({why: int(state["dropped"][why]) for why in DROP_REASONS})
        except (KeyError, TypeError) as error:
            raise ValueError(f"the saved pair buffer is not complete: {error!r}") from error
        entries = {entry.pair.pair_id: entry for entry in found}
        if len(entries) < len(found):
            raise ValueError("the saved pair buffer has two entries of one pair")
        self._entries = entries
        self._inserted, self._dropped = inserted, dropped
        for entry in found:
            if entry.uses >= self.config.max_uses:
                self._drop(entry.pair.pair_id, "used")
        self._make_room()


def _check_tokens(pair: PreferencePair) -> None:
    tokens = pair.tokens
    if tokens is None or not (tokens.prompt_ids and tokens.chosen_ids and tokens.rejected_ids):
        raise ValueError(
            f"pair {pair.pair_id} has no tokens of a context and two sides; make it with a policy's renderer "
            "(PairExtractor with need_tokens)"
        )


def _entry_from_json(number: int, item: Mapping[str, Any]) -> _Entry:
    try:
        pair = pair_from_json(item["pair"])
        _check_tokens(pair)
        reference = item["reference"]
        if reference is not None:
            chosen, rejected = reference
            reference = (float(chosen), float(rejected))
        return _Entry(pair, reference, int(item["uses"]))
    except (KeyError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"the saved pair buffer, entry {number}: {why}") from error
