"""Statistics of a run for people: utilisation, the cost of faults, and suspicious peers.

Part of the pure core. No rule depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_coordinator.core.state.utilisation import Rejection, UtilisationStats
from swarm_shared.base.types import PeerId

MAX_FLAGGED_PEERS = 10_000
"""Number of peers whose suspicion flags are kept; the oldest are dropped first."""


@dataclass(slots=True)
class SuspicionFlags:
    """How often a peer has produced something wrong, whatever the cause; shown by `status`."""

    times: int
    reason: str
    """The reason of the latest flag."""


@dataclass(slots=True)
class WorkCounters:
    """Counts of cells since this start of the coordinator: the cost of faults."""

    counted: int = 0
    """Cells entered in a table, including those that were cleared again."""
    duplicated: int = 0
    """Cells counted by a second peer too, which removed its copy at the close."""
    cleared: int = 0
    """Cells lost with the peer that had counted them, and so computed once more."""


@dataclass(slots=True)
class RunStatistics:
    """Counts and sums since this start of the coordinator."""

    utilisation: UtilisationStats
    work: WorkCounters = field(default_factory=WorkCounters)
    flags: dict[PeerId, SuspicionFlags] = field(default_factory=dict)
    """Suspicion flags; kept when a peer leaves, for when it returns."""

    def reject(self, kind: Rejection) -> None:
        """Count a rejection."""
        self.utilisation.rejected[kind] += 1

    def flag(self, peer: PeerId, kind: Rejection, reason: str) -> None:
        """Count a rejection against a peer."""
        self.reject(kind)
        mark = self.flags.pop(peer, None) or SuspicionFlags(0, reason)
        mark.times, mark.reason = mark.times + 1, reason
        self.flags[peer] = mark
        if len(self.flags) > MAX_FLAGGED_PEERS:
            del self.flags[next(iter(self.flags))]
