"""The run's peers, and what is asked about them at every event, kept as they change.

Part of the pure core. Thousands of peers send several words a second each, and after each of them
the rules ask who holds which stage, who downloads, who wants to leave. A scan of all peers for
each of these questions would cost milliseconds per word, so a peer tells the table it is in when
one of the fields changes that the answers depend on: nobody has to remember to.
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
    ADMITTED = "admitted"
    """Has a certificate and no stage yet."""
    SYNCING = "syncing"
    """Has a stage and not yet its state."""
    READY = "ready"
    """Holds its stage at the run's version."""


_STAGE_FIELDS = frozenset({"stage", "moving"})
_INDEXED_FIELDS = frozenset({"phase", "version", "leaving", "paused", "source_assigned", "carrier"})
"""Fields of a peer that its table answers questions about, besides its place and rate."""

_RECORD_FIELDS = frozenset(
    {"stage", "addresses", "certificate", "carrier", "reachability", "offers_relay"}
)
"""Fields of a peer that others are told of, besides its rate and whether it leaves."""


_RATE_FIELDS = frozenset({"flops_per_second", "uplink_flops_per_second"})

RATE_TOLERANCE = 0.1
"""Others are told of a peer's rate again when it has changed by more than this share."""


def rates_alike(told: float, rate: float) -> bool:
    return abs(told - rate) <= RATE_TOLERANCE * rate


@dataclass(slots=True)
class PeerState:
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
    """From the newest rate of computing that it has measured, at whatever stage; 0 until there is
    one."""
    up_bytes_per_second: float = math.inf
    """What its line takes; without an end until the line has held it up."""
    uplink_flops_per_second: float = math.inf
    """That as microbatches of the stage where it was told, times the stage's work."""
    queued: int = 0
    leaving: bool = False
    leaving_since: float = 0.0
    paused: bool = False
    """It gets no new work for now, and closes steps with the others."""
    close_delayed_until: float = 0.0
    """While it downloads, the close of the step waits for it until then."""
    close_delays: int = 0
    source_assigned: bool = False
    """Whether the peer has been told where to get its state from."""
    ask_not_before: float = 0.0
    """A source that failed is not named again sooner."""
    asked_at: float = 0.0
    """When it was told where to get its state from."""
    download_bytes_per_second: float = 0.0
    """As it was when it last got a stage's state; 0 until then."""
    missed_apply: Step | None = None
    """The step it has averaged and still has to apply, since it missed the word to do so."""
    delivered_at: float = -math.inf
    """When the last microbatch that it drives was found done in every stage."""
    early_receipts: dict[tuple[Step, MicrobatchIndex], Receipt] = field(default_factory=dict)
    """Told after a restart of the coordinator, before the step that they belong to began."""
    matched_majority: bool = False
    """Its parameters were once equal, to the bit, to those of most replicas of its stage."""
    moving: StageMove | None = None
    reported_microbatches_per_second: float = 0.0
    """What it computes, as it said last; a heartbeat says it again only when it has changed."""
    last_heartbeat: LastHeartbeat = field(default_factory=LastHeartbeat)
    record: PeerRecord | None = field(default=None, repr=False, compare=False)
    """As it was published last, unless something in it has changed since."""
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
        """All that a heartbeat changes of it, thousands of times a second: past the look at each
        field by itself, and the table hears of the whole once."""
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
    """Who holds a stage at the run's version, in the order in which they came to it."""

    ready: tuple[PeerState, ...]
    """Leaving ones included."""
    working: tuple[PeerState, ...]
    """Those that may get new microbatches: a leaving one only if all of them leave, a paused one
    never."""
    trainers: tuple[PeerState, ...]


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """Who is to be counted on at a stage: those on their way to it as well, who leaves or pauses
    not."""

    peers: int
    measured: int
    """How many of them have told a rate."""
    flops_per_second: float
    """Of these together."""


class PeerTable(dict[PeerId, PeerState]):
    """Peers by their ID. Only `[]=`, `del` and `clear` change it."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.syncing: dict[PeerId, PeerState] = {}
        """They have a stage and download its state."""
        self.unsourced: dict[PeerId, PeerState] = {}
        """Those of them that have not been told where from."""
        self.movers: dict[PeerId, PeerState] = {}
        self.leavers: dict[PeerId, PeerState] = {}
        self.with_carrier: dict[PeerId, PeerState] = {}
        self.losses = 0
        """How many have gone, ever, that held a stage."""
        self.awaiting_roster: dict[PeerId, PeerState] = {}
        """They have got no roster yet; whoever sends one says so here."""
        self.records: dict[StageIndex, tuple[PeerRecord, ...]] = {}
        """What is to be said of each stage's ready peers, for as long as it is true."""
        self._by_stage: dict[StageIndex, dict[PeerId, PeerState]] = {}
        self._bound_for: dict[StageIndex, dict[PeerId, PeerState]] = {}
        self._stages = tuple(StageIndex(stage) for stage in range(stages))
        self._views: dict[StageIndex, StagePeers] = {}
        self._unheld: set[StageIndex] = set()
        self._idle: set[StageIndex] = set()
        self._stale_stages: set[StageIndex] = set(self._stages)
        """Stages whose peers have changed since `_unheld` and `_idle` were true of them."""
        self._capacities: dict[StageIndex, StageCapacity] = {}
        self._version = NO_VERSION
        self._carriers: dict[str, set[PeerId]] = {}
        """Whose p2pd has this ID. Nobody proves that it is theirs: there may be several."""
        self._carrier_of: dict[PeerId, str] = {}

    # ---- questions

    def view(self, stage: StageIndex, version: Version) -> StagePeers:
        self._invalidate_for(version)
        found = self._views.get(stage)
        if found is None:
            found = self._views[stage] = self._compute_view(stage, version)
        return found

    def unheld(self, version: Version) -> set[StageIndex]:
        """Stages that nobody holds at the version. Not to be changed by the caller."""
        self._refresh_unheld(version)
        return self._unheld

    def idle(self, version: Version) -> set[StageIndex]:
        """Stages that nobody holds at the version who works. Not to be changed by the caller."""
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
        """Those that hold the stage or download it, and that will: who moves counts there only."""
        return self._bound_for.get(stage, {}).values()

    def at(self, stage: StageIndex) -> Iterable[PeerState]:
        """Those that hold the stage or download it; who moves counts where it still is."""
        return self._by_stage.get(stage, {}).values()

    def admits(self, peer: PeerId) -> bool:
        """Whether it is a member, by its own ID or by that of its p2pd."""
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
        """A peer has come, or has changed."""
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
        """A peer goes, or is about to go to another stage."""
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
        """Something else is to be said of a peer."""
        if peer.stage is not None:
            self.records.pop(peer.stage, None)

    def rate_changed(self, peer: PeerState) -> None:
        """A peer has told another rate."""
        goes_to = peer.stage if peer.moving is None else peer.moving.stage
        if goes_to is not None:
            self._capacities.pop(goes_to, None)


def _update_index(those: dict[PeerId, PeerState], peer: PeerState, belongs: bool) -> None:
    if belongs:
        those[peer.peer] = peer
    else:
        those.pop(peer.peer, None)
