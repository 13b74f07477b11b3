"""How long closing and applying a step take, and what the members say when.

The all-reduce of a group is a reduce-scatter and an all-gather: what a member sends and receives
follows from how much of the gradient it sums, and the group waits for its slowest line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm_coordinator.simulator.volunteer import SimulatedVolunteer
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Applied, Apply, Close, Reduction, RoundReport
from swarm_shared.scheduling.placement import round_seconds

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

RECONCILE_SECONDS = 0.2
"""Checking what was counted, the copy that is averaged, the norm."""

MEMORY_BYTES_PER_SECOND = 50e9
"""Applying a step reads and writes parameters, gradient and moments once."""
APPLY_BYTES_PER_PARAMETER = 28
APPLY_SECONDS = 0.1
"""The rest of it, and the fingerprint."""

LATENCIES_PER_ALL_REDUCE = 4
"""Latencies in a row: both halves of the all-reduce, each with a hello and its answer."""


_Group = tuple[int, StageIndex, StageIndex | None]
"""Who is done at the same time: the attempt, the stage, and the one that is gone over to."""


class AllReduceTimes:
    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._reports: dict[_Group, list[SimulatedVolunteer]] = {}
        self._applies: dict[tuple[int, StageIndex], list[tuple[SimulatedVolunteer, bool]]] = {}
        self._switching: dict[PeerId, int] = {}
        """Who goes over to its next stage with which attempt."""
        self.aborted = 0

    def close(self, volunteer: SimulatedVolunteer, message: Close) -> None:
        assert volunteer.stage is not None
        prepared = volunteer.prepared if message.moving else None
        if message.moving and prepared is None:
            self._swarm.event_heap.later(
                RECONCILE_SECONDS,
                lambda: volunteer.send(
                    RoundReport(
                        step=message.step, attempt=message.attempt, ok=False,
                        reason="nothing is prepared",
                    )
                ),
            )  # fmt: skip
            return
        if prepared is not None:
            self._switching[volunteer.peer] = message.attempt
        key = (message.attempt, volunteer.stage, prepared)
        waiting = self._reports.get(key)
        if waiting is not None:
            waiting.append(volunteer)
            return
        self._reports[key] = [volunteer]
        seconds = self._seconds(message.reductions, volunteer.stage)
        if prepared is not None:
            seconds = max(seconds, self._seconds(message.moving, prepared))
        self._swarm.event_heap.later(
            RECONCILE_SECONDS + seconds, lambda: self._report(message, key)
        )

    def _seconds(self, reductions: Sequence[Reduction], stage: StageIndex) -> float:
        return sum(self._reduce_seconds(reduction, stage) for reduction in reductions)

    def _reduce_seconds(self, reduction: Reduction, stage: StageIndex) -> float:
        swarm = self._swarm
        there = swarm.volunteers
        weights = reduction.weights or (1,) * len(reduction.members)
        lines = [
            (there[peer].hardware, weight)
            for peer, weight in zip(reduction.members, weights, strict=True)
            if peer in there
        ]
        if len(lines) < 2:
            return 0.0
        size = swarm.sizes[stage].gradient_bytes
        if reduction.part == "tied":
            size = swarm.table_bytes
        rates = [min(line.up_bytes_per_second, line.down_bytes_per_second) for line, _ in lines]
        total = sum(weights)
        latency = 2 * max(line.latency_seconds for line, _ in lines)
        shares = [weight / total for _, weight in lines]
        return round_seconds(size, rates, shares) + LATENCIES_PER_ALL_REDUCE * latency

    def _report(self, close: Close, key: _Group) -> None:
        report = RoundReport(step=close.step, attempt=close.attempt, ok=True, own_squared=1.0)
        for volunteer in self._reports.get(key, ()):
            if key not in self._reports:
                return  # a report before this one has ended it
            volunteer.send(report)
        self._reports.pop(key, None)

    def abort(self, volunteer: SimulatedVolunteer, attempt: int) -> None:
        """Of one round: the others of that attempt go on."""
        ended = [k for k in self._reports if k[:2] == (attempt, volunteer.stage)]
        for key in ended:
            del self._reports[key]
        self.aborted += any(prepared is None for _, _, prepared in ended)

    def apply(self, volunteer: SimulatedVolunteer, message: Apply) -> None:
        """Members of a stage are done at the same time; one event says so for all of them."""
        stage = volunteer.stage
        if stage is None:
            return
        switches = self._switching.pop(volunteer.peer, None) == message.attempt
        goes_to = volunteer.prepared if switches and volunteer.prepared is not None else stage
        key = (int(message.step), goes_to)
        waiting = self._applies.get(key)
        if waiting is not None:
            waiting.append((volunteer, switches))
            return
        self._applies[key] = [(volunteer, switches)]
        size = self._swarm.sizes[goes_to].parameters * APPLY_BYTES_PER_PARAMETER
        self._swarm.event_heap.later(
            APPLY_SECONDS + size / MEMORY_BYTES_PER_SECOND, lambda: self._applied(message, key)
        )

    def _applied(self, message: Apply, key: tuple[int, StageIndex]) -> None:
        applied = Applied(step=message.step, digest="", norm=1.0)
        for volunteer, switches in self._applies.pop(key):
            if volunteer.alive:
                volunteer.apply(message.step, switches=switches)
                volunteer.send(applied)
