"""What to fetch next: leaves in the order of need, and the microbatches that are fetched for ahead.

Invariants:

1. A wanted leaf is queued or taken until it has arrived or is withdrawn; it is never both, and
   never queued twice.
2. A leaf that a microbatch waits for is taken before every leaf that is fetched ahead.
3. Data is fetched ahead for leased microbatches in the order in which they start, and after them
   for the same indices of the next step, as long as that forecast would have been right for at
   least half of the newest step.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, islice

from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.data.sample_ranges import LeafId


class Need(IntEnum):
    """The urgency of a leaf; a lower value comes first."""

    WAITED_FOR = 0
    AHEAD = 1


class LeafQueue:
    """The leaves to fetch: of each need in the order in which they were wanted."""

    def __init__(self) -> None:
        self._queued: dict[Need, dict[LeafId, None]] = {need: {} for need in Need}
        self._taken: set[LeafId] = set()

    def __len__(self) -> int:
        """Leaves that wait to be taken."""
        return sum(map(len, self._queued.values()))

    @property
    def outstanding(self) -> int:
        """Leaves that are wanted and have not arrived."""
        return len(self) + len(self._taken)

    def want(self, leaf: LeafId, need: Need) -> None:
        """Queue a leaf, or move it up if it is queued as less urgent."""
        if leaf not in self._taken and all(leaf not in self._queued[n] for n in Need if n <= need):
            self.withdraw([leaf])
            self._queued[need][leaf] = None

    def take(self, limit: int) -> list[LeafId]:
        """Return the most urgent leaves; each ends with `arrived` or `put_back`."""
        leaves = list(islice(chain.from_iterable(self._queued.values()), limit))
        self.withdraw(leaves)
        self._taken.update(leaves)
        return leaves

    def arrived(self, leaf: LeafId) -> None:
        """Forget a leaf, which has arrived."""
        self._taken.discard(leaf)
        self.withdraw([leaf])

    def put_back(self, leaves: Iterable[LeafId], needs: Need) -> None:
        """Queue leaves again that a source failed to give."""
        for leaf in leaves:
            if leaf in self._taken:
                self._taken.discard(leaf)
                self.want(leaf, needs)

    def withdraw(self, leaves: Iterable[LeafId]) -> None:
        """Forget leaves that are not taken so far."""
        for leaf in leaves:
            for queued in self._queued.values():
                queued.pop(leaf, None)

    def withdraw_all(self, need: Need) -> None:
        """Forget all leaves of this need that are not taken so far."""
        self._queued[need].clear()


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    """One microbatch of the training data, or of the held-out data."""

    step: Step
    index: MicrobatchIndex
    heldout: bool = False


class Lookahead:
    """The microbatches of one trainer whose data is worth having before they start."""

    def __init__(self, last_step: Step) -> None:
        self._last_step = last_step
        self._leased: dict[Sample, None] = {}
        """The leased microbatches that have not begun, in the order of arrival."""
        self._newest: set[MicrobatchIndex] = set()
        self._before: set[MicrobatchIndex] = set()
        self._newest_step = Step(0)
        self._oldest_step = Step(1)
        """The oldest step of which something is expected: leases of earlier ones are void."""

    def expect(self, step: Step, indices: Sequence[MicrobatchIndex], *, heldout: bool) -> None:
        """Record leased microbatches, which are all of one kind."""
        if step < self._oldest_step:
            return
        self._leased.update(dict.fromkeys(Sample(step, index, heldout) for index in indices))
        if heldout or not indices or step < self._newest_step:
            return
        if step > self._newest_step:
            self._before = self._newest if step == self._newest_step + 1 else set()
            self._newest, self._newest_step = set(), step
        self._newest.update(indices)

    def begun(self, sample: Sample) -> None:
        """Forget a microbatch, which has begun: its data is fetched with urgency."""
        self._leased.pop(sample, None)

    def over(self, oldest: Step) -> None:
        """Forget the microbatches of steps before `oldest`."""
        self._oldest_step = oldest
        self._leased = {sample: None for sample in self._leased if sample.step >= oldest}

    def clear(self) -> None:
        """Forget everything that is leased or foreseen: the leases went back."""
        self._leased, self._newest, self._before = {}, set(), set()
        self._newest_step = Step(0)

    def ahead(self, limit: int) -> list[Sample]:
        """Return the microbatches to fetch for, the most urgent first."""
        leased = sorted(
            self._leased, key=lambda sample: sample.step
        )  # stable, as the lease queue is
        return [*leased, *self._forecast()][:limit]

    def _forecast(self) -> list[Sample]:
        step = Step(self._newest_step + 1)
        hits = len(self._newest & self._before)
        # Nothing is known of the first step; a wrong forecast then costs one step's data at most.
        foreseen = not self._before or 2 * hits >= len(self._newest)
        if not foreseen or step > self._last_step:
            return []
        return [Sample(step, index) for index in sorted(self._newest)]
