"""The time that averaging takes.

The all-reduce of a group begins with its last member and ends for all of them together. It is a
reduce-scatter and an all-gather: the traffic of a member follows from the share of the gradient
that it sums, and the group waits for its slowest link. With a member that is lost meanwhile it does
not end: the coordinator detects the loss and aborts the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from swarm_coordinator.simulator.stage_holder import LoadedStage
from swarm_coordinator.simulator.volunteer import (
    RECONCILE_SECONDS,
    SimulatedVolunteer,
)
from swarm_shared.base.types import StageIndex
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Reduction
from swarm_shared.scheduling.placement import round_seconds
from swarm_shared.volunteer_rules.step_close import Reduce, WorkNumber

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

LATENCIES_PER_ALL_REDUCE = 4
"""Consecutive latencies: both halves of the all-reduce, each with a hello and its answer."""


@dataclass(slots=True, eq=False)
class _Group:
    """The members of one all-reduce that have begun it."""

    attempt: int
    members: list[tuple[SimulatedVolunteer, LoadedStage[Receipt], WorkNumber]] = field(
        default_factory=list
    )


class AllReduceTimes:
    """The averages of all stages."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._forming: dict[StageIndex | None, _Group] = {}
        """The latest group of each stage, and of the tied part (None), until it is complete."""

    def join(
        self, volunteer: SimulatedVolunteer, held: LoadedStage[Receipt], stage: StageIndex,
        work: Reduce,
    ) -> None:  # fmt: skip
        reduction = work.reduction
        key = None if reduction.part == "tied" else stage
        group = self._forming.get(key)
        if group is None or group.attempt < work.attempt:
            group = self._forming[key] = _Group(work.attempt)
        if group.attempt > work.attempt:
            return  # the abort of this attempt is on its way
        group.members.append((volunteer, held, work.work))
        if len(group.members) == len(reduction.members):
            del self._forming[key]
            seconds = self._seconds(reduction, stage)
            if reduction.part == "own":
                seconds += RECONCILE_SECONDS
            self._swarm.event_heap.later(seconds, partial(self._averaged, group))

    def _averaged(self, group: _Group) -> None:
        if all(volunteer.alive for volunteer, _, _ in group.members):
            for volunteer, held, work in group.members:
                volunteer.finish(held, partial(held.close.averaged, work))

    def _seconds(self, reduction: Reduction, stage: StageIndex) -> float:
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
