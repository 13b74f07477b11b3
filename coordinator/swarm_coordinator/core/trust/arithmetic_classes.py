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
    """A device of a peer at one stage, whose kernels another stage may not use. A peer with another
    device is another machine."""

    stage: StageIndex
    peer: PeerId
    device: str


Pair = tuple[Machine, Machine]


def pair_of(one: Machine, other: Machine) -> Pair:
    return (one, other) if one <= other else (other, one)


@dataclass(slots=True)
class ArithmeticClasses:
    """The pairs of machines that have agreed, and which have changed since they were stored."""

    cells: dict[Pair, int] = field(default_factory=dict)
    """Number of audited cells in which both computed the same bits, since the last one in which
    they did not."""
    changed: set[Pair] = field(default_factory=set)
    deviated_at: dict[PeerId, float] = field(default_factory=dict)
    """When the machines of an owner last deviated from their class."""

    def agreed(self, one: Machine, other: Machine) -> None:
        """Both have computed the same bits of a cell."""
        pair = pair_of(one, other)
        if pair not in self.cells and len(self.cells) >= MAX_PAIRS:
            for least in sorted(self.cells, key=self.cells.__getitem__)[: MAX_PAIRS // 8]:
                self._forget(least)
        self.cells[pair] = self.cells.get(pair, 0) + 1
        self.changed.add(pair)

    def differed(self, one: Machine, other: Machine) -> None:
        """Both have computed different bits of a cell: forget in how many they agreed before."""
        self._forget(pair_of(one, other))

    def has_agreed(self, one: Machine, other: Machine) -> bool:
        """Whether both have computed the same bits of a cell, since they last did not."""
        return pair_of(one, other) in self.cells

    def alike(self, one: Machine, other: Machine) -> bool:
        """Whether both have agreed in AGREED_CELLS."""
        return self.cells.get(pair_of(one, other), 0) >= AGREED_CELLS

    def forget(self, peer: PeerId) -> None:
        """Forget what is known of a peer's machines."""
        for pair in [pair for pair in self.cells if peer in (pair[0].peer, pair[1].peer)]:
            self._forget(pair)

    def _forget(self, pair: Pair) -> None:
        if self.cells.pop(pair, None) is not None:
            self.changed.add(pair)

    def deviates_again(self, owner: PeerId, now: float) -> bool:
        """Record that a machine of the owner deviated; whether one has within DEVIATION_SECONDS."""
        recent = {o: at for o, at in self.deviated_at.items() if now - at <= DEVIATION_SECONDS}
        self.deviated_at = {**recent, owner: now}
        return owner in recent

    def take_changed(self) -> tuple[AgreementRecord, ...]:
        """The pairs to be stored, in their order; those without cells are forgotten."""
        changed, self.changed = sorted(self.changed), set()
        return tuple(
            AgreementRecord(
                one.stage, one.peer, one.device, other.peer, other.device,
                self.cells.get((one, other), 0),
            )
            for one, other in changed
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
    for (one, other), cells in restored_classes(records).cells.items():
        if cells < AGREED_CELLS:
            continue
        first, second = group_of.setdefault(one, [one]), group_of.setdefault(other, [other])
        if first is not second:
            first += second
            group_of.update(dict.fromkeys(second, first))
    distinct = {id(group): sorted(group) for group in group_of.values()}
    return sorted(distinct.values())
