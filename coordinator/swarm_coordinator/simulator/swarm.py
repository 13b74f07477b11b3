"""The simulated swarm: the coordinator's core in a simulated shell, and its volunteers."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from swarm_coordinator.core.events import (
    AppliedStep,
    Broadcast,
    CheckpointFailed,
    CheckpointStored,
    CloseSession,
    Command,
    Event,
    FetchSnapshot,
    Note,
    Persist,
    Remember,
    Restored,
    RolledBack,
    Send,
    SessionLost,
    ShutDown,
    StoredStage,
    Tick,
    VerdictRecord,
)
from swarm_coordinator.core.transition import begin, transition
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_coordinator.simulator.all_reduce_time import AllReduceTimes
from swarm_coordinator.simulator.audits import AuditLog
from swarm_coordinator.simulator.downloads import Downloads
from swarm_coordinator.simulator.efficiency import EfficiencyMeter
from swarm_coordinator.simulator.event_heap import EventHeap
from swarm_coordinator.simulator.fleet import Hardware
from swarm_coordinator.simulator.trace import TraceEvent
from swarm_coordinator.simulator.volunteer import (
    COORDINATOR_LATENCY_SECONDS,
    COORDINATOR_UP_BYTES_PER_SECOND,
    DataPlane,
    SimulatedVolunteer,
    SwarmOptions,
)
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import (
    AbortRound,
    CoordinatorMessage,
    Lease,
    PeerRecord,
    Refused,
    Roster,
    RosterChange,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

COORDINATOR = PeerId("the coordinator")
LAST_HEARD_INTERVAL_SECONDS = 2.0
"""Seconds between updates of when the living peers were last heard, in place of their
heartbeats."""
NEVER_ENDING_STEPS = 2**31


class Swarm:
    """A simulated run: construct it with a trace, then call `simulate`."""

    def __init__(
        self,
        manifest: Manifest,
        fleet: Sequence[Hardware],
        trace: Sequence[TraceEvent],
        options: SwarmOptions,
        seed: int,
        plane: type[DataPlane],
    ) -> None:
        self.event_heap = EventHeap()
        self.rng = random.Random(f"{seed} swarm")
        self.options = options
        self.seed = seed
        self.manifest = endless(manifest)
        self.sizes = stage_sizes(manifest)
        self.table_bytes = 4 * manifest.model.vocabulary_size * manifest.model.hidden_size
        self.coordinator = COORDINATOR
        self.mean_latency_seconds = sum(h.latency_seconds for h in fleet) / len(fleet)
        self.heartbeat_seconds = max(options.heartbeat_seconds, len(fleet) / 100)
        self.volunteers: dict[PeerId, SimulatedVolunteer] = {}
        self.audit_log = AuditLog()
        self.counts: Counter[str] = Counter()
        self.events = 0
        self.applied: list[AppliedStep] = []
        self.stopped = False
        self._silent: set[PeerId] = set()
        """Peers that no longer send heartbeats."""
        self._fleet = fleet
        self._machines: dict[str, Hardware] = {}
        self._sessions = itertools.count(1)
        self._fetched: dict[Version, dict[StageIndex, StoredStage]] = {}
        self.meter = EfficiencyMeter(self, self._cost_shares())
        self.averages = AllReduceTimes(self)
        self.downloads = Downloads(self)
        self.plane = plane(self)
        self.run = begin(
            self.manifest,
            "",
            PeerRecord(
                peer=COORDINATOR, stage=StageIndex(0), addresses=(), certificate="",
                microbatches_per_second=0.0,
            ),
            Restored(1, Version(0), None, None, False, None),
            self.event_heap.now,
            moves=options.moves,
            audits=_audit_book(options.audits, self.rng),
        )  # fmt: skip
        for change in trace:
            self.event_heap.at(change.seconds, partial(self._apply_trace_event, change))
        self.event_heap.later(self.plane.TICK_SECONDS, self._tick)
        self.event_heap.later(LAST_HEARD_INTERVAL_SECONDS, self._refresh_last_heard)

    def _cost_shares(self) -> list[float]:
        """Fraction of the fleet's time per stage: nearly the best weights for the bound."""
        typical = sorted(self._fleet, key=lambda one: one.flops_per_second)[len(self._fleet) // 2]
        probe = SimulatedVolunteer(self, "", typical, 0)
        seconds = [
            1 / probe.steady_rate_at(StageIndex(s)) for s in range(self.manifest.stage_count)
        ]
        return [one / sum(seconds) for one in seconds]

    def simulate(self, hours: float) -> None:
        self.event_heap.run_until(3600 * hours, lambda: self.stopped)

    # ---- volunteers

    def _apply_trace_event(self, change: TraceEvent) -> None:
        self.counts[change.kind] += 1
        peer = PeerId(change.name)
        present = self.volunteers.get(peer)
        if change.kind == "join":
            if present is not None:
                self._lost(present)  # it returns before its loss was detected
            self._join(change.name)
        elif present is not None and change.kind == "leave":
            present.leave()
        elif present is not None:
            self._crash(present)

    def _join(self, name: str) -> None:
        machine = self._machines.get(name)
        if machine is None:
            machine = self._fleet[len(self._machines) % len(self._fleet)]
            self._machines[name] = machine
        volunteer = SimulatedVolunteer(self, name, machine, next(self._sessions))
        self.volunteers[volunteer.peer] = volunteer
        volunteer.connect()
        self.event_heap.later(
            self.rng.uniform(0, self.heartbeat_seconds) + 10.0, volunteer.send_heartbeat
        )

    def rejoin(self, volunteer: SimulatedVolunteer) -> None:
        """End a volunteer's session after what it does now; it attaches anew."""
        self.counts["rejoin"] += 1

        def end() -> None:
            if self.volunteers.get(volunteer.peer) is volunteer:
                self._closed(volunteer)
                self._join(volunteer.peer)

        self.event_heap.later(0.0, end)

    def _crash(self, volunteer: SimulatedVolunteer) -> None:
        """Lose a volunteer without notice; the coordinator detects it by the missing heartbeats."""
        self._silent.add(volunteer.peer)
        self.meter.gone(volunteer)
        self.plane.stops(volunteer)
        volunteer.disconnect()

    def _lost(self, volunteer: SimulatedVolunteer) -> None:
        """Remove a volunteer whose loss the coordinator has detected."""
        if self.volunteers.get(volunteer.peer) is volunteer:
            del self.volunteers[volunteer.peer]
        if volunteer.alive:
            self._crash(volunteer)

    def gone(self, volunteer: SimulatedVolunteer) -> None:
        """Remove a volunteer that never took part, or leaves with the coordinator's consent."""
        self.meter.gone(volunteer)
        self.plane.stops(volunteer)
        volunteer.disconnect()
        if self.volunteers.get(volunteer.peer) is volunteer:
            del self.volunteers[volunteer.peer]

    def attached(self, volunteer: SimulatedVolunteer) -> None:
        """Start its heartbeats; those of its earlier session no longer count."""
        self._silent.discard(volunteer.peer)

    def takes_part(self, volunteer: SimulatedVolunteer) -> bool:
        """Whether the coordinator counts it as a holder of its stage at this version."""
        peer = self.run.peers.get(volunteer.peer)
        return (
            peer is not None
            and peer.stage == volunteer.stage
            and self.run.peers.holds_current(peer)
        )

    def serves(self, volunteer: SimulatedVolunteer) -> None:
        self.plane.serves(volunteer)
        self.meter.serves(volunteer)

    def stops(self, volunteer: SimulatedVolunteer) -> None:
        self.plane.stops(volunteer)
        self.meter.stops(volunteer)

    # ---- the coordinator's shell

    def _tick(self) -> None:
        self.deliver(Tick())
        self.event_heap.later(self.plane.TICK_SECONDS, self._tick)

    def _refresh_last_heard(self) -> None:
        now, silent = self.event_heap.now, self._silent
        for peer_id, peer in self.run.peers.items():
            if peer_id not in silent:
                peer.last_heard = now
        self.event_heap.later(LAST_HEARD_INTERVAL_SECONDS, self._refresh_last_heard)

    def deliver(self, event: Event) -> None:
        if self.stopped:
            return
        self.events += 1
        for command in transition(self.run, event, self.event_heap.now):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Send):
            self._send(command.peer, command.message)
        elif isinstance(command, Broadcast):
            self._broadcast(command)
        elif isinstance(command, Persist):
            if isinstance(command.record, AppliedStep):
                self.applied.append(command.record)
            elif isinstance(command.record, RolledBack):
                self.counts["roll-back"] += 1
            elif isinstance(command.record, VerdictRecord):
                self.audit_log.judged(command.record)
        elif isinstance(command, Note | Remember):
            pass
        elif isinstance(command, CloseSession):
            closed = self.volunteers.get(command.peer)
            if closed is not None:
                self.event_heap.later(0.0, lambda: self._closed(closed))
        elif isinstance(command, FetchSnapshot):
            self._fetch(command)
        elif isinstance(command, ShutDown):
            self.stopped = True

    def _broadcast(self, command: Broadcast) -> None:
        """Deliver a roster change, as the whole roster, or a message of the close."""
        message = command.message
        if isinstance(message, RosterChange):
            if not self.plane.FOLLOWS_ROSTERS:
                return
            assert self.run.roster.published is not None
            message = self.run.roster.published
        self.counts["abort"] += isinstance(message, AbortRound)
        for peer in command.peers:
            self._send(peer, message)

    def _send(self, peer: PeerId, message: CoordinatorMessage) -> None:
        volunteer = self.volunteers.get(peer)
        # A message to an earlier session is lost.
        if volunteer is None or not (volunteer.alive and volunteer.attached):
            return
        if isinstance(message, Roster) and not self.plane.FOLLOWS_ROSTERS:
            return
        if isinstance(message, Lease):
            self.meter.start()
        self.counts["refused"] += isinstance(message, Refused)
        latency = volunteer.hardware.latency_seconds + COORDINATOR_LATENCY_SECONDS
        self.event_heap.later(latency, partial(volunteer.receive, message))

    def _closed(self, volunteer: SimulatedVolunteer) -> None:
        if volunteer.alive:
            self.gone(volunteer)
        else:
            self._lost(volunteer)
        self.deliver(SessionLost(volunteer.session, volunteer.peer))

    def _fetch(self, command: FetchSnapshot) -> None:
        """Fetch one stage of a checkpoint into the organiser's folder over its holders' uplinks."""
        found = [self.volunteers.get(PeerId(holder.peer)) for holder in command.holders]
        uplinks = [holder.hardware.up_bytes_per_second for holder in found if holder is not None]
        if not uplinks:
            self.event_heap.later(
                1.0, lambda: self.deliver(CheckpointFailed(command.version, "its holders are gone"))
            )
            return
        seconds = command.bytes / min(sum(uplinks) / 2, COORDINATOR_UP_BYTES_PER_SECOND)
        item = f"checkpoint/{command.version}/{command.stage}"
        stored = StoredStage(command.stage, item, command.bytes, command.sha256)
        self.event_heap.later(seconds, lambda: self._stored(command.version, stored))

    def _stored(self, version: Version, stored: StoredStage) -> None:
        files = self._fetched.setdefault(version, {})
        files[stored.stage] = stored
        if len(files) == self.manifest.stage_count:
            del self._fetched[version]
            stages = tuple(file for _, file in sorted(files.items()))
            self.deliver(CheckpointStored(version, stages))


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Run the garbage collector rarely: millions of objects live as long as the simulation, and
    scanning them repeatedly takes as long as the rest of it."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 20, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def endless(manifest: Manifest) -> Manifest:
    """The same run without an end, an evaluation or staleness."""
    training = manifest.training.model_copy(
        update={"steps": NEVER_ENDING_STEPS, "evaluation_microbatches": 0, "staleness": 0}
    )
    return manifest.model_copy(update={"training": training})


def _audit_book(settings: AuditSettings | None, rng: random.Random) -> AuditBook | None:
    """The audits of a simulated run. Sums are not simulated, and so not checked."""
    if settings is None:
        return None
    return AuditBook(replace(settings, check_sums=False), rng.random)
