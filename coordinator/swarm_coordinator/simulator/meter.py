"""What the run makes, against what the same machines could make in the best places."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm_coordinator.simulator.volunteer import Volunteer
from swarm_shared.types import PeerId, StageIndex

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

EXACT_MACHINES = 300
"""Above this the best placement is taken to be the fluid one, which is within a percent of it."""


def best_rate(machines: Sequence[Volunteer], memory_bytes: Sequence[int]) -> float:
    """The best pipeline rate over all placements, as far as a greedy search finds it.

    Fastest first, each to the thinnest stage that it fits. For like machines that is the optimum.
    """
    stages = len(memory_bytes)
    thinnest = [(0.0, stage) for stage in range(stages)]
    for machine in sorted(machines, key=lambda m: (-m.hardware.flops_per_second, m.peer)):
        passed: list[tuple[float, int]] = []
        while thinnest and memory_bytes[thinnest[0][1]] > machine.hardware.memory_bytes:
            passed.append(heapq.heappop(thinnest))
        if thinnest:
            rate, stage = thinnest[0]
            gained = rate + machine.steady_rate_at(StageIndex(stage))
            heapq.heapreplace(thinnest, (gained, stage))
        for entry in passed:
            heapq.heappush(thinnest, entry)
    return thinnest[0][0]


class Meter:
    """Integrates both rates over the time in which the run trains."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        stages = len(swarm.works)
        self._memory = [stage.memory_bytes for stage in swarm.manifest.stages]
        self._serving: dict[PeerId, Volunteer] = {}
        self._holders: dict[PeerId, Volunteer] = {}
        self._rates = [0.0] * stages
        self._since: float | None = None
        self._rate = self._best = 0.0
        self.made = self.possible = 0.0
        """Microbatches."""
        self.standstill_seconds = 0.0
        self.seconds = 0.0
        self.series: list[tuple[float, float, float]] = []
        """(seconds, rate, best rate), at every change."""

    def start(self) -> None:
        """Training begins."""
        if self._since is None:
            self._since = self._swarm.agenda.now
            self.update()

    def serves(self, volunteer: Volunteer) -> None:
        self._holders[volunteer.peer] = volunteer
        self._serving[volunteer.peer] = volunteer
        self.update()

    def stops(self, volunteer: Volunteer) -> None:
        """It serves nothing for now, but could: it is on its way to another stage."""
        if self._serving.pop(volunteer.peer, None) is not None:
            self.update()

    def gone(self, volunteer: Volunteer) -> None:
        known = self._serving.pop(volunteer.peer, None), self._holders.pop(volunteer.peer, None)
        if any(known):
            self.update()

    def update(self) -> None:
        """Account for the time until now, and see what is so from now on."""
        now = self._swarm.agenda.now
        if self._since is None:
            return
        elapsed, self._since = now - self._since, now
        self.seconds += elapsed
        self.made += elapsed * self._rate
        self.possible += elapsed * self._best
        if self._rate <= 0:
            self.standstill_seconds += elapsed
        rates = [0.0] * len(self._rates)
        for volunteer in self._serving.values():
            if volunteer.stage is not None:
                rates[volunteer.stage] += volunteer.steady_rate_at(volunteer.stage)
        self._rates = rates
        self._rate = min(rates)
        self._best = max(self._rate, self._best_rate())
        self.series.append((now, self._rate, self._best))

    def _best_rate(self) -> float:
        machines = list(self._holders.values())
        if len(machines) <= EXACT_MACHINES:
            return best_rate(machines, self._memory)
        flops = sum(machine.hardware.flops_per_second for machine in machines)
        return flops / sum(self._swarm.works)
