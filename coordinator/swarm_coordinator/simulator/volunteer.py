"""A simulated volunteer: the client's side of the control protocol, on the virtual clock.

It drives the rules of a real volunteer (`swarm_shared.volunteer_rules`): a stage is taken, moved
and given up by `stage_tenure`, a step closed by `step_close`. Modelled is the time: of loading
here, of closing in `close_times`, of computing in the data plane. Downloads are limited by its own
downlink and by its sources' uplinks, of which each source gives at most half, because the other
half carries activations. A volunteer that has to attach again begins anew, without the stage that
it held.
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
from swarm_coordinator.simulator.loaded_stage import LoadedStage, ReceiptForm, load_stage
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.types import MicrobatchIndex, PeerId, RunId, StageIndex
from swarm_shared.protocol import (
    AbortRound,
    Apply,
    AssignStage,
    ClientMessage,
    Close,
    CoordinatorMessage,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Mask,
    Roster,
    SaveSnapshot,
    StageRequest,
    Welcome,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.scheduling.placement.stage_sizes import StageSizes
from swarm_shared.volunteer_rules.stage_tenure import (
    EndTenure,
    Install,
    Load,
    PreparedLost,
    PreparedReady,
    Reload,
    Send,
    StageTenures,
    StartTenure,
    TenureNumber,
)
from swarm_shared.volunteer_rules.step_close import CloseOrder

CONNECT_SECONDS = 2.0
"""Seconds for connecting, the handshake and a first measurement of the links."""

LOAD_SECONDS = 3.0
"""Seconds from a file on disk to a stage on the device; the same for a fresh start."""

SHARED_UPLINK_FRACTION = 0.5
"""Fraction of an uplink that serves state to other peers."""


class DownloadTimes(Protocol):
    """How long state takes from its sources, over shared uplinks."""

    def begin(self, volunteer: SimulatedVolunteer, message: AssignStage) -> float: ...
    def end(self, message: AssignStage) -> None: ...


class CloseWork(Protocol):
    """How long the work of a step close takes."""

    def carry_out(self, volunteer: SimulatedVolunteer, held: LoadedStage) -> None: ...


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
    def accumulated(self, held: LoadedStage) -> tuple[MicrobatchIndex, ...]: ...


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
    receipt_form: ReceiptForm
    coordinator: PeerId
    mean_latency_seconds: float
    heartbeat_seconds: float
    volunteers: dict[PeerId, SimulatedVolunteer]

    @property
    def plane(self) -> DataPlane: ...
    @property
    def closes(self) -> CloseWork: ...
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
    def rejoin(self, volunteer: SimulatedVolunteer) -> None: ...


class SimulatedVolunteer:
    """One machine, from joining to leaving."""

    def __init__(self, swarm: SwarmView, name: str, hardware: Hardware, session: int) -> None:
        self.peer = PeerId(name)
        self.hardware = hardware
        self.session = SessionNumber(session)
        self.alive = True
        self.attached = False
        self.leaving = False
        self.held: LoadedStage | None = None
        """The stage that it serves."""
        self.prepared: LoadedStage | None = None
        """The stage that it has loaded in addition, for a move."""
        self.uploads = 0
        """Number of downloads that it currently serves."""
        self.noise = 1.0
        self._measured_up = 0.0
        self._swarm = swarm
        self._tenures = StageTenures()
        self._loading: dict[TenureNumber, AssignStage] = {}
        self._loaded: dict[TenureNumber, LoadedStage] = {}

    @property
    def stage(self) -> StageIndex | None:
        return None if self.held is None else self.held.account.stage

    @property
    def loading(self) -> tuple[AssignStage, ...]:
        """The assignments that it is loading."""
        return tuple(self._loading.values())

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
        self._swarm.deliver(PeerAttached(self.session, self.peer, hello, "", ()))

    def disconnect(self) -> None:
        self.alive = False
        self._tenures.drop()
        self._carry_out_tenures()

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
            stage = self.stage
            if stage is not None:
                noise = swarm.options.measurement_noise
                self.noise = swarm.rng.lognormvariate(0.0, noise)
                rate = self.hardware.flops_per_second / swarm.works[stage] * self.noise
                if self._uplink_is_limit(stage):
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

    def receive(self, message: CoordinatorMessage) -> None:
        if not self.alive:
            return
        swarm = self._swarm
        match message:
            case Close() | Apply() | AbortRound() | SaveSnapshot():
                self._order(message)
            case Roster():
                swarm.plane.roster(self, message)
            case Lease():
                swarm.plane.lease(self, message)
            case Mask():
                swarm.plane.mask(self, message)
            case AssignStage():
                self._tenures.assigned(message)
                self._carry_out_tenures()
            case Welcome():
                self._welcomed(message)

    def _welcomed(self, message: Welcome) -> None:
        try:
            stage = most_underserved_stage(message.stages, self.hardware.memory_bytes)
        except CapacityError:
            stage = StageIndex(0)  # the coordinator refuses it with the reason
        self._later(self._round_trip(), lambda: self.send(StageRequest(stage=stage)))

    def _order(self, message: CloseOrder) -> None:
        held = self.held
        if held is not None:
            if isinstance(message, Close):
                held.committed = message.committed
            held.close.order(message)
            self._swarm.closes.carry_out(self, held)

    # ---- tenures of stages

    def step_applied(self) -> None:
        self._tenures.step_applied()
        self._swarm.plane.step_changed(self)

    def drop_outdated(self) -> None:
        """Give up the prepared stage: a step was applied without it."""
        self._tenures.prepared_outdated()
        self._carry_out_tenures()

    def switch_to_prepared(self) -> None:
        self._tenures.switched()
        self._carry_out_tenures()

    def _carry_out_tenures(self) -> None:
        while actions := self._tenures.take_actions():
            for action in actions:
                match action:
                    case StartTenure(load) | Reload(load):
                        self._load(load)
                    case EndTenure(tenure):
                        self._end(tenure)
                        self._tenures.ended(tenure)
                    case Install(tenure, switched):
                        self._install(self._loaded[tenure], switched=switched)
                    case PreparedReady(tenure):
                        self._prepare(self._loaded[tenure])
                    case PreparedLost():
                        self._prepare(None)
                    case Send(message):
                        self.send(message)
                    case _:
                        pass  # it keeps no snapshots, and its workers do not die alone

    def _load(self, load: Load) -> None:
        """Download a stage and load it."""
        tenure, assignment = load.tenure, load.assignment
        self._end(tenure)
        self._loading[tenure] = assignment
        seconds = LOAD_SECONDS
        if assignment.source == "snapshot":
            seconds += self._swarm.downloads.begin(self, assignment)

        def loaded() -> None:
            if self._loading.get(tenure) is assignment:
                self._end(tenure)
                staleness = self._swarm.manifest.training.staleness
                stage = load_stage(assignment, staleness, self._swarm.receipt_form, self.peer)
                self._loaded[tenure] = stage
                self._tenures.loaded(load, "")
                self._carry_out_tenures()
                # The coordinator may have answered that the version is outdated.
                if self.held is stage and self._swarm.takes_part(self):
                    self._swarm.serves(self)

        self._later(seconds, loaded)

    def _end(self, tenure: TenureNumber) -> None:
        """Release what is loaded or being loaded."""
        assignment, loaded = self._loading.pop(tenure, None), self._loaded.pop(tenure, None)
        if assignment is not None:
            self._swarm.downloads.end(assignment)
        if loaded is not None and loaded is self.held:
            self._swarm.stops(self)
            self.held = None

    def _install(self, loaded: LoadedStage, *, switched: bool) -> None:
        if switched:
            self._swarm.stops(self)
            self.prepared = None
        self.held = loaded
        if switched:
            self._swarm.serves(self)

    def _prepare(self, loaded: LoadedStage | None) -> None:
        self.prepared, held = loaded, self.held
        if held is None:
            return
        if loaded is None:
            held.close.prepared_lost()
        else:
            held.close.stage_prepared(loaded.account)
        self._swarm.closes.carry_out(self, held)

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
