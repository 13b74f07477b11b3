"""The leases of one step: which trainer drives which microbatch.

Part of the pure core. When a peer is lost, its leases go to the trainers with the fewest, so the
microbatches of each trainer are indexed as leases change.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from swarm_shared.base.types import MicrobatchIndex, PeerId


@dataclass(frozen=True, slots=True)
class LeaseState:
    """One lease of one microbatch to a trainer."""

    lease: int
    trainer: PeerId
    granted_at: float
    resolved_at: float | None = None


class LeaseBook(dict[MicrobatchIndex, LeaseState]):
    """Leases by microbatch, indexed by trainer. Changed only through `[]=` and `del`."""

    def __init__(self) -> None:
        super().__init__()
        self._leased: dict[PeerId, set[MicrobatchIndex]] = {}
        self._driven: dict[PeerId, set[MicrobatchIndex]] = {}

    def leased_to(self, trainer: PeerId) -> Collection[MicrobatchIndex]:
        """All microbatches leased to a trainer, resolved ones included."""
        return self._leased.get(trainer, ())

    def driven_by(self, trainer: PeerId) -> Collection[MicrobatchIndex]:
        """Microbatches leased to a trainer without a result so far."""
        return self._driven.get(trainer, ())

    def __setitem__(self, microbatch: MicrobatchIndex, lease: LeaseState) -> None:
        if microbatch in self:
            del self[microbatch]
        super().__setitem__(microbatch, lease)
        self._leased.setdefault(lease.trainer, set()).add(microbatch)
        if lease.resolved_at is None:
            self._driven.setdefault(lease.trainer, set()).add(microbatch)

    def __delitem__(self, microbatch: MicrobatchIndex) -> None:
        lease = self[microbatch]
        super().__delitem__(microbatch)
        self._leased[lease.trainer].discard(microbatch)
        if lease.resolved_at is None:
            self._driven[lease.trainer].discard(microbatch)
