"""A simulated volunteer: the client's side of the control protocol, on the virtual clock.

It drives the rules of a real volunteer: those of its stages in `stage_holder`, those of its
microbatches in the fine data plane. Modelled is the time: of loading and applying here, of
averaging in `all_reduce_time`, of computing in the data plane. Downloads are limited by its own
downlink and by its sources' uplinks, of which each source gives at most half, because the other
half carries activations. A volunteer that has to attach again begins anew, without the stage that
it held.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from swarm_coordinator.core.events import (
    Event,
    HeartbeatsReceived,
    MessageReceived,
    PeerAttached,
    PeerHeartbeat,
    SessionNumber,
)
from swarm_coordinator.core.state.moves import RebalancingSettings
from swarm_coordinator.core.trust.audits import AuditSettings
from swarm_coordinator.simulator.audits import variant_of
from swarm_coordinator.simulator.fleet import MEGABIT_BYTES, Hardware
from swarm_coordinator.simulator.stage_holder import LoadedStage, StageHolder, first_request
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import (
    AbortRound,
    Apply,
    AssignStage,
    Audit,
    ClientMessage,
    Close,
    CoordinatorMessage,
    Drop,
    Dropped,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Mask,
    Roster,
    SaveSnapshot,
    Welcome,
)
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.step_close import ApplyStep, Reduce, SaveState, Uncommit, Work

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

CONNECT_SECONDS = 2.0
"""Seconds for connecting, the handshake and a first measurement of the links."""

LOAD_SECONDS = 3.0
"""Seconds from a file on disk to a stage on the device; the same for a fresh start."""

SHARED_UPLINK_FRACTION = 0.5
"""Fraction of an uplink that serves state to other peers."""

RECONCILE_SECONDS = 0.2
"""Seconds for copying the gradient and for the norm of the result, with the first all-reduce of a
lane; the same for the removal of microbatches."""

MEMORY_BYTES_PER_SECOND = 50e9
"""Memory bandwidth; applying a step reads and writes parameters, gradient and moments once."""
APPLY_BYTES_PER_PARAMETER = 28
"""Bytes read and written per parameter by an apply."""
APPLY_SECONDS = 0.1
"""Seconds for the rest of an apply, the fingerprint included."""

DISK_BYTES_PER_SECOND = 200e6
"""Rate of writing and hashing a snapshot."""


MEASUREMENT_NOISE = 0.03
"""Standard deviation of the logarithm of a measured rate."""

COORDINATOR_UP_BYTES_PER_SECOND = 1000 * MEGABIT_BYTES
COORDINATOR_LATENCY_SECONDS = 0.005


class DataPlane(Protocol):
    """The path of leased microbatches."""

    TICK_SECONDS: ClassVar[float]
    """Interval of the coordinator's ticks at this level, in seconds."""
    FOLLOWS_ROSTERS: ClassVar[bool]
    """Whether this level depends on each peer's own roster."""

    def __init__(self, swarm: Swarm) -> None: ...

    def serves(self, volunteer: SimulatedVolunteer) -> None: ...
    def changed(self, volunteer: SimulatedVolunteer) -> None: ...
    def step_changed(self, volunteer: SimulatedVolunteer) -> None: ...
    def stops(self, volunteer: SimulatedVolunteer) -> None: ...
    def leaving(self, volunteer: SimulatedVolunteer) -> None: ...
    def roster(self, volunteer: SimulatedVolunteer, roster: Roster) -> None: ...
    def mask(self, volunteer: SimulatedVolunteer, message: Mask) -> None: ...
    def lease(self, volunteer: SimulatedVolunteer, lease: Lease) -> None: ...
    def heartbeat(self, volunteer: SimulatedVolunteer, rate: float, up: float) -> Heartbeat: ...
    def closing(self, held: LoadedStage[Receipt], close: Close) -> None: ...
    def audit(self, volunteer: SimulatedVolunteer, order: Audit) -> None: ...


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """Assumptions besides the fleet and the trace."""

    moves: RebalancingSettings = field(default_factory=RebalancingSettings)
    heartbeat_seconds: float = 30.0
    """Seconds between two reports of a volunteer's rate; that it is alive is reported
    separately."""
    wanted_stages: Mapping[str, int] = field(default_factory=dict)
    """Stages chosen by volunteers, by name; all others take the most under-served one."""
    audits: AuditSettings | None = None
    """Settings of audits, which only the fine level simulates; None: no cell is drawn."""
    routing: Callable[[random.Random, int], StageRouting] = StageRouting
    """Makes the routing table of one sender, at the fine level."""


class SimulatedVolunteer(StageHolder[Receipt]):
    """One machine, from joining to leaving."""

    def __init__(self, swarm: Swarm, name: str, hardware: Hardware, session: int) -> None:
        super().__init__(PeerId(name), RunId("simulated"), swarm.manifest, swarm.sizes)
        self.hardware = hardware
        self.session = SessionNumber(session)
        self.alive = True
        self.attached = False
        self.leaving = False
        self.uploads = 0
        """Number of downloads that it currently serves."""
        self._measured_up = 0.0
        self._swarm = swarm

    # ---- rates

    def rate_at(self, stage: StageIndex) -> float:
        """Microbatches per second at a stage: the slowest of computing, sending and receiving."""
        return self.steady_rate_at(stage, SHARED_UPLINK_FRACTION if self.uploads else 1.0)

    def steady_rate_at(self, stage: StageIndex, uplink: float = 1.0) -> float:
        swarm = self._swarm
        return self.hardware.rate_at(swarm.manifest.stages[stage], swarm.sizes[stage], uplink)

    def computing_seconds(self, stage: StageIndex) -> float:
        swarm = self._swarm
        return self.hardware.computing_seconds(swarm.manifest.stages[stage], swarm.sizes[stage])

    def uplink_seconds(self, stage: StageIndex) -> float:
        """Reported seconds of its uplink per microbatch; 0 until the uplink has been the limit."""
        return self._swarm.sizes[stage].sent_bytes / self._measured_up if self._measured_up else 0.0

    def _uplink_is_limit(self, stage: StageIndex) -> bool:
        sending = self._swarm.sizes[stage].sent_bytes / self.hardware.up_bytes_per_second
        return self.uploads > 0 or sending > self.computing_seconds(stage)

    # ---- joining and leaving

    def connect(self) -> None:
        self.later(CONNECT_SECONDS + 3 * self._round_trip(), self._attach)

    def _attach(self) -> None:
        hello = Hello(
            run=RunId("simulated"), software="simulator", addresses=(),
            device=self.hardware.kind, memory=self.hardware.memory,
            name=self.peer, wanted_stage=self._swarm.options.wanted_stages.get(self.peer),
        )  # fmt: skip
        self.attached = True
        self._swarm.attached(self)
        largest = max(size.state_bytes for size in self._swarm.sizes)
        seconds = LOAD_SECONDS + largest / self.hardware.down_bytes_per_second
        self.later(seconds, lambda: self._swarm.meter.add_candidate(self))
        self._swarm.deliver(PeerAttached(self.session, self.peer, hello, "", (), None))

    def disconnect(self) -> None:
        self.alive = False
        self.drop_stages()

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
        swarm, stage = self._swarm, self.stage
        if self.attached:
            rate = up = 0.0
            if stage is not None:
                rate = 1 / self.computing_seconds(stage)
                rate *= swarm.rng.lognormvariate(0.0, MEASUREMENT_NOISE)
                if self._uplink_is_limit(stage):
                    # Like the client, it measures its uplink only while the uplink is the limit.
                    noise = swarm.rng.lognormvariate(0.0, MEASUREMENT_NOISE)
                    self._measured_up = self.hardware.up_bytes_per_second * noise
                up = self._measured_up
            self.send(swarm.plane.heartbeat(self, rate, up))
        self.later(swarm.heartbeat_seconds, self.send_heartbeat)

    # ---- messages of the coordinator

    def receive(self, message: CoordinatorMessage) -> None:
        if not self.alive:
            return
        swarm = self._swarm
        match message:
            case Close() | Apply() | AbortRound() | SaveSnapshot():
                if isinstance(message, Close) and self.held is not None:
                    swarm.plane.closing(self.held, message)
                self.ordered(message)
            case Roster():
                swarm.plane.roster(self, message)
            case Lease():
                swarm.plane.lease(self, message)
            case Mask():
                swarm.plane.mask(self, message)
            case AssignStage():
                self.assigned(message)
            case Audit():
                swarm.plane.audit(self, message)
            case Drop():
                self._take_out(message)
            case Welcome():
                work = self._swarm.sizes[0].streamed
                request = first_request(message, self.hardware.memory, work, self._measured_up)
                self.later(self._round_trip(), lambda: self.send(request))

    # ---- its stages, as `stage_holder` asks

    def sign(self, receipt: Receipt) -> Receipt:
        self._swarm.audit_log.sign(self.peer, self.hardware, receipt.step, receipt.microbatch)
        return receipt

    def transcript(self, stage: StageIndex, step: Step, microbatch: MicrobatchIndex) -> Transcript:
        variant = variant_of(self.peer, self.hardware, step, microbatch)
        return simulated_transcript(step, microbatch, stage, self._last_stage, variant)

    def _take_out(self, message: Drop) -> None:
        """Take microbatches out of the accumulator, and report it."""
        held = self.held
        if held is not None and held.account.stage == message.stage:
            held.account.removed(message.step, message.microbatches)
            if held.account.works_on(message.step):
                held.accumulated.remove(m for m in message.microbatches if m in held.accumulated)
        self.send(
            Dropped(step=message.step, stage=message.stage, microbatches=message.microbatches)
        )

    def begin_load(self, assignment: AssignStage) -> float:
        if assignment.source != "snapshot":
            return LOAD_SECONDS
        return LOAD_SECONDS + self._swarm.downloads.begin(self, assignment)

    def end_load(self, assignment: AssignStage) -> None:
        self._swarm.downloads.end(assignment)

    def work_seconds(self, work: Work, stage: StageIndex) -> float:
        sizes = self._swarm.sizes[stage]
        match work:
            case ApplyStep():
                size = sizes.parameters * APPLY_BYTES_PER_PARAMETER
                return APPLY_SECONDS + size / MEMORY_BYTES_PER_SECOND
            case SaveState():
                return sizes.state_bytes / DISK_BYTES_PER_SECOND
            case Uncommit():
                return RECONCILE_SECONDS
            case _:
                return 0.0

    def average(self, held: LoadedStage[Receipt], stage: StageIndex, work: Reduce) -> None:
        self._swarm.averages.join(self, held, stage, work)

    def serves(self, *, switched: bool) -> None:
        # The coordinator may have answered that the version is outdated.
        if switched or self._swarm.takes_part(self):
            self._swarm.serves(self)

    def stops(self) -> None:
        self._swarm.stops(self)

    def step_applied(self) -> None:
        self._swarm.plane.step_changed(self)

    def rejoin(self) -> None:
        self._swarm.rejoin(self)

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
        return 2 * (self.hardware.latency_seconds + COORDINATOR_LATENCY_SECONDS)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._swarm.event_heap.later(seconds, lambda: self.alive and action())
