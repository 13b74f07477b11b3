"""The run's peers, and indices for the questions that the rules ask about them at every event.

Part of the pure core. Thousands of peers send several messages a second each, and after each
message the rules ask which peers hold a stage, download, or leave. Scanning all peers would cost
milliseconds per message, so a peer notifies its table when a field changes that an index depends
on; no caller has to update an index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from swarm_coordinator.core.events import SessionNumber
from swarm_coordinator.core.state.moves import NO_VERSION, StageMove
from swarm_coordinator.core.state.utilisation import LastHeartbeat
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import CarrierAddress, PeerRecord, Reachability


class PeerPhase(StrEnum):
    """How far a peer has come to holding its stage."""

    ADMITTED = "admitted"
    """Has a certificate and no stage yet."""
    SYNCING = "syncing"
    """Has a stage, but not its state yet."""
    READY = "ready"
    """Holds its stage at the run's version."""


_STAGE_FIELDS = frozenset({"stage", "moving"})
_INDEXED_FIELDS = frozenset({"phase", "version", "leaving", "paused", "source_assigned", "carrier"})
"""Fields that the indices depend on, besides the stage and the rate."""

_RECORD_FIELDS = frozenset(
    {"stage", "addresses", "certificate", "carrier", "reachability", "offers_relay"}
)
"""Fields published in the peer's roster record, besides its rate and whether it leaves."""


_RATE_FIELDS = frozenset({"flops_per_second", "uplink_flops_per_second"})

RATE_TOLERANCE = 0.1
"""Relative change of a peer's rate after which its roster record is published again."""


def rates_alike(published: float, rate: float) -> bool:
    """Whether `rate` is within RATE_TOLERANCE of the published one."""
    return abs(published - rate) <= RATE_TOLERANCE * rate


@dataclass(slots=True)
class PeerState:
    """What the coordinator stores of one attached peer."""

    peer: PeerId
    session: SessionNumber
    certificate: str
    name: str | None
    addresses: tuple[str, ...]
    carrier: CarrierAddress | None
    device: str
    memory_bytes: int
    trainer: bool
    wanted_stage: StageIndex | None
    last_heard: float
    reachability: Reachability = Reachability.UNKNOWN
    offers_relay: bool = False
    phase: PeerPhase = PeerPhase.ADMITTED
    stage: StageIndex | None = None
    version: Version = NO_VERSION
    microbatches_per_second: float = 0.0
    flops_per_second: float = 0.0
    """Moving average of the computing rates that the peer has measured, at any stage; 0 without
    one."""
    up_bytes_per_second: float = math.inf
    """Measured capacity of its uplink; infinite until the uplink has been the limit."""
    uplink_flops_per_second: float = math.inf
    """The uplink's capacity in microbatches of the stage where it was reported, times the stage's
    work."""
    queued: int = 0
    leaving: bool = False
    leaving_since: float = 0.0
    paused: bool = False
    """It gets no new work for now, but closes steps with the other members."""
    close_delayed_until: float = 0.0
    """While it downloads, it delays the close of the step until this time at most."""
    close_delays: int = 0
    """Number of closes that it may have delayed while joining."""
    source_assigned: bool = False
    """Whether the peer has been sent the source of its state."""
    ask_not_before: float = 0.0
    """Earliest time for the next source after a failed one."""
    asked_at: float = 0.0
    """When the peer was sent the source of its state."""
    download_bytes_per_second: float = 0.0
    """Rate of its last download of a stage's state; 0 without one."""
    missed_apply: Step | None = None
    """The step that it has averaged and still has to apply, having missed the Apply."""
    delivered_at: float = -math.inf
    """When the last microbatch that it drives was found committed in every stage."""
    early_receipts: dict[tuple[Step, MicrobatchIndex], Receipt] = field(default_factory=dict)
    """Receipts reported after a restart of the coordinator, before their step began."""
    matched_majority: bool = False
    """Whether its parameters have once been bitwise equal to those of most replicas of its
    stage."""
    moving: StageMove | None = None
    reported_microbatches_per_second: float = 0.0
    """Its last reported computing rate; heartbeats repeat it only when it has changed."""
    last_heartbeat: LastHeartbeat = field(default_factory=LastHeartbeat)
    record: PeerRecord | None = field(default=None, repr=False, compare=False)
    """Its published roster record; None after a change of one of its fields."""
    table: PeerTable | None = field(default=None, repr=False, compare=False)

    def __setattr__(self, name: str, value: object) -> None:
        table: PeerTable | None = getattr(self, "table", None)
        if table is None:
            object.__setattr__(self, name, value)
            return
        if name in _RECORD_FIELDS:
            object.__setattr__(self, "record", None)
            table.record_changed(self)
        if name in _STAGE_FIELDS:
            table.unindex(self)
        object.__setattr__(self, name, value)
        if name in _STAGE_FIELDS or name in _INDEXED_FIELDS:
            table.index(self)
        elif name in _RATE_FIELDS:
            table.rate_changed(self)
        elif (
            name == "microbatches_per_second"
            and self.record is not None
            and not rates_alike(self.record.microbatches_per_second, self.microbatches_per_second)
        ):
            table.record_changed(self)

    def record_heartbeat(
        self, now: float, queued: int, microbatches_per_second: float, flops_per_second: float,
        up_bytes_per_second: float, uplink_flops_per_second: float,
    ) -> None:  # fmt: skip
        """Set the fields that a heartbeat changes.

        Bypasses `__setattr__` and notifies the table once, because this runs thousands of times a
        second.
        """
        put = object.__setattr__
        put(self, "last_heard", now)
        put(self, "queued", queued)
        put(self, "up_bytes_per_second", up_bytes_per_second)
        measured = (
            flops_per_second != self.flops_per_second
            or uplink_flops_per_second != self.uplink_flops_per_second
        )
        put(self, "flops_per_second", flops_per_second)
        put(self, "uplink_flops_per_second", uplink_flops_per_second)
        put(self, "microbatches_per_second", microbatches_per_second)
        table, record = self.table, self.record
        if table is None:
            return
        if measured:
            table.rate_changed(self)
        if record is not None and not rates_alike(
            record.microbatches_per_second, microbatches_per_second
        ):
            table.record_changed(self)


@dataclass(frozen=True, slots=True)
class StagePeers:
    """The peers that hold a stage at the run's version, in the order of their arrival."""

    ready: tuple[PeerState, ...]
    """All of them, leaving ones included."""
    working: tuple[PeerState, ...]
    """Peers that may get new microbatches: a leaving one only if all of them leave, a paused one
    never."""
    trainers: tuple[PeerState, ...]


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """The computing rates that a stage can count on.

    Of peers that hold it or are on their way to it, without those that leave or pause.
    """

    peers: int
    measured: int
    """Number of these peers that have reported a rate."""
    flops_per_second: float
    """Sum of the reported rates."""


class PeerTable(dict[PeerId, PeerState]):
    """Peers by ID, with indices. Changed only through `[]=`, `del` and `clear`."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.syncing: dict[PeerId, PeerState] = {}
        """Peers that have a stage and download its state."""
        self.unsourced: dict[PeerId, PeerState] = {}
        """Syncing peers that have not been sent a source."""
        self.movers: dict[PeerId, PeerState] = {}
        self.leavers: dict[PeerId, PeerState] = {}
        self.with_carrier: dict[PeerId, PeerState] = {}
        self.losses = 0
        """Number of stage holders lost since the start."""
        self.awaiting_roster: dict[PeerId, PeerState] = {}
        """Peers that have not been sent a roster yet; cleared by the sender of the roster."""
        self.records: dict[StageIndex, tuple[PeerRecord, ...]] = {}
        """Roster records of each stage's ready peers, while they are valid."""
        self._by_stage: dict[StageIndex, dict[PeerId, PeerState]] = {}
        self._bound_for: dict[StageIndex, dict[PeerId, PeerState]] = {}
        self._stages = tuple(StageIndex(stage) for stage in range(stages))
        self._views: dict[StageIndex, StagePeers] = {}
        self._unheld: set[StageIndex] = set()
        self._idle: set[StageIndex] = set()
        self._stale_stages: set[StageIndex] = set(self._stages)
        """Stages whose peers have changed since `_unheld` and `_idle` were computed."""
        self._capacities: dict[StageIndex, StageCapacity] = {}
        self._version = NO_VERSION
        self._carriers: dict[str, set[PeerId]] = {}
        """Members by the ID of their p2pd. The ID is not verified, so several members may claim
        one."""
        self._carrier_of: dict[PeerId, str] = {}

    # ---- questions

    def view(self, stage: StageIndex, version: Version) -> StagePeers:
        self._invalidate_for(version)
        found = self._views.get(stage)
        if found is None:
            found = self._views[stage] = self._compute_view(stage, version)
        return found

    def unheld(self, version: Version) -> set[StageIndex]:
        """Stages without a holder at the version. The caller must not change the set."""
        self._refresh_unheld(version)
        return self._unheld

    def idle(self, version: Version) -> set[StageIndex]:
        """Stages without a working peer at the version. The caller must not change the set."""
        self._refresh_unheld(version)
        return self._idle

    def _refresh_unheld(self, version: Version) -> None:
        self._invalidate_for(version)
        for stage in self._stale_stages:
            view = self.view(stage, version)
            for stages, lacking in ((self._unheld, not view.ready), (self._idle, not view.working)):
                if lacking:
                    stages.add(stage)
                else:
                    stages.discard(stage)
        self._stale_stages.clear()

    def _invalidate_for(self, version: Version) -> None:
        if version != self._version:
            self._version = version
            self._views.clear()
            self.records.clear()
            self._stale_stages.update(self._stages)

    def _compute_view(self, stage: StageIndex, version: Version) -> StagePeers:
        ready = tuple(
            peer
            for peer in self._by_stage.get(stage, {}).values()
            if peer.phase is PeerPhase.READY and peer.version == version
        )
        active = tuple(peer for peer in ready if not peer.paused)
        staying = tuple(peer for peer in active if not peer.leaving)
        return StagePeers(ready, staying or active, tuple(p for p in staying if p.trainer))

    def capacity(self, stage: StageIndex) -> StageCapacity:
        found = self._capacities.get(stage)
        if found is None:
            counted = [p for p in self.bound_for(stage) if not p.leaving and not p.paused]
            rates = [
                min(p.flops_per_second, p.uplink_flops_per_second)
                for p in counted
                if p.flops_per_second > 0
            ]
            found = self._capacities[stage] = StageCapacity(len(counted), len(rates), sum(rates))
        return found

    def bound_for(self, stage: StageIndex) -> Iterable[PeerState]:
        """Peers that hold or download the stage; a moving peer counts only at its destination."""
        return self._bound_for.get(stage, {}).values()

    def at(self, stage: StageIndex) -> Iterable[PeerState]:
        """Peers that hold or download the stage; a moving peer counts where it still is."""
        return self._by_stage.get(stage, {}).values()

    def admits(self, peer: PeerId) -> bool:
        """Whether the ID is that of a member, or of a member's p2pd."""
        return peer in self or peer in self._carriers

    # ---- changes

    def __setitem__(self, key: PeerId, peer: PeerState) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, peer)
        self.awaiting_roster[key] = peer
        peer.table = self
        self.index(peer)

    def __delitem__(self, key: PeerId) -> None:
        peer = self[key]
        super().__delitem__(key)
        self.losses += peer.stage is not None
        self.unindex(peer)
        peer.table = None
        for some in (
            self.syncing, self.unsourced, self.movers, self.leavers, self.with_carrier,
            self.awaiting_roster,
        ):  # fmt: skip
            some.pop(key, None)
        self._index_carrier(key, None)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def index(self, peer: PeerState) -> None:
        """Update the indices for a new or changed peer."""
        moving, stage = peer.moving, peer.stage
        goes_to = stage if moving is None else moving.stage
        if stage is not None:
            self._views.pop(stage, None)
            self.records.pop(stage, None)
            self._stale_stages.add(stage)
            self._by_stage.setdefault(stage, {})[peer.peer] = peer
        if goes_to is not None:
            self._capacities.pop(goes_to, None)
            self._bound_for.setdefault(goes_to, {})[peer.peer] = peer
        syncing = peer.phase is PeerPhase.SYNCING
        _update_index(self.syncing, peer, syncing)
        _update_index(self.unsourced, peer, syncing and not peer.source_assigned)
        _update_index(self.movers, peer, moving is not None)
        _update_index(self.leavers, peer, peer.leaving)
        _update_index(self.with_carrier, peer, peer.carrier is not None)
        self._index_carrier(peer.peer, None if peer.carrier is None else peer.carrier.peer)

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

    def unindex(self, peer: PeerState) -> None:
        """Remove a peer from the indices by stage, before it is removed or changes stage."""
        moving, stage = peer.moving, peer.stage
        goes_to = stage if moving is None else moving.stage
        if stage is not None:
            self._views.pop(stage, None)
            self.records.pop(stage, None)
            self._stale_stages.add(stage)
            self._by_stage[stage].pop(peer.peer)
        if goes_to is not None:
            self._capacities.pop(goes_to, None)
            self._bound_for[goes_to].pop(peer.peer)

    def record_changed(self, peer: PeerState) -> None:
        """Invalidate the published records of the peer's stage."""
        if peer.stage is not None:
            self.records.pop(peer.stage, None)

    def rate_changed(self, peer: PeerState) -> None:
        """Invalidate the capacity of the stage that the peer counts at."""
        goes_to = peer.stage if peer.moving is None else peer.moving.stage
        if goes_to is not None:
            self._capacities.pop(goes_to, None)


def _update_index(those: dict[PeerId, PeerState], peer: PeerState, belongs: bool) -> None:
    if belongs:
        those[peer.peer] = peer
    else:
        those.pop(peer.peer, None)
