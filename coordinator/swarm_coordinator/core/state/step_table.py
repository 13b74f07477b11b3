"""The table of one step: the peer that committed each (microbatch, stage), and what is missing.

Part of the pure core. A run has many thousand cells and consults them after every message, so the
cells of each peer and the numbers filled per microbatch and stage are indexed as cells change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex

CellKey = tuple[MicrobatchIndex, StageIndex]


@dataclass(frozen=True, slots=True)
class Cell:
    """One committed (microbatch, stage): the peer that holds it, and the loss at the last stage."""

    peer: PeerId
    tokens: int
    loss_sum: float | None
    transcript: Transcript


class StepTable(dict[CellKey, Cell]):
    """Cells by microbatch and stage, indexed by peer. Changed only through `[]=` and `del`."""

    def __init__(self) -> None:
        super().__init__()
        self.reopened: set[MicrobatchIndex] = set()
        """Microbatches that have lost a cell since this set was last cleared."""
        self._filled: dict[MicrobatchIndex, int] = {}
        self._filled_of_stage: Counter[StageIndex] = Counter()
        self._held: dict[PeerId, set[CellKey]] = {}

    def filled(self, microbatch: MicrobatchIndex) -> int:
        """Number of stages of a microbatch that are committed."""
        return self._filled.get(microbatch, 0)

    def filled_of_stage(self, stage: StageIndex) -> int:
        """Number of microbatches of a stage that are committed."""
        return self._filled_of_stage[stage]

    def held_by(self, peer: PeerId) -> tuple[CellKey, ...]:
        """The keys of the cells that a peer has committed."""
        return tuple(self._held.get(peer, ()))

    def holds_any(self, peer: PeerId) -> bool:
        return bool(self._held.get(peer))

    def __setitem__(self, key: CellKey, cell: Cell) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, cell)
        self._filled[key[0]] = self._filled.get(key[0], 0) + 1
        self._filled_of_stage[key[1]] += 1
        self._held.setdefault(cell.peer, set()).add(key)

    def __delitem__(self, key: CellKey) -> None:
        cell = self[key]
        super().__delitem__(key)
        self._filled[key[0]] -= 1
        self._filled_of_stage[key[1]] -= 1
        self._held[cell.peer].discard(key)
        self.reopened.add(key[0])
