"""The run's peers, and indices for the questions that the rules ask about them at every event.

Part of the pure core. Thousands of peers send several messages a second each, and after each
message the rules ask which peers hold a stage, download, or leave. Scanning all peers would cost
milliseconds per message. Every change that an index depends on is a method of the table, which
updates the indices with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from swarm_coordinator.core.events import StageShare
from swarm_coordinator.core.state.history import RunHistory
from swarm_coordinator.core.state.peers import (
    GREAT_RATE_RATIO,
    NO_VERSION,
    PeerPhase,
    PeerState,
    StageTransfer,
    rate_tolerance,
)
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import AddressUpdate, PeerRecord, StageRow
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.claimed_rates import ClaimedRate, believed_rates
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class StagePeers:
    """The peers that take part in this step with a stage, in the order of their arrival."""

    ready: tuple[PeerState, ...]
    """All that hold the stage at the run's version, leaving ones included."""
    working: tuple[PeerState, ...]
    """Peers that may get new microbatches: a leaving one only if all of them leave, a paused one
    never."""
    trainers: tuple[PeerState, ...]
    """Peers that may be leased microbatches: neither leaving nor paused."""


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """The computing rates that a stage can count on.

    Peers that hold the stage or are on their way to it count, except those that leave or pause.
    """

    peers: int
    measured: int
    """Number of these peers that have reported a rate."""
    flops_per_second: float
    """Sum of the reported rates."""


class PeerTable(dict[PeerId, PeerState]):
    """Peers by ID, with indices. Peers come and go only through `[]=`, `del` and `clear`."""

    def __init__(self, manifest: Manifest, history: RunHistory) -> None:
        super().__init__()
        self.syncing: dict[PeerId, StageTransfer] = {}
        """Transfers of peers that have a stage and download its state."""
        self.unsourced: dict[PeerId, StageTransfer] = {}
        """Transfers of syncing peers that have not been sent a source."""
        self.movers: dict[PeerId, StageTransfer] = {}
        """Transfers of peers that move to another stage."""
        self.leavers: dict[PeerId, PeerState] = {}
        self.with_carrier: dict[PeerId, PeerState] = {}
        self.excluded: set[PeerId] = set()
        """Peers that kept the current step from closing: they take no further part in it and are
        synced after it. Changed only through `exclude`, `readmit` and `readmit_all`."""
        self.losses = 0
        """Number of stage holders lost since the start."""
        self.awaiting_roster: dict[PeerId, PeerState] = {}
        """Peers that have not been sent a roster yet; cleared by the sender of the roster."""
        self._ranges = manifest.stages
        self._sizes = stage_sizes(manifest)
        self.stages = tuple(StageIndex(stage) for stage in range(manifest.stage_count))
        self._history = history
        self._version = NO_VERSION
        """The run's version for which the views hold."""
        self._by_stage: dict[StageIndex, dict[PeerId, PeerState]] = {s: {} for s in self.stages}
        self._bound_for: dict[StageIndex, dict[PeerId, PeerState]] = {s: {} for s in self.stages}
        self._views: dict[StageIndex, StagePeers] = {}
        self._records: dict[StageIndex, tuple[PeerRecord, ...]] = {}
        """Roster records of each stage's ready peers, while they are valid."""
        self._lacking: tuple[frozenset[StageIndex], frozenset[StageIndex]] | None = None
        """Stages without a holder, and without a working peer, while the views are valid."""
        self._capacities: dict[StageIndex, StageCapacity] = {}
        self._rows: dict[StageIndex, StageRow] = {}
        self._carriers: dict[str, set[PeerId]] = {}
        """Members by the ID of their p2pd. The ID is not verified, so several members may claim
        one."""
        self._carrier_of: dict[PeerId, str] = {}

    # ---- who takes part in this step

    def holds_current(self, peer: PeerState) -> bool:
        """Whether the peer can take part in this step: it holds a stage at the run's version."""
        return (
            peer.phase is PeerPhase.READY
            and peer.version == self._history.version
            and peer.peer not in self.excluded
        )

    def ready(self, stage: int) -> tuple[PeerState, ...]:
        """Peers that hold the stage at the run's version, leaving ones included."""
        return self._view(StageIndex(stage)).ready

    def working(self, stage: int) -> tuple[PeerState, ...]:
        """Ready peers that may get new microbatches.

        A leaving peer only if all of them leave, a paused one never.
        """
        return self._view(StageIndex(stage)).working

    def has_others(self, peer: PeerState) -> bool:
        """Whether another peer takes part in this step with this peer's stage."""
        return peer.stage is not None and any(p is not peer for p in self.ready(peer.stage))

    def trainers(self) -> list[PeerState]:
        """Peers that may be leased microbatches, by stage."""
        return [peer for stage in self.stages for peer in self._view(stage).trainers]

    def unheld(self) -> frozenset[StageIndex]:
        """Stages without a holder that takes part."""
        return self._stages_lacking()[0]

    def idle(self) -> frozenset[StageIndex]:
        """Stages without a peer that takes new work."""
        return self._stages_lacking()[1]

    def paused_stages(self) -> list[StageIndex]:
        """Stages that the run waits for although they are held."""
        return sorted(self.idle() - self.unheld())

    def has_complete_pipeline(self) -> bool:
        """Whether microbatches can pass: every stage has a working peer, and there is a trainer."""
        return not self.idle() and any(self._view(stage).trainers for stage in self.stages)

    def _stages_lacking(self) -> tuple[frozenset[StageIndex], frozenset[StageIndex]]:
        self._follow_version()
        if self._lacking is None:
            views = {stage: self._view(stage) for stage in self.stages}
            self._lacking = (
                frozenset(stage for stage, view in views.items() if not view.ready),
                frozenset(stage for stage, view in views.items() if not view.working),
            )
        return self._lacking

    def _follow_version(self) -> None:
        if self._history.version != self._version:
            self._version = self._history.version
            self._views.clear()
            self._records.clear()
            self._lacking = None

    def _view(self, stage: StageIndex) -> StagePeers:
        self._follow_version()
        view = self._views.get(stage)
        if view is None:
            ready = tuple(p for p in self._by_stage[stage].values() if self.holds_current(p))
            active = tuple(peer for peer in ready if not peer.paused)
            staying = tuple(peer for peer in active if not peer.leaving)
            view = self._views[stage] = StagePeers(ready, staying or active, staying)
        return view

    # ---- where the peers are, and what they can do

    def bound_for(self, stage: StageIndex) -> Iterable[PeerState]:
        """Peers that hold or download the stage; a moving peer counts only at its destination."""
        return self._bound_for[stage].values()

    def at(self, stage: StageIndex) -> Iterable[PeerState]:
        """Peers that hold or download the stage; a moving peer counts where it still is."""
        return self._by_stage[stage].values()

    def group_size(self, stage: StageIndex) -> int:
        """Number of peers that may average with the stage in one close: those at it, and movers."""
        coming = sum(moving.stage == stage for moving in self.movers.values())
        return len(self._by_stage[stage]) + coming

    def admits(self, peer: PeerId) -> bool:
        """Whether the ID is that of a member, or of a member's p2pd."""
        return peer in self or peer in self._carriers

    def stage_rows(self) -> tuple[StageRow, ...]:
        """The capacity of each stage; a peer without a reported rate counts with the mean."""
        capacities = [self._capacity(stage) for stage in self.stages]
        measured = sum(capacity.measured for capacity in capacities)
        mean = sum(t.flops_per_second for t in capacities) / measured if measured else 0.0
        return tuple(
            self._row(stage, capacity, mean)
            for stage, capacity in zip(self.stages, capacities, strict=True)
        )

    def _row(self, index: StageIndex, capacity: StageCapacity, mean: float) -> StageRow:
        stage = self._ranges[index]
        flops = capacity.flops_per_second + mean * (capacity.peers - capacity.measured)
        rate = flops / (stage.work_flops or 1.0)
        row = self._rows.get(index)
        if row is None or (row.peers, row.microbatches_per_second) != (capacity.peers, rate):
            row = self._rows[index] = StageRow(
                stage=index,
                peers=capacity.peers,
                microbatches_per_second=rate,
                work_flops=stage.work_flops,
                memory=stage.memory,
                sent_bytes=self._sizes[index].sent_bytes,
            )
        return row

    def _capacity(self, stage: StageIndex) -> StageCapacity:
        capacity = self._capacities.get(stage)
        if capacity is None:
            counted = [p for p in self.bound_for(stage) if not p.leaving and not p.paused]
            rates = [
                min(p.rates.flops_per_second, p.rates.uplink_flops_per_second)
                for p in counted
                if p.rates.flops_per_second > 0
            ]
            capacity = self._capacities[stage] = StageCapacity(len(counted), len(rates), sum(rates))
        return capacity

    # ---- roster records

    def roster(self) -> tuple[tuple[PeerRecord, ...], ...]:
        """Records of all peers that take part in this step, by stage.

        The tuple of an unchanged stage is the same object as before.
        """
        return tuple(self._stage_records(stage) for stage in self.stages)

    def _stage_records(self, stage: StageIndex) -> tuple[PeerRecord, ...]:
        view = self._view(stage)
        records = self._records.get(stage)
        if records is None:
            alone = not view.trainers
            claims = [
                ClaimedRate(peer.rates.microbatches_per_second, peer.rates.counted)
                for peer in view.ready
            ]
            tolerance = rate_tolerance(len(self))
            records = self._records[stage] = tuple(
                _record(peer, not peer.paused and (alone or not peer.leaving), rate, tolerance)
                for peer, rate in zip(view.ready, believed_rates(claims), strict=True)
            )
        return records

    def record_of(self, peer: PeerState) -> PeerRecord:
        """A peer's roster record."""
        accepts_work = not peer.leaving and not peer.paused
        rate, tolerance = peer.rates.microbatches_per_second, rate_tolerance(len(self))
        return _record(peer, accepts_work, rate, tolerance)

    # ---- changes of a peer

    def begin_transfer(self, peer: PeerState, transfer: StageTransfer) -> None:
        """Begin a peer's transfer: a peer that holds another stage becomes a mover, any other one
        has the stage at once and syncs."""
        self._unindex(peer)
        peer.transfer = transfer
        if peer.phase is not PeerPhase.READY:
            peer.stage, peer.phase, peer.record = transfer.stage, PeerPhase.SYNCING, None
        self._index(peer)

    def assign_source(self, peer: PeerState, transfer: StageTransfer, now: float) -> None:
        """Record that a peer was sent the source of a state at the run's version."""
        transfer.source_assigned, transfer.version = True, self._history.version
        transfer.asked_at = now
        self._index(peer)

    def lose_source(self, peer: PeerState, transfer: StageTransfer) -> None:
        """Record that a peer needs another source, or the state of another version."""
        transfer.source_assigned = transfer.ready = False
        transfer.sources = ()
        self._index(peer)

    def hold(self, peer: PeerState, stage: StageIndex, version: Version) -> None:
        """Let a peer hold a stage; its transfer ends."""
        if (peer.stage, peer.goes_to) != (stage, stage):
            self._unindex(peer)
            peer.record = None
        peer.stage, peer.version, peer.transfer = stage, version, None
        peer.phase = PeerPhase.READY
        self._index(peer)

    def has_partner(self, peer: PeerId, transfer: StageTransfer) -> bool:
        """Whether the partner of an exchange is still moving; True for a move without one."""
        if transfer.partner is None:
            return True
        partner_transfer = self.movers.get(transfer.partner)
        return partner_transfer is not None and partner_transfer.partner == peer

    def claim(self, peer: PeerState, digest: str) -> None:
        """Keep the digest of a returning peer's state until its stage's fingerprint is known."""
        fingerprint_known = peer.stage is not None and peer.stage in self._history.fingerprints
        peer.claimed_digest = None if fingerprint_known else digest

    def cancel_move(self, peer: PeerState) -> None:
        """Let a mover stay at its stage."""
        self._unindex(peer)
        peer.transfer = None
        self._index(peer)

    def release_stage(self, peer: PeerState) -> None:
        """Take a peer's stage, its state and its transfer from it."""
        self._unindex(peer)
        peer.stage, peer.version, peer.transfer = None, NO_VERSION, None
        peer.phase, peer.record = PeerPhase.ADMITTED, None
        self._index(peer)

    def set_version(self, peer: PeerState, version: Version) -> None:
        """Record that a peer has applied the step that leads to a version."""
        peer.version = version
        self._index(peer)

    def set_paused(self, peer: PeerState, paused: bool) -> None:
        peer.paused = paused
        self._index(peer)

    def set_leaving(self, peer: PeerState, now: float) -> None:
        peer.leaving, peer.leaving_since = True, now
        self._index(peer)

    def set_contact(self, peer: PeerState, contact: AddressUpdate) -> None:
        peer.contact, peer.record = contact, None
        self._index(peer)

    def set_certificate(self, peer: PeerState, certificate: str) -> None:
        peer.certificate, peer.record = certificate, None
        self._invalidate_records(peer)

    def record_rates(
        self, peer: PeerState, now: float, queued: int, microbatches_per_second: float,
        flops_per_second: float, up_bytes_per_second: float, uplink_flops_per_second: float,
    ) -> None:  # fmt: skip
        """Set the fields that a heartbeat changes; this runs thousands of times a second."""
        rates = peer.rates
        measured = (
            flops_per_second != rates.flops_per_second
            or uplink_flops_per_second != rates.uplink_flops_per_second
        )
        peer.last_heard, rates.queued = now, queued
        rates.microbatches_per_second = microbatches_per_second
        rates.flops_per_second = flops_per_second
        rates.up_bytes_per_second = up_bytes_per_second
        rates.uplink_flops_per_second = uplink_flops_per_second
        if measured and peer.goes_to is not None:
            self._capacities.pop(peer.goes_to, None)
        if peer.record is not None:
            published = peer.record.microbatches_per_second
            lowest, highest = published / GREAT_RATE_RATIO, published * GREAT_RATE_RATIO
            if not lowest <= microbatches_per_second <= highest:
                self._invalidate_records(peer)

    def record_counted(self, shares: Iterable[StageShare]) -> None:
        """Set the number of microbatches that each peer counted in the applied step."""
        counted = {(share.peer, share.stage): share.microbatches for share in shares}
        for peer in self.values():
            stage = peer.stage
            peer.rates.counted = 0 if stage is None else counted.get((peer.peer, stage), 0)
        self._records.clear()

    def exclude(self, peer: PeerState) -> None:
        """Let a peer take no further part in the current step."""
        self.excluded.add(peer.peer)
        self._index(peer)

    def readmit(self, peer: PeerState) -> None:
        """Let an excluded peer take part in the current step again."""
        self.excluded.discard(peer.peer)
        self._index(peer)

    def readmit_all(self) -> None:
        """End all exclusions with the step."""
        for peer in list(self.excluded):
            self.readmit(self[peer])

    # ---- changes of the table

    def __setitem__(self, key: PeerId, peer: PeerState) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, peer)
        self.awaiting_roster[key] = peer
        self._index(peer)

    def __delitem__(self, key: PeerId) -> None:
        peer = self[key]
        super().__delitem__(key)
        self.losses += peer.stage is not None
        self._unindex(peer)
        self.excluded.discard(key)
        for index in (
            self.syncing, self.unsourced, self.movers, self.leavers, self.with_carrier,
            self.awaiting_roster,
        ):  # fmt: skip
            index.pop(key, None)
        self._index_carrier(key, None)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def _index(self, peer: PeerState) -> None:
        """Update the indices for a new or changed peer."""
        key, transfer, stage, goes_to = peer.peer, peer.transfer, peer.stage, peer.goes_to
        if stage is not None:
            self._invalidate_views(stage)
            self._by_stage[stage][key] = peer
        if goes_to is not None:
            self._capacities.pop(goes_to, None)
            self._bound_for[goes_to][key] = peer
        joins = transfer is not None and peer.phase is PeerPhase.SYNCING
        _put(self.syncing, key, transfer if joins else None)
        unsourced = joins and transfer is not None and not transfer.source_assigned
        _put(self.unsourced, key, transfer if unsourced else None)
        _put(self.movers, key, peer.moving)
        _put(self.leavers, key, peer if peer.leaving else None)
        carrier = peer.contact.carrier
        _put(self.with_carrier, key, peer if carrier is not None else None)
        self._index_carrier(key, None if carrier is None else carrier.peer)

    def _index_carrier(self, member: PeerId, carrier: str | None) -> None:
        before = self._carrier_of.get(member)
        if carrier == before:
            return
        if before is not None:
            del self._carrier_of[member]
            self._carriers[before].discard(member)
            if not self._carriers[before]:
                del self._carriers[before]
        if carrier is not None:
            self._carrier_of[member] = carrier
            self._carriers.setdefault(carrier, set()).add(member)

    def _unindex(self, peer: PeerState) -> None:
        """Remove a peer from the indices by stage, before it is removed or changes stage."""
        stage, goes_to = peer.stage, peer.goes_to
        if stage is not None:
            self._invalidate_views(stage)
            self._by_stage[stage].pop(peer.peer)
        if goes_to is not None:
            self._capacities.pop(goes_to, None)
            self._bound_for[goes_to].pop(peer.peer)

    def _invalidate_views(self, stage: StageIndex) -> None:
        self._views.pop(stage, None)
        self._records.pop(stage, None)
        self._lacking = None

    def _invalidate_records(self, peer: PeerState) -> None:
        if peer.stage is not None:
            self._records.pop(peer.stage, None)


def _put(index: dict[PeerId, ValueT], key: PeerId, value: ValueT | None) -> None:
    """Enter the value in an index; without a value remove the key."""
    if value is not None:
        index[key] = value
    else:
        index.pop(key, None)


def _record(peer: PeerState, accepts_work: bool, rate: float, tolerance: float) -> PeerRecord:
    """The peer's roster record, which is the same object until it changes. `rate` is the believed
    part of the rate that the peer claims; `tolerance` is the relative change that is ignored."""
    assert peer.stage is not None
    record = peer.record
    if (
        record is not None
        and record.accepts_work == accepts_work
        and abs(record.microbatches_per_second - rate) <= tolerance * rate
    ):
        return record
    contact = peer.contact
    peer.record = PeerRecord(
        peer=peer.peer,
        stage=peer.stage,
        addresses=contact.addresses,
        certificate=peer.certificate,
        microbatches_per_second=rate,
        carrier=contact.carrier,
        accepts_work=accepts_work,
        reachability=contact.reachability,
        offers_relay=contact.offers_relay,
        local=contact.local,
        site=contact.site,
    )
    return peer.record
