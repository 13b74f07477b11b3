"""One attached peer, as the coordinator knows it.

Values only. Every index of `swarm_coordinator.core.state.peer_table.PeerTable` depends on some of
these fields, so that the table alone assigns `phase`, `stage`, `version`, `transfer`, `contact`,
`certificate`, `leaving` and `paused`; tests/coordinator/core/test_architecture.py checks that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from swarm_coordinator.core.events import SessionNumber
from swarm_coordinator.core.state.utilisation import LastHeartbeat
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import AddressUpdate, Hello, PeerRecord
from swarm_shared.scheduling.placement.loads import StageLoad

NO_VERSION = Version(0)

LEAST_RATE_TOLERANCE, MOST_RATE_TOLERANCE = 0.02, 0.1
"""Bounds of `rate_tolerance`. A rate that is published 5 % too high ends each step 5 % late."""
PEERS_OF_LEAST_TOLERANCE = 100

GREAT_RATE_RATIO = 2.0
"""Ratio of a rate to the published one, or of the published one to the rate, beyond which the
stage's records are made anew within the step. Smaller changes wait until its peers change or the
next step begins, because each new rate changes the plan by which they share the microbatches."""


def rate_tolerance(peers: int) -> float:
    """Return the relative change of a peer's rate that is not published when its stage's records
    are made anew. It grows with the number of peers, each of which receives every record."""
    tolerance = LEAST_RATE_TOLERANCE * peers / PEERS_OF_LEAST_TOLERANCE
    return min(max(tolerance, LEAST_RATE_TOLERANCE), MOST_RATE_TOLERANCE)


class PeerPhase(StrEnum):
    """How far a peer has come to holding its stage."""

    ADMITTED = "admitted"
    """Has a certificate and no stage yet."""
    SYNCING = "syncing"
    """Has a stage, but not its state yet."""
    READY = "ready"
    """Holds its stage at the run's version."""


@dataclass(frozen=True, slots=True)
class PeerProfile:
    """What a peer's Hello states for its whole session."""

    name: str | None
    device: str
    memory: MemoryOffer
    wanted_stage: StageIndex | None
    owner: PeerId | None
    """The key that the peer's work counts for, if it has proven one."""
    binding: str = ""
    """The signed proof that the peer belongs to the owner, in base64; empty without an owner."""

    @classmethod
    def of(cls, hello: Hello, owner: PeerId | None) -> PeerProfile:
        """The profile that a Hello states; `owner` is the one that its binding proves."""
        return cls(
            hello.name, hello.device, hello.memory, hello.wanted_stage, owner,
            hello.owner or "" if owner is not None else "",
        )  # fmt: skip


@dataclass(slots=True)
class PeerRates:
    """What a peer can do, by its reports."""

    microbatches_per_second: float = 0.0
    flops_per_second: float = 0.0
    """Moving average of the computing rates that the peer has measured, at any stage; 0 without
    one."""
    up_bytes_per_second: float = math.inf
    """Measured capacity of its uplink; infinite until the uplink has been the limit."""
    uplink_flops_per_second: float = math.inf
    """The uplink's capacity in microbatches of the stage where it was reported, times the stage's
    work."""
    download_bytes_per_second: float = 0.0
    """Rate of its last download of a stage's state; 0 without one."""
    reported_microbatches_per_second: float = 0.0
    """Its last reported computing rate; heartbeats repeat it only when it has changed."""
    queued: int = 0
    counted: int = 0
    """Microbatches that it counted for its stage in the last step."""

    def expected_at(self, stage: StageLoad) -> float:
        """Return the microbatches per second at a stage that follow from the rates measured at any
        stage; 0 without a measured rate. Heartbeats and placement compute the same inline, because
        they run thousands of times a second."""
        sent = self.up_bytes_per_second / stage.sent_bytes if stage.sent_bytes else math.inf
        return min(self.flops_per_second / stage.work_flops, sent)


@dataclass(slots=True)
class StageTransfer:
    """One peer's download of a stage's state: its first, the same stage's anew, or the next one's.

    A moving peer has a transfer beside the stage that it serves; any other peer is SYNCING
    meanwhile.
    """

    stage: StageIndex
    begun_at: float = 0.0
    version: Version = NO_VERSION
    """The version of the state that the peer was instructed to download."""
    source_assigned: bool = False
    """Whether the peer has been sent the source of the state."""
    ask_not_before: float = 0.0
    """Earliest time for the next source after a failed one."""
    asked_at: float = 0.0
    """When the peer was sent the source of the state."""
    sources: tuple[PeerId, ...] = ()
    """The holders that the peer was sent as sources; empty if the source is the coordinator."""
    close_delays: int = 0
    """Number of closes that the transfer may have delayed."""
    close_delayed_until: float = 0.0
    """The time until which the transfer delays the close of the step at most."""
    missed_apply: Step | None = None
    """The step that leads to the state: the peer has averaged it and missed the Apply."""
    release_first: bool = False
    """Whether a mover lacks memory for both stages: it releases the old one between two steps, then
    downloads."""
    partner: PeerId | None = None
    """The peer that moves the other way in the same close."""
    ready: bool = False
    """Whether a mover holds the new stage at `version`, beside the old one that it serves."""

    def awaits(self, version: Version) -> bool:
        """Whether a message about a download of this version answers the latest assignment."""
        return (
            self.source_assigned
            and not self.ready
            and self.missed_apply is None
            and self.version == version
        )


@dataclass(slots=True)
class PeerState:
    """What the coordinator stores of one attached peer."""

    peer: PeerId
    session: SessionNumber
    profile: PeerProfile
    contact: AddressUpdate
    """The addresses at which other peers reach it."""
    certificate: str
    last_heard: float
    phase: PeerPhase = PeerPhase.ADMITTED
    stage: StageIndex | None = None
    version: Version = NO_VERSION
    """The version of the stage's state that the peer holds."""
    transfer: StageTransfer | None = None
    """The transfer of the state that the peer is about to hold: of its own stage while it syncs, or
    of the stage that it moves to."""
    leaving: bool = False
    leaving_since: float = 0.0
    budget_spent: bool = False
    """Whether its budget of held seconds was spent at the last charge."""
    paused: bool = False
    """Whether the peer gets no new work for now; it closes steps with the other members."""
    rates: PeerRates = field(default_factory=PeerRates)
    arithmetic: str = ""
    """The class of arithmetic that the peer claims, which is only shown; empty before it has
    one."""
    last_heartbeat: LastHeartbeat = field(default_factory=LastHeartbeat)
    delivered_at: float = -math.inf
    """When the last microbatch that it drives was found committed in every stage."""
    early_receipts: dict[tuple[Step, MicrobatchIndex], Receipt] = field(default_factory=dict)
    """Receipts reported after a restart of the coordinator, before their step began."""
    matched_majority: bool = False
    """Whether its parameters have once been bitwise equal to those of most replicas of its
    stage."""
    claimed_digest: str | None = None
    """Digest of the state that the peer claims to hold, while the fingerprint of its stage at this
    version is not known."""
    record: PeerRecord | None = field(default=None, repr=False, compare=False)
    """Its published roster record; None after a change of one of its fields."""

    @property
    def moving(self) -> StageTransfer | None:
        """The peer's transfer to another stage, while it serves the one that it holds."""
        return self.transfer if self.phase is PeerPhase.READY else None

    @property
    def goes_to(self) -> StageIndex | None:
        """The stage to which the peer moves, or else the one that it holds or downloads."""
        return self.stage if self.transfer is None else self.transfer.stage


def short(peer: PeerId) -> str:
    """The last eight characters of a peer ID, enough to distinguish the peers of a run."""
    return f"…{peer[-8:]}"


def display(peer: PeerState) -> str:
    """A peer's name and short ID, for texts."""
    name = peer.profile.name
    return f"{name} ({short(peer.peer)})" if name else short(peer.peer)


def owner_of(peer: PeerState) -> PeerId:
    """The owner of a peer: itself, unless it has shown another one's binding."""
    return peer.profile.owner or peer.peer
