"""The time that closing and applying a step take, and the members' reports about them.

The all-reduce of a group is a reduce-scatter and an all-gather: the traffic of a member follows
from the share of the gradient that it sums, and the group waits for its slowest link.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_coordinator.simulator.volunteer import SimulatedVolunteer, SwarmView
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Applied, Apply, Close, Reduction, RoundReport
from swarm_shared.scheduling.placement import round_seconds

RECONCILE_SECONDS = 0.2
"""Seconds for checking the commit set, copying the gradient, and the norm."""

MEMORY_BYTES_PER_SECOND = 50e9
"""Memory bandwidth; applying a step reads and writes parameters, gradient and moments once."""
APPLY_BYTES_PER_PARAMETER = 28
"""Bytes read and written per parameter by an apply."""
APPLY_SECONDS = 0.1
"""Seconds for the rest of an apply, the fingerprint included."""

LATENCIES_PER_ALL_REDUCE = 4
"""Consecutive latencies: both halves of the all-reduce, each with a hello and its answer."""


_Group = tuple[int, StageIndex, StageIndex | None]
"""Key of members that finish at the same time: attempt, stage, and the stage switched to."""


class AllReduceTimes:
    """Schedules the reports and applies of the members of every averaging round."""

    def __init__(self, swarm: SwarmView) -> None:
        self._swarm = swarm
        self._reports: dict[_Group, list[SimulatedVolunteer]] = {}
        self._applies: dict[tuple[int, StageIndex], list[tuple[SimulatedVolunteer, bool]]] = {}
        self._switching: dict[PeerId, int] = {}
        """The attempt with which each switching member changes stage."""
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

    def _report(self, close: Close, key: _Group) -> None:
        report = RoundReport(step=close.step, attempt=close.attempt, ok=True, own_squared=1.0)
        for volunteer in self._reports.get(key, ()):
            if key not in self._reports:
                return  # an earlier report of this loop has ended the round
            volunteer.send(report)
        self._reports.pop(key, None)

    def abort(self, volunteer: SimulatedVolunteer, attempt: int) -> None:
        """End one stage's round of an attempt; its other rounds go on."""
        ended = [k for k in self._reports if k[:2] == (attempt, volunteer.stage)]
        for key in ended:
            del self._reports[key]
        self.aborted += any(prepared is None for _, _, prepared in ended)

    def apply(self, volunteer: SimulatedVolunteer, message: Apply) -> None:
        """Schedule the apply; the members of a stage finish at the same time, in one event."""
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
