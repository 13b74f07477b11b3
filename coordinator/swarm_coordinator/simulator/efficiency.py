"""The run's rate compared with the best placement of the same machines.

Two references, because the best placement is NP-hard to find. `best` is the rate that a greedy
search over placements reaches, so a possible one. `bound` is a rate that no placement exceeds. For
identical machines the first is the optimum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm_coordinator.simulator.fleet import Hardware
from swarm_coordinator.simulator.volunteer import SimulatedVolunteer
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.run.manifest import StageRange
from swarm_shared.scheduling.placement.stage_sizes import StageSizes

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

MAX_SEARCHED_MACHINES = 300
"""Number of machines up to which a placement is searched. Above it, `best` is the rate if every
machine divided itself among all stages, which is within a percent and cheap to maintain."""


def best_rate(
    machines: Sequence[Hardware], stages: Sequence[StageRange], sizes: Sequence[StageSizes]
) -> float:
    """The best pipeline rate over all placements that a greedy search finds; 0 if it leaves a stage
    without a machine.

    Fastest first, each to the slowest stage that it fits, of equal ones to the largest. For
    identical machines that is the optimum.
    """
    needs = [stage.memory.device_bytes + stage.memory.host_bytes for stage in stages]
    slowest = [(0.0, -need, stage) for stage, need in enumerate(needs)]
    heapq.heapify(slowest)
    for machine in sorted(machines, key=lambda m: -m.flops_per_second):
        passed: list[tuple[float, int, int]] = []
        while slowest and not machine.memory.holds(stages[slowest[0][2]].memory):
            passed.append(heapq.heappop(slowest))
        if slowest:
            rate, need, stage = slowest[0]
            gained = rate + machine.rate_at(stages[stage], sizes[stage])
            heapq.heapreplace(slowest, (gained, need, stage))
        for entry in passed:
            heapq.heappush(slowest, entry)
    return slowest[0][0]


class EfficiencyMeter:
    """Integrates the rates over the time in which the run trains."""

    def __init__(self, swarm: Swarm, weights: Sequence[float]) -> None:
        """`weights` of the stages for the bound sum to 1; any such weights give a bound."""
        self._swarm = swarm
        stages = swarm.manifest.stage_count
        self._weights = weights
        self._serving: list[dict[PeerId, float]] = [{} for _ in range(stages)]
        """Rate of each peer at the stage that it serves, by stage."""
        self._holders: dict[PeerId, SimulatedVolunteer] = {}
        """Machines that could serve: present for long enough to download a stage, serving or
        not."""
        self._rates = [0.0] * stages
        self._divided = self._weighted = 0.0
        self._since: float | None = None
        self._rate = self._best = self._bound = 0.0
        self.made = self.possible = self.bound = 0.0
        """Microbatches of the run, of the best placement found, and of the bound."""
        self.standstill_seconds = 0.0
        self.seconds = 0.0
        self.series: list[tuple[float, float, float]] = []
        """(seconds, rate, best rate) at every change."""

    def start(self) -> None:
        """Begin to integrate; training begins."""
        if self._since is None:
            self._since = self._swarm.event_heap.now
            self.account()

    def add_candidate(self, volunteer: SimulatedVolunteer) -> None:
        """Include a machine in the best placement, once it has had the time to download a stage."""
        if volunteer.alive and volunteer.peer not in self._holders:
            self._holders[volunteer.peer] = volunteer
            self._counts(volunteer, 1)
            self.account()

    def serves(self, volunteer: SimulatedVolunteer) -> None:
        assert volunteer.stage is not None
        self.add_candidate(volunteer)
        self._forget(volunteer)
        stage = volunteer.stage
        self._serving[stage][volunteer.peer] = volunteer.steady_rate_at(stage)
        self._rates[stage] = math.fsum(self._serving[stage].values())
        self.account()

    def stops(self, volunteer: SimulatedVolunteer) -> None:
        """The machine serves nothing for now, but could: it changes stage."""
        if self._forget(volunteer):
            self.account()

    def gone(self, volunteer: SimulatedVolunteer) -> None:
        served = self._forget(volunteer)
        if self._holders.pop(volunteer.peer, None) is not None:
            self._counts(volunteer, -1)
            served = True
        if served:
            self.account()

    def _forget(self, volunteer: SimulatedVolunteer) -> bool:
        for stage, serving in enumerate(self._serving):
            if serving.pop(volunteer.peer, None) is not None:
                self._rates[stage] = math.fsum(serving.values())
                return True
        return False

    def _counts(self, volunteer: SimulatedVolunteer, sign: int) -> None:
        """Add or subtract a machine's terms of the two references.

        A machine that divides itself evenly adds the inverse of the sum of its inverse rates. For
        any stage weights that sum to 1, no placement lets it add more to the slowest stage than the
        largest of its weighted rates.
        """
        rates = [volunteer.steady_rate_at(StageIndex(s)) for s in range(len(self._rates))]
        self._divided += sign / math.fsum(1 / rate for rate in rates)
        self._weighted += sign * max(w * r for w, r in zip(self._weights, rates, strict=True))

    def account(self) -> None:
        """Integrate until now, and update the current rates."""
        now = self._swarm.event_heap.now
        if self._since is None:
            return
        elapsed, self._since = now - self._since, now
        self.seconds += elapsed
        self.made += elapsed * self._rate
        self.possible += elapsed * self._best
        self.bound += elapsed * self._bound
        if self._rate <= 0:
            self.standstill_seconds += elapsed
        self._rate = min(self._rates)
        self._best = max(self._rate, self._best_rate())
        self._bound = max(self._best, self._weighted)
        self.series.append((now, self._rate, self._best))

    def _best_rate(self) -> float:
        if len(self._holders) <= MAX_SEARCHED_MACHINES:
            machines = [holder.hardware for holder in self._holders.values()]
            return best_rate(machines, self._swarm.manifest.stages, self._swarm.sizes)
        return self._divided
