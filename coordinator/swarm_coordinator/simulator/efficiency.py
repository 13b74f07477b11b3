"""What the run makes, against what the same machines could make in the best places.

Two yardsticks, because the best placement is NP-hard to find. `best` is what a greedy search over
placements reaches: somebody could have placed the machines like that. `bound` is what no placement
can exceed. For like machines the first is the optimum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm_coordinator.simulator.volunteer import SimulatedVolunteer
from swarm_shared.base.types import PeerId, StageIndex

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

MAX_SEARCHED_MACHINES = 300
"""Above this the best placement is taken to be the one in which every machine divides itself among
all stages, which is within a percent of it and costs nothing to keep."""


def best_rate(machines: Sequence[SimulatedVolunteer], memory_bytes: Sequence[int]) -> float:
    """The best pipeline rate over all placements, as far as a greedy search finds it.

    Fastest first, each to the thinnest stage that it fits. For like machines that is the optimum.
    """
    thinnest = [(0.0, stage) for stage in range(len(memory_bytes))]
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


class EfficiencyMeter:
    """Integrates the rates over the time in which the run trains."""

    def __init__(self, swarm: Swarm, weights: Sequence[float] | None = None) -> None:
        """`weights` of the stages for the bound; they add up to 1, and any do."""
        self._swarm = swarm
        stages = len(swarm.works)
        self._memory = [stage.memory_bytes for stage in swarm.manifest.stages]
        self._weights = weights if weights is not None else [1 / stages] * stages
        self._serving: list[dict[PeerId, float]] = [{} for _ in range(stages)]
        """The rate of each peer, at the stage that it serves."""
        self._where: dict[PeerId, int] = {}
        self._holders: dict[PeerId, SimulatedVolunteer] = {}
        """Who could serve: all who have had the time to get a stage, whether they serve or not."""
        self._rates = [0.0] * stages
        self._divided = self._weighted = 0.0
        self._since: float | None = None
        self._rate = self._best = self._bound = 0.0
        self.made = self.possible = self.bound = 0.0
        """Microbatches: of the run, of the best placement found, and of no placement more."""
        self.standstill_seconds = 0.0
        self.seconds = 0.0
        self.series: list[tuple[float, float, float]] = []
        """(seconds, rate, best rate), at every change."""

    def start(self) -> None:
        """Training begins."""
        if self._since is None:
            self._since = self._swarm.event_heap.now
            self._account()

    def add_candidate(self, volunteer: SimulatedVolunteer) -> None:
        """It has had the time to get a stage; the best placement counts on it from now on."""
        if volunteer.alive and volunteer.peer not in self._holders:
            self._holders[volunteer.peer] = volunteer
            self._counts(volunteer, 1)
            self._account()

    def serves(self, volunteer: SimulatedVolunteer) -> None:
        assert volunteer.stage is not None
        self.add_candidate(volunteer)
        self._forget(volunteer)
        stage = volunteer.stage
        self._where[volunteer.peer] = stage
        self._serving[stage][volunteer.peer] = volunteer.steady_rate_at(stage)
        self._changed(stage)

    def stops(self, volunteer: SimulatedVolunteer) -> None:
        """It serves nothing for now, but could: it is on its way to another stage."""
        if self._forget(volunteer):
            self._account()

    def gone(self, volunteer: SimulatedVolunteer) -> None:
        served = self._forget(volunteer)
        if self._holders.pop(volunteer.peer, None) is not None:
            self._counts(volunteer, -1)
            served = True
        if served:
            self._account()

    def _forget(self, volunteer: SimulatedVolunteer) -> bool:
        stage = self._where.pop(volunteer.peer, None)
        if stage is None:
            return False
        del self._serving[stage][volunteer.peer]
        self._rates[stage] = math.fsum(self._serving[stage].values())
        return True

    def _counts(self, volunteer: SimulatedVolunteer, sign: int) -> None:
        """A machine that divides itself evenly adds the inverse of the sum of its inverse rates.

        And for any weights of the stages that add up to 1, no placement lets it add more to the
        thinnest of them than the largest of its weighted rates.
        """
        rates = [volunteer.steady_rate_at(StageIndex(s)) for s in range(len(self._rates))]
        self._divided += sign / math.fsum(1 / rate for rate in rates)
        self._weighted += sign * max(w * r for w, r in zip(self._weights, rates, strict=True))

    def _changed(self, stage: int) -> None:
        self._rates[stage] = math.fsum(self._serving[stage].values())
        self._account()

    def finish(self) -> None:
        """Account for the time until now."""
        self._account()

    def _account(self) -> None:
        """Add up the time until now, and see what is so from now on."""
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
            return best_rate(list(self._holders.values()), self._memory)
        return self._divided
