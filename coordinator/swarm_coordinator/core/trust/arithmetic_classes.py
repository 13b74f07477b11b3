"""Classes of arithmetic: which machines give equal results to the bit, as audits have shown.

Values and pure decisions (docs/decisions, number 0036). Two machines are alike once their results
were equal to the bit in several audited cells of a stage. Each pair is recorded by itself: if A is
like B and B like C, A need not be like C. A dishonest peer B could otherwise copy A in some cells
and C in others, and two honest machines that differ would seem alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_coordinator.core.events import AgreementRecord
from swarm_shared.base.types import PeerId, StageIndex

AGREED_CELLS = 5
"""Audited cells of equal bits after which two machines count as alike: unlike ones may agree in
some, where their kernels happen to round alike."""

MAX_PAIRS = 100_000
"""Pairs of machines that are remembered; those that agreed in the fewest cells go first."""

DEVIATION_SECONDS = 43_200.0
"""Time within which an owner's second deviation from its class is a lost audit. An honest machine
deviates when it begins to compute otherwise, as with fewer threads: once a day, where its
preferences change with the hours."""


class Machine(NamedTuple):
    """A device of a peer at one stage: another stage may use other kernels. A peer with another
    device is another machine."""

    stage: StageIndex
    peer: PeerId
    device: str


Pair = tuple[Machine, Machine]


def pair_of(first: Machine, second: Machine) -> Pair:
    """The pair of two machines, whose order does not matter."""
    return (first, second) if first <= second else (second, first)


@dataclass(slots=True)
class ArithmeticClasses:
    """The pairs of machines that have agreed, and which have changed since they were stored."""

    cells: dict[Pair, int] = field(default_factory=dict)
    """Number of audited cells in which both computed the same bits, since the last one in which
    they did not."""
    changed: set[Pair] = field(default_factory=set)
    """Pairs whose number of cells has changed since they were stored."""
    deviated_at: dict[PeerId, float] = field(default_factory=dict)
    """When a machine of each owner last deviated from its class."""

    def note_agreement(self, first: Machine, second: Machine) -> None:
        """Note that both machines have computed the same bits of a cell."""
        pair = pair_of(first, second)
        if pair not in self.cells and len(self.cells) >= MAX_PAIRS:
            for rarest in sorted(self.cells, key=self.cells.__getitem__)[: MAX_PAIRS // 8]:
                self._forget(rarest)
        self.cells[pair] = self.cells.get(pair, 0) + 1
        self.changed.add(pair)

    def note_difference(self, first: Machine, second: Machine) -> None:
        """Note that the machines have computed different bits of a cell: forget in how many cells
        they agreed before."""
        self._forget(pair_of(first, second))

    def has_agreed(self, first: Machine, second: Machine) -> bool:
        """Whether both have computed the same bits of a cell, since they last differed."""
        return pair_of(first, second) in self.cells

    def alike(self, first: Machine, second: Machine) -> bool:
        """Whether both have agreed in at least AGREED_CELLS cells."""
        return self.cells.get(pair_of(first, second), 0) >= AGREED_CELLS

    def forget(self, peer: PeerId) -> None:
        """Forget what is known of a peer's machines."""
        for pair in [pair for pair in self.cells if peer in (pair[0].peer, pair[1].peer)]:
            self._forget(pair)

    def _forget(self, pair: Pair) -> None:
        if self.cells.pop(pair, None) is not None:
            self.changed.add(pair)

    def deviates_again(self, owner: PeerId, now: float) -> bool:
        """Record that a machine of the owner deviated; return whether another deviation was within
        DEVIATION_SECONDS before."""
        recent = {o: at for o, at in self.deviated_at.items() if now - at <= DEVIATION_SECONDS}
        self.deviated_at = {**recent, owner: now}
        return owner in recent

    def take_changed(self) -> tuple[AgreementRecord, ...]:
        """The changed pairs in their order, to be stored; a pair with 0 cells is forgotten."""
        changed, self.changed = sorted(self.changed), set()
        return tuple(
            AgreementRecord(
                first.stage, first.peer, first.device, second.peer, second.device,
                self.cells.get((first, second), 0),
            )
            for first, second in changed
        )  # fmt: skip


def restored_classes(records: Iterable[AgreementRecord]) -> ArithmeticClasses:
    """The pairs of an earlier start of the coordinator."""
    return ArithmeticClasses(
        {
            (Machine(r.stage, r.peer, r.device), Machine(r.stage, r.other, r.other_device)): r.cells
            for r in records
        }
    )


def groups(records: Iterable[AgreementRecord]) -> list[list[Machine]]:
    """The machines that are alike, each with one of its group at least, to be shown to people."""
    group_of: dict[Machine, list[Machine]] = {}
    for (machine, alike), cells in restored_classes(records).cells.items():
        if cells < AGREED_CELLS:
            continue
        group, other_group = (
            group_of.setdefault(machine, [machine]),
            group_of.setdefault(alike, [alike]),
        )
        if group is not other_group:
            group += other_group
            group_of.update(dict.fromkeys(other_group, group))
    distinct = {id(group): sorted(group) for group in group_of.values()}
    return sorted(distinct.values())
