"""The trainer of a simulated volunteer, as `swarm_client.pipeline.trainer`: computes leased
microbatches and returns the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kits.swarm_world.downstream import Answer, Downstream, Parcel
from swarm_coordinator.core import events
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Lease, LeaseResult
from swarm_shared.volunteer_rules.lease_queue import LeaseQueue, StartedMicrobatch, handed_back

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer


class Trainer:
    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer
        self._leases = LeaseQueue()
        self.accepted: dict[tuple[int, MicrobatchIndex], Step] = {}
        """Leased microbatches that have neither been started nor handed back, and their steps."""
        self.driving: list[StartedMicrobatch] = []
        self.first = Downstream(peer, StageIndex(0))
        self.stalled = False

    def take(self, lease: Lease) -> None:
        for leased in lease.microbatches:
            self.accepted[lease.lease, leased.microbatch] = lease.step
        self._hand_back(self._leases.take(lease))
        self.start_more()

    def pause(self) -> None:
        self._hand_back(self._leases.pause())

    def resume(self) -> None:
        self._leases.resume()

    def leave(self) -> None:
        self._hand_back(self._leases.leave())

    def start_more(self) -> None:
        if not self.stalled:
            step = self._peer.current_step()
            for key in [key for key, of in self.accepted.items() if step is not None and of < step]:
                del self.accepted[key]
            for started in self._leases.start(step, self._peer.world.now):
                self._drive(started)

    def _drive(self, started: StartedMicrobatch) -> None:
        lease, leased = started.lease, started.leased
        del self.accepted[lease.lease, leased.microbatch]
        self.driving.append(started)

        def done(answer: Answer) -> None:
            self.driving.remove(started)
            if answer.ok:
                result = computed.model_copy(update={"owing": answer.owing})
                self._resolve(result, answer.receipts)
            else:
                self._resolve(handed_back(lease, leased, "failed"))
            self._leases.finished(started, self._peer.world.now, ok=answer.ok)
            self.start_more()

        computed = LeaseResult(
            step=lease.step, microbatch=leased.microbatch, lease=lease.lease, ok=True
        )
        parcel = Parcel(lease.step, leased.microbatch, leased.accumulate, leased.is_copy)
        self.first.send(parcel, done)

    def _hand_back(self, results: list[LeaseResult]) -> None:
        for result in results:
            del self.accepted[result.lease, result.microbatch]
            self._resolve(result)

    def _resolve(self, result: LeaseResult, receipts: tuple[Receipt, ...] = ()) -> None:
        self._peer.deliver(
            lambda session, peer: events.LeaseResolved(
                session, peer, result.step, result.microbatch, result.lease, result.ok,
                result.reason, receipts, result.owing,
            )
        )  # fmt: skip
