"""A simulated volunteer: the client's side of the control protocol, on the virtual clock.

It owns the answers to the coordinator, which are the real messages, and their timing; computing
belongs to the data plane, averaging to `all_reduce_time`. Downloads are limited by its own downlink
and by its sources' uplinks, of which each source gives at most half, because the other half carries
activations.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from swarm_coordinator.core.events import (
    Event,
    HeartbeatsReceived,
    MessageReceived,
    PeerAttached,
    PeerHeartbeat,
    SessionNumber,
)
from swarm_coordinator.core.state.moves import RebalancingSettings
from swarm_coordinator.simulator.event_heap import EventHeap
from swarm_coordinator.simulator.fleet import MEGABIT_BYTES, Hardware
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.types import PeerId, RunId, StageIndex, Version
from swarm_shared.protocol import (
    AssignStage,
    ClientMessage,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Mask,
    Ready,
    Roster,
    SaveSnapshot,
    SnapshotReady,
    StageRequest,
    Welcome,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.scheduling.placement.stage_sizes import StageSizes

CONNECT_SECONDS = 2.0
"""Seconds for connecting, the handshake and a first measurement of the links."""

LOAD_SECONDS = 3.0
"""Seconds from a file on disk to a stage on the device; the same for a fresh start."""

DISK_BYTES_PER_SECOND = 200e6
"""Rate of writing and hashing a snapshot."""

SHARED_UPLINK_FRACTION = 0.5
"""Fraction of an uplink that serves state to other peers."""

SNAPSHOT_SHA256 = "0" * 64


class DownloadTimes(Protocol):
    """How long state takes from its sources, over shared uplinks."""

    def begin(self, volunteer: SimulatedVolunteer, message: AssignStage) -> float: ...
    def end(self, message: AssignStage) -> None: ...


class CandidateMeter(Protocol):
    """What the swarm's throughput is compared with; it counts who could take part."""

    def add_candidate(self, volunteer: SimulatedVolunteer) -> None: ...


class DataPlane(Protocol):
    """The path of leased microbatches."""

    TICK_SECONDS: ClassVar[float]
    """Interval of the coordinator's ticks at this level, in seconds."""
    FOLLOWS_ROSTERS: ClassVar[bool]
    """Whether this level depends on each peer's own roster."""
    completed: int
    """Number of completed microbatches, repeated ones included."""

    def __init__(self, swarm: SwarmView) -> None: ...

    def serves(self, volunteer: SimulatedVolunteer) -> None: ...
    def changed(self, volunteer: SimulatedVolunteer) -> None: ...
    def step_changed(self, volunteer: SimulatedVolunteer) -> None: ...
    def stops(self, volunteer: SimulatedVolunteer) -> None: ...
    def leaving(self, volunteer: SimulatedVolunteer) -> None: ...
    def roster(self, volunteer: SimulatedVolunteer, roster: Roster) -> None: ...
    def mask(self, volunteer: SimulatedVolunteer, message: Mask) -> None: ...
    def lease(self, volunteer: SimulatedVolunteer, lease: Lease) -> None: ...
    def queued(self, volunteer: SimulatedVolunteer) -> int: ...


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """Assumptions besides the fleet and the trace."""

    moves: RebalancingSettings = field(default_factory=RebalancingSettings)
    tick_seconds: float = 1.0
    heartbeat_seconds: float = 30.0
    """Seconds between two reports of a volunteer's rate; that it is alive is reported
    separately."""
    measurement_noise: float = 0.03
    """Standard deviation of the logarithm of a measured rate."""
    wanted_stages: Mapping[str, int] = field(default_factory=dict)
    """Stages chosen by volunteers, by name; all others take the most under-served one."""
    coordinator_up_bytes_per_second: float = 1000 * MEGABIT_BYTES
    coordinator_latency_seconds: float = 0.005


class SwarmView(Protocol):
    """The part of the simulated swarm that volunteers, data planes and meters use."""

    event_heap: EventHeap
    rng: random.Random
    options: SwarmOptions
    manifest: Manifest
    works: list[float]
    """Floating-point operations of a microbatch, per stage."""
    sizes: tuple[StageSizes, ...]
    table_bytes: int
    coordinator: PeerId
    mean_latency_seconds: float
    heartbeat_seconds: float
    volunteers: dict[PeerId, SimulatedVolunteer]

    @property
    def plane(self) -> DataPlane: ...
    @property
    def downloads(self) -> DownloadTimes: ...
    @property
    def meter(self) -> CandidateMeter: ...
    def deliver(self, event: Event) -> None: ...
    def attached(self, volunteer: SimulatedVolunteer) -> None: ...
    def gone(self, volunteer: SimulatedVolunteer) -> None: ...
    def serves(self, volunteer: SimulatedVolunteer) -> None: ...
    def stops(self, volunteer: SimulatedVolunteer) -> None: ...
    def changed(self, volunteer: SimulatedVolunteer) -> None: ...
    def takes_part(self, volunteer: SimulatedVolunteer) -> bool: ...


class SimulatedVolunteer:
    """One machine, from joining to leaving."""

    def __init__(self, swarm: SwarmView, name: str, hardware: Hardware, session: int) -> None:
        self.peer = PeerId(name)
        self.hardware = hardware
        self.session = SessionNumber(session)
        self.alive = True
        self.attached = False
        self.leaving = False
        self.stage: StageIndex | None = None
        """The stage that it serves."""
        self.version = Version(0)
        self.prepared: StageIndex | None = None
        """The stage that it holds in addition, at the same version."""
        self.uploads = 0
        """Number of downloads that it currently serves."""
        self.noise = 1.0
        self._measured_up = 0.0
        self._swarm = swarm
        self._assignment: AssignStage | None = None

    @property
    def assignment(self) -> AssignStage | None:
        """The assignment that it currently downloads, or starts fresh with."""
        return self._assignment

    # ---- rates

    def rate_at(self, stage: StageIndex) -> float:
        """Microbatches per second at a stage: the slowest of computing, sending and receiving."""
        return self.steady_rate_at(stage, SHARED_UPLINK_FRACTION if self.uploads else 1.0)

    def steady_rate_at(self, stage: StageIndex, uplink: float = 1.0) -> float:
        work, hardware = self._swarm.works[stage], self.hardware
        sizes = self._swarm.sizes[stage]
        seconds = max(
            work / hardware.flops_per_second,
            sizes.sent_bytes / (uplink * hardware.up_bytes_per_second),
            sizes.received_bytes / hardware.down_bytes_per_second,
        )
        return 1.0 / seconds

    def uplink_seconds(self, stage: StageIndex) -> float:
        """Reported seconds of its uplink per microbatch; 0 until the uplink has been the limit."""
        return self._swarm.sizes[stage].sent_bytes / self._measured_up if self._measured_up else 0.0

    def _uplink_is_limit(self, stage: StageIndex) -> bool:
        sending = self._swarm.sizes[stage].sent_bytes / self.hardware.up_bytes_per_second
        return (
            self.uploads > 0 or sending > self._swarm.works[stage] / self.hardware.flops_per_second
        )

    # ---- joining and leaving

    def connect(self) -> None:
        self._later(CONNECT_SECONDS + 3 * self._round_trip(), self._attach)

    def _attach(self) -> None:
        hello = Hello(
            run=RunId("simulated"), software="simulator", addresses=(),
            device=self.hardware.kind, memory_bytes=self.hardware.memory_bytes,
            name=self.peer, wanted_stage=self._swarm.options.wanted_stages.get(self.peer),
        )  # fmt: skip
        self.attached = True
        self._swarm.attached(self)
        largest = max(size.state_bytes for size in self._swarm.sizes)
        seconds = LOAD_SECONDS + largest / self.hardware.down_bytes_per_second
        self._later(seconds, lambda: self._swarm.meter.add_candidate(self))
        self._swarm.deliver(PeerAttached(self.session, self.peer, hello, "", (), None))

    def disconnect(self) -> None:
        self._drop_assignment()
        self.alive = False

    def leave(self) -> None:
        """Announce that it leaves, and go when the coordinator agrees."""
        if not self.attached:
            self._swarm.gone(self)
            return
        self.leaving = True
        self._swarm.plane.leaving(self)
        self.send(Leaving())

    def send_heartbeat(self) -> None:
        """Report the measured rate and the queue length."""
        if not self.alive:
            return
        swarm = self._swarm
        if self.attached:
            rate = up = 0.0
            if self.stage is not None:
                noise = swarm.options.measurement_noise
                self.noise = swarm.rng.lognormvariate(0.0, noise)
                rate = self.hardware.flops_per_second / swarm.works[self.stage] * self.noise
                if self._uplink_is_limit(self.stage):
                    # Like the client, it measures its uplink only while the uplink is the limit.
                    self._measured_up = (
                        self.hardware.up_bytes_per_second * swarm.rng.lognormvariate(0.0, noise)
                    )
                up = self._measured_up
            queued = swarm.plane.queued(self)
            self.send(
                Heartbeat(microbatches_per_second=rate, queued=queued, up_bytes_per_second=up)
            )
        self._later(swarm.heartbeat_seconds, self.send_heartbeat)

    # ---- messages of the coordinator

    def welcomed(self, message: Welcome) -> None:
        try:
            stage = most_underserved_stage(message.stages, self.hardware.memory_bytes)
        except CapacityError:
            stage = StageIndex(0)  # the coordinator refuses it with the reason
        self._later(self._round_trip(), lambda: self.send(StageRequest(stage=stage)))

    def assigned(self, message: AssignStage) -> None:
        """Download a stage, in place of the held one or beside it."""
        if not message.prepare:
            self._swarm.stops(self)
            self.stage = None
        self.prepared = None
        self._drop_assignment()
        self._assignment = message
        seconds = LOAD_SECONDS
        if message.source == "snapshot":
            seconds += self._swarm.downloads.begin(self, message)
        self._later(seconds, lambda: self._download_finished(message))

    def _drop_assignment(self) -> None:
        """Release the sources of a finished or abandoned download."""
        if self._assignment is not None:
            self._swarm.downloads.end(self._assignment)
        self._assignment = None

    def _download_finished(self, message: AssignStage) -> None:
        if self._assignment is not message:
            return
        self._drop_assignment()
        if message.prepare:
            if self.version == message.version:
                self.prepared = message.stage
        else:
            self.stage, self.version = message.stage, message.version
        self.send(Ready(stage=message.stage, version=message.version, digest=""))
        if not message.prepare and self._swarm.takes_part(self):
            self._swarm.serves(self)

    def save(self, message: SaveSnapshot) -> None:
        size = self._swarm.sizes[message.stage].state_bytes
        item = f"snapshot/{message.version}/{message.stage}"
        ready = SnapshotReady(
            version=message.version,
            stage=message.stage,
            item=item,
            bytes=size,
            sha256=SNAPSHOT_SHA256,
        )
        self._later(size / DISK_BYTES_PER_SECOND + self._round_trip(), lambda: self.send(ready))

    def apply(self, step: int, *, switches: bool) -> None:
        """Apply a step: switch to the prepared stage, or discard it as outdated."""
        if switches and self.prepared is not None:
            self._swarm.stops(self)
            self.stage, self.version = self.prepared, Version(step)
            self._swarm.serves(self)
        self.version = Version(step)
        self.prepared = None
        if self._assignment is not None and self._assignment.prepare:
            self._drop_assignment()
        self._swarm.plane.step_changed(self)

    # ---- sending

    def send(self, message: ClientMessage) -> None:
        if isinstance(message, Heartbeat):
            self.deliver(HeartbeatsReceived((PeerHeartbeat(self.session, self.peer, message),)))
        else:
            self.deliver(MessageReceived(self.session, self.peer, message))

    def deliver(self, event: Event) -> None:
        if self.alive and self.attached:
            self._swarm.deliver(event)

    def _round_trip(self) -> float:
        return 2 * (self.hardware.latency_seconds + self._swarm.options.coordinator_latency_seconds)

    def _later(self, seconds: float, action: object) -> None:
        self._swarm.event_heap.later(seconds, lambda: self.alive and action())  # type: ignore[operator]
