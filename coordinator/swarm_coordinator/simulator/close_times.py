"""The time that the work of a step close takes: preparing, averaging, applying, saving.

The rules (`swarm_shared.volunteer_rules.step_close`) decide what is done. The all-reduce of a group
begins with its last member and ends for all of them together. It is a reduce-scatter and an
all-gather: the traffic of a member follows from the share of the gradient that it sums, and the
group waits for its slowest link. With a member that is lost meanwhile it does not end: the
coordinator detects the loss and aborts the round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm_coordinator.simulator.loaded_stage import LoadedStage
from swarm_coordinator.simulator.volunteer import SimulatedVolunteer, SwarmView
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import Reduction, SaveSnapshot, SnapshotReady
from swarm_shared.scheduling.placement import round_seconds
from swarm_shared.volunteer_rules.step_close import (
    ApplyStep,
    CancelWork,
    ComputeNorm,
    DropPrepared,
    EmptyAccumulator,
    Lane,
    PrepareRound,
    Reduce,
    Rejoin,
    SaveState,
    Send,
    StepApplied,
    SwitchToPrepared,
    Uncommit,
    Work,
    WorkNumber,
)

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

LATENCIES_PER_ALL_REDUCE = 4
"""Consecutive latencies: both halves of the all-reduce, each with a hello and its answer."""

SNAPSHOT_SHA256 = "0" * 64


@dataclass(slots=True, eq=False)
class _Group:
    """The members of one all-reduce that have begun it."""

    attempt: int
    members: list[tuple[SimulatedVolunteer, LoadedStage, WorkNumber]] = field(default_factory=list)


class CloseTimes:
    """Carries out the decisions of all volunteers' step closes in virtual time."""

    def __init__(self, swarm: SwarmView) -> None:
        self._swarm = swarm
        self._forming: dict[StageIndex | None, _Group] = {}
        """The latest group of each stage, and of the tied part (None), until it is complete."""

    def carry_out(self, volunteer: SimulatedVolunteer, held: LoadedStage) -> None:
        """Carry out what the step close of the held stage has decided."""
        close, plane = held.close, self._swarm.plane
        while actions := close.take_actions():
            for action in actions:
                match action:
                    case PrepareRound(work, lane):
                        microbatches = plane.accumulated(held) if lane is Lane.HELD else ()
                        close.round_prepared(work, microbatches, finite=True)
                    case Reduce():
                        self._reduce(volunteer, held, action)
                    case ComputeNorm(work):
                        close.norm_computed(work, own_squared=1.0, tied_squared=0.0, finite=True)
                    case Send(message):
                        volunteer.send(message)
                    case StepApplied():
                        volunteer.step_applied()
                    case DropPrepared():
                        volunteer.drop_outdated()
                    case SwitchToPrepared():
                        volunteer.switch_to_prepared()
                    case Rejoin():
                        self._swarm.rejoin(volunteer)
                    case CancelWork():
                        pass  # its result will be ignored
                    case _:
                        self._begin(volunteer, held, action)

    def _begin(self, volunteer: SimulatedVolunteer, held: LoadedStage, work: Work) -> None:
        """Schedule the end of a volunteer's own work."""
        close, number = held.close, work.work
        match work:
            case Uncommit(microbatches=extra):

                def removed() -> None:
                    held.accumulated.remove(extra)
                    close.uncommitted(number, done=True)

                self._after(RECONCILE_SECONDS, volunteer, held, removed)
            case EmptyAccumulator():
                held.accumulated.clear()
                self._after(0.0, volunteer, held, lambda: close.emptied(number))
            case ApplyStep(lane=lane):
                loaded = self._stage_of(volunteer, held, lane)
                size = (
                    self._swarm.sizes[loaded.account.stage].parameters * APPLY_BYTES_PER_PARAMETER
                )

                def applied() -> None:
                    loaded.accumulated.clear()
                    close.applied(number, digest="", norm=1.0)

                seconds = APPLY_SECONDS + size / MEMORY_BYTES_PER_SECOND
                self._after(seconds, volunteer, held, applied)
            case SaveState(request=request):
                self._save(volunteer, held, number, request)

    def _save(
        self, volunteer: SimulatedVolunteer, held: LoadedStage, work: WorkNumber,
        request: SaveSnapshot,
    ) -> None:  # fmt: skip
        stage, version = held.account.stage, held.account.version
        if (request.stage, request.version) != (stage, version):
            reason = f"this peer holds stage {stage} at version {version}"
            self._after(0.0, volunteer, held, lambda: held.close.failed(work, reason))
            return
        size = self._swarm.sizes[stage].state_bytes
        ready = SnapshotReady(
            version=version, stage=stage, item=f"snapshot/{version}/{stage}", bytes=size,
            sha256=SNAPSHOT_SHA256,
        )  # fmt: skip
        seconds = size / DISK_BYTES_PER_SECOND
        self._after(seconds, volunteer, held, lambda: held.close.saved(work, ready))

    def _after(
        self, seconds: float, volunteer: SimulatedVolunteer, held: LoadedStage,
        report: Callable[[], None],
    ) -> None:  # fmt: skip
        """Report a result, unless the stage has ended meanwhile."""

        def finish() -> None:
            if volunteer.held is held:
                report()
                self.carry_out(volunteer, held)

        self._swarm.event_heap.later(seconds, finish)

    def _stage_of(
        self, volunteer: SimulatedVolunteer, held: LoadedStage, lane: Lane
    ) -> LoadedStage:
        if lane is Lane.HELD:
            return held
        if volunteer.prepared is None:
            raise RuntimeError("a step close works in a stage that is not prepared")
        return volunteer.prepared

    # ---- averaging

    def _reduce(self, volunteer: SimulatedVolunteer, held: LoadedStage, work: Reduce) -> None:
        reduction = work.reduction
        stage = self._stage_of(volunteer, held, work.lane).account.stage
        key = None if reduction.part == "tied" else stage
        group = self._forming.get(key)
        if group is None or group.attempt < work.attempt:
            group = self._forming[key] = _Group(work.attempt)
        if group.attempt > work.attempt:
            return  # the abort of this attempt is on its way
        group.members.append((volunteer, held, work.work))
        if len(group.members) == len(reduction.members):
            del self._forming[key]
            seconds = self._reduce_seconds(reduction, stage)
            if reduction.part == "own":
                seconds += RECONCILE_SECONDS
            self._swarm.event_heap.later(seconds, lambda: self._averaged(group))

    def _averaged(self, group: _Group) -> None:
        if all(volunteer.alive for volunteer, _, _ in group.members):
            for volunteer, held, work in group.members:
                if volunteer.held is held:
                    held.close.averaged(work)
                    self.carry_out(volunteer, held)

    def _reduce_seconds(self, reduction: Reduction, stage: StageIndex) -> float:
        swarm = self._swarm
        there = swarm.volunteers
        weights = reduction.weights or (1,) * len(reduction.members)
        links = [
            (there[peer].hardware, weight)
            for peer, weight in zip(reduction.members, weights, strict=True)
            if peer in there
        ]
        if len(links) < 2:
            return 0.0
        size = swarm.sizes[stage].gradient_bytes
        if reduction.part == "tied":
            size = swarm.table_bytes
        rates = [min(link.up_bytes_per_second, link.down_bytes_per_second) for link, _ in links]
        total = sum(weights)
        latency = 2 * max(link.latency_seconds for link, _ in links)
        shares = [weight / total for _, weight in links]
        return round_seconds(size, rates, shares) + LATENCIES_PER_ALL_REDUCE * latency
