"""The coarse data plane: microbatches flow at the rate of the bottleneck stage.

While the serving peers do not change, microbatches complete at a constant rate. Each is attributed
to one peer of each stage, in proportion to the peers' rates, which is how the routing
(`swarm_shared.scheduling.routing`) distributes work under load. The rate is that of the bottleneck
stage, if enough microbatches are in flight. The fill of the pipeline, its drain and the stragglers
of a step take time that does not depend on the number of microbatches: a share of the time that one
takes through the pipeline and back, which is calibrated against the fine level (docs/simulator.md).

Not modelled: individual queues, and the work in flight at a peer that is lost.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from swarm_coordinator.core.events import LeaseResolved
from swarm_coordinator.core.rules.microbatches.leases import pipeline_windows
from swarm_coordinator.simulator.stage_holder import INPUTS, LoadedStage
from swarm_coordinator.simulator.volunteer import SimulatedVolunteer
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Audit, Close, Heartbeat, Lease, Roster
from swarm_shared.scheduling.inflight_window import GAIN

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

END_SHARE_ALONE, END_SHARE_OF_MANY = 0.15, 0.75
"""The end of a step as a share of a microbatch's time through the pipeline and back, with one peer
in each stage and with very many. Among many some are slow, and the last microbatches wait for
those."""

REPORT_SECONDS = 5.0
"""Seconds between batches of results to the coordinator; real trainers report every half second."""


@dataclass(slots=True)
class _Leased:
    """One leased microbatch: its trainer, its accumulate mask, and where it counts."""

    lease: int
    trainer: SimulatedVolunteer
    accumulate: tuple[StageIndex, ...]
    counted_by: list[LoadedStage[Receipt]]


class _Shares:
    """Interleaved weighted round-robin over the peers of one stage.

    The next peer is the one with the smallest virtual finish time, which advances by the time that
    it takes for one microbatch.
    """

    def __init__(self) -> None:
        self.rates: dict[PeerId, float] = {}
        self.rate = 0.0
        self._heap: list[tuple[float, int, PeerId]] = []
        self._entered: dict[PeerId, int] = {}
        self._order = itertools.count()

    def put(self, peer: PeerId, rate: float) -> None:
        self.rates[peer] = rate
        self._sum()
        if peer not in self._entered:
            floor = self._heap[0][0] if self._heap else 0.0
            self._entered[peer] = next(self._order)
            heapq.heappush(self._heap, (floor, self._entered[peer], peer))

    def remove(self, peer: PeerId) -> None:
        if self.rates.pop(peer, None) is not None:
            del self._entered[peer]
            self._sum()

    def _sum(self) -> None:
        self.rate = sum(self.rates.values())

    def next(self) -> PeerId | None:
        while self._heap:
            at, entered, peer = self._heap[0]
            if self._entered.get(peer) == entered:
                heapq.heapreplace(self._heap, (at + 1.0 / self.rates[peer], entered, peer))
                return peer
            heapq.heappop(self._heap)
        return None


class FluidPlane:
    """Implements `volunteer.DataPlane`."""

    TICK_SECONDS: ClassVar[float] = 1.0
    FOLLOWS_ROSTERS: ClassVar[bool] = False

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        stages = swarm.manifest.stage_count
        self._shares = [_Shares() for _ in range(stages)]
        self._serving: dict[PeerId, LoadedStage[Receipt]] = {}
        self._step = Step(0)
        self._waiting: dict[MicrobatchIndex, _Leased] = {}
        """Microbatches not completed yet, in their order."""
        self._completed: dict[MicrobatchIndex, _Leased] = {}
        """Completed microbatches that are not reported yet."""
        self._progress = 0.0
        """Completed fraction of the first waiting microbatch."""
        self._flows_from: float | None = None
        """When microbatches of this step begin to return; None: it has not begun."""
        self._rate = 0.0
        self._latency = 0.0
        self._settled_at = 0.0
        self._plan = 0
        self._reporting = False

    # ---- serving peers

    def serves(self, volunteer: SimulatedVolunteer) -> None:
        self._settle()
        assert volunteer.held is not None
        self._serving[volunteer.peer], stage = volunteer.held, volunteer.held.account.stage
        if not volunteer.leaving:
            self._shares[stage].put(volunteer.peer, volunteer.rate_at(stage))
        self._rates_changed()

    def changed(self, volunteer: SimulatedVolunteer) -> None:
        if volunteer.peer in self._serving and not volunteer.leaving:
            self.serves(volunteer)

    def step_changed(self, volunteer: SimulatedVolunteer) -> None:
        """Ignored: this level has no microbatches in flight."""

    def stops(self, volunteer: SimulatedVolunteer) -> None:
        """Stop serving; what the peer has completed is reported first."""
        serving = self._serving.get(volunteer.peer)
        if serving is None:
            return
        self._settle()
        self._report_of(volunteer)
        del self._serving[volunteer.peer]
        self._shares[serving.account.stage].remove(volunteer.peer)
        self._rates_changed()

    def leaving(self, volunteer: SimulatedVolunteer) -> None:
        """Give the peer no new work unless it is the last of its stage; it remains a member."""
        self._settle()
        self._report_of(volunteer)
        shares = self._shares_of(volunteer)
        if shares is not None and len(shares.rates) > 1:
            shares.remove(volunteer.peer)
            self._rates_changed()

    def _shares_of(self, volunteer: SimulatedVolunteer) -> _Shares | None:
        serving = self._serving.get(volunteer.peer)
        return None if serving is None else self._shares[serving.account.stage]

    def roster(self, volunteer: SimulatedVolunteer, roster: Roster) -> None:
        """Ignored: this level distributes work by the actual state, not by each sender's roster."""

    def mask(self, volunteer: SimulatedVolunteer, message: object) -> None:
        """Ignored: this level sends no mask requests."""

    # ---- work

    def lease(self, volunteer: SimulatedVolunteer, lease: Lease) -> None:
        self._settle()
        if lease.step != self._step:
            self._step, self._progress, self._flows_from = lease.step, 0.0, None
            self._waiting.clear()
            self._completed.clear()
        for item in lease.microbatches:
            self._completed.pop(item.microbatch, None)
            self._waiting[item.microbatch] = _Leased(lease.lease, volunteer, item.accumulate, [])
        self._rates_changed()

    def heartbeat(self, volunteer: SimulatedVolunteer, rate: float, up: float) -> Heartbeat:
        """Return the whole state: what has changed is not worth the time to find out."""
        return Heartbeat(
            microbatches_per_second=rate, queued=self._queued(volunteer), up_bytes_per_second=up
        )

    def _queued(self, volunteer: SimulatedVolunteer) -> int:
        """The peer's share of the microbatches in flight; those not in service wait at a
        bottleneck."""
        shares = self._shares_of(volunteer)
        if shares is None or not self._waiting or self._rate <= 0:
            return 0
        share = shares.rates.get(volunteer.peer, 0.0) / shares.rate if shares.rate else 0.0
        busy = self._rate / shares.rate if shares.rate else 0.0
        in_service = busy * len(shares.rates) * share
        bottlenecks = [s for s in self._shares if s.rate <= self._rate * 1.02]
        waiting = 0.0
        if shares in bottlenecks:
            in_flight = self._window() - self._rate * self._latency
            waiting = max(0.0, in_flight) / len(bottlenecks) * share
        limit = self._swarm.manifest.limits.stage_queue
        return min(limit, round(in_service + waiting))

    def audit(self, volunteer: SimulatedVolunteer, order: Audit) -> None:
        """Ignored: at this level no cell is drawn."""

    def closing(self, held: LoadedStage[Receipt], close: Close) -> None:
        """Let the peer hold what is committed: a flow loses nothing and counts nothing twice."""
        held.accumulated.clear()
        for microbatch in close.committed:
            held.accumulated.add(microbatch, INPUTS)

    # ---- the flow

    def _window(self) -> float:
        """Microbatches in flight of all trainers, by `swarm_shared.scheduling.inflight_window`."""
        pipelines = max(1, len(self._shares[0].rates))
        limit = self._swarm.manifest.limits.stage_queue
        least, most = pipeline_windows(len(self._shares), limit, pipelines)
        slowest = min(shares.rate for shares in self._shares)
        return max(pipelines * least, min(pipelines * most, GAIN * slowest * self._latency))

    def _rates_changed(self) -> None:
        slowest = min(shares.rate for shares in self._shares)
        self._rate = 0.0
        if slowest > 0 and self._waiting:
            self._latency = self._pipeline_seconds() + self._link_seconds()
            self._rate = min(slowest, self._window() / self._latency)
            self._plan += 1
            now = self._swarm.event_heap.now
            if self._flows_from is None:
                self._flows_from = now + self._end_seconds()
            plan, left = self._plan, len(self._waiting) - self._progress
            drained_at = max(now, self._flows_from) + left / self._rate
            self._swarm.event_heap.at(drained_at, lambda: self._drained(plan))
            if not self._reporting:
                self._reporting = True
                self._swarm.event_heap.later(REPORT_SECONDS, self._report_now)

    def _pipeline_seconds(self) -> float:
        """Seconds for one microbatch through an idle pipeline and back, at the average peer."""
        return sum(len(shares.rates) / shares.rate for shares in self._shares)

    def _link_seconds(self) -> float:
        """Seconds of its packets on the links."""
        return 4 * self._swarm.mean_latency_seconds * (len(self._shares) - 1)

    def _end_seconds(self) -> float:
        """Seconds of a step in which not all peers of the bottleneck have work, at its beginning
        and at its end; they are counted at its beginning."""
        stages = len(self._shares)
        alone = stages / sum(len(shares.rates) for shares in self._shares)
        share = END_SHARE_OF_MANY + (END_SHARE_ALONE - END_SHARE_OF_MANY) * math.sqrt(alone)
        return share * self._pipeline_seconds() + self._link_seconds()

    def _settle(self) -> None:
        """Complete the microbatches of the time since the last change."""
        now = self._swarm.event_heap.now
        since, self._settled_at = max(self._settled_at, self._flows_from or now), now
        if self._rate <= 0 or not self._waiting:
            return
        self._progress += max(0.0, now - since) * self._rate
        whole = min(len(self._waiting), int(self._progress + 1e-9))
        self._progress = self._progress - whole if whole < len(self._waiting) else 0.0
        for microbatch in list(itertools.islice(self._waiting, whole)):
            leased = self._waiting.pop(microbatch)
            for stage, shares in enumerate(self._shares):
                peer = shares.next()
                if peer is not None and stage in leased.accumulate:
                    leased.counted_by.append(self._serving[peer])
            self._completed[microbatch] = leased

    def _drained(self, plan: int) -> None:
        """The last microbatch has returned."""
        if plan == self._plan:
            self._progress = float(len(self._waiting))
            self._settle()
            self._report(list(self._completed))

    # ---- results

    def _report_now(self) -> None:
        self._reporting = False
        self._settle()
        self._report(list(self._completed))
        if self._waiting and self._rate > 0:
            self._reporting = True
            self._swarm.event_heap.later(REPORT_SECONDS, self._report_now)

    def _report_of(self, volunteer: SimulatedVolunteer) -> None:
        """Report the completed microbatches that involve this peer."""
        serving = self._serving.get(volunteer.peer)
        self._report(
            [
                microbatch
                for microbatch, leased in self._completed.items()
                if leased.trainer is volunteer or serving in leased.counted_by
            ]
        )

    def _report(self, microbatches: list[MicrobatchIndex]) -> None:
        swarm = self._swarm
        step = self._step
        for microbatch in microbatches:
            leased = self._completed.pop(microbatch, None)
            if leased is None or step != self._step:
                continue
            receipts = tuple(loaded.receipt(step, microbatch) for loaded in leased.counted_by)
            trainer = leased.trainer
            swarm.deliver(
                LeaseResolved(
                    trainer.session, trainer.peer, step, microbatch, leased.lease, True, "",
                    receipts,
                )
            )  # fmt: skip
