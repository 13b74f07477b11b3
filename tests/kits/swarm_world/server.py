"""The stage server of a simulated volunteer, as `swarm_client.pipeline.stage_server`: admits
senders and requests, and has each microbatch computed here and in the stages after this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kits.swarm_world.checks import check_served
from kits.swarm_world.downstream import Answer, Parcel
from kits.swarm_world.facts import (
    CERTIFICATE_SECONDS,
    TOKENS,
    Violation,
)
from kits.swarm_world.network import Edge
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import NotCounted, NotFinite, RefusalReason
from swarm_shared.volunteer_rules.stage_account import Computation

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer
    from kits.swarm_world.stage import Stage

MOST_QUEUED = 8
"""Microbatches that one peer holds at once."""

OWING_SHARE = 0.6
"""Share of the microbatches that are answered before they are counted."""

BUSY_SHARE = 0.03
"""Share of the requests that are refused although there is room."""


class StageServer:
    """Serves whatever stage the peer holds."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer, self._world = peer, peer.world

    def accepts(self, sender: PeerId) -> bool:
        """Whether a sender's hello is answered with credits."""
        since = self._world.banned.get(sender)
        expired = since is not None and self._world.now - since > CERTIFICATE_SECONDS
        return self._peer.holding is not None and not expired and not self._revokes(sender)

    def _revokes(self, sender: PeerId) -> bool:
        roster = self._peer.roster
        revoked = roster is not None and sender in roster.revoked
        self._world.counts["revoked sender turned away"] += revoked
        return revoked

    def serve(self, edge: Edge, request: int, parcel: Parcel) -> None:
        stage, reason = self._peer.holding, self._refusal(edge, parcel)
        if reason is not None or stage is None:
            answer = Answer(reason)
            edge.back("refusal", reason, lambda: edge.sender.answered(edge, request, answer))
        else:
            check_served(self._peer, edge.sender.peer.id)
            Serving(stage, edge, request, parcel)

    def _refusal(self, edge: Edge, parcel: Parcel) -> RefusalReason | None:
        peer, sender = self._peer, edge.sender.peer.id
        stage, record = peer.holding, peer.members.get(sender)
        if self._revokes(sender):
            return RefusalReason.NOT_ADMITTED
        if (
            stage is None
            or stage.index != edge.stage
            or not has_parameters_for(stage, parcel)
            or record is None
            or (stage.index > 0 and record.stage != stage.index - 1)
        ):
            return RefusalReason.WRONG_STEP
        busy = self._world.rng.random() < BUSY_SHARE
        if peer.paused or busy or len(stage.tasks) >= MOST_QUEUED:
            return RefusalReason.BUSY
        return None


class Serving:
    """One request that was accepted: computed in the stages after this one first, then here."""

    def __init__(self, stage: Stage, edge: Edge, request: int, parcel: Parcel) -> None:
        self._stage, self._edge, self._request, self._parcel = stage, edge, request, parcel
        self._below = Answer(None)
        self._delivery: int | None = None
        self._ended = False
        self._arrived_at = stage.peer.world.now
        edge.tasks.setdefault(request, []).append(self)
        stage.tasks[self] = None
        self._computation = stage.account.begin(parcel.step, parcel.microbatch, parcel.accumulate)
        if stage.is_last:
            self._compute()
        else:
            self._request_worker(lambda: False, self._forwarded)

    def _request_worker(self, work: Callable[[], bool], done: Callable[[bool], None]) -> None:
        worker = self._stage.worker
        seconds = 0.01 + 0.05 * worker.peer.world.rng.random()
        worker.request(seconds, work, lambda added: self._ended or done(added))

    def _forwarded(self, _added: bool) -> None:
        if self._stage.next is not None:
            delivery = self._stage.next.send(self._parcel, self._returned)
            self._delivery = None if self._ended else delivery

    def _returned(self, answer: Answer) -> None:
        self._delivery, self._below = None, answer
        if answer.ok:
            self._compute()
        else:
            self.refuse(RefusalReason.FAILED)

    def _compute(self) -> None:
        """Compute the gradient."""
        parcel, worker = self._parcel, self._stage.worker
        if worker.peer.gives_nan:
            worker.peer.gives_nan = False
            sender = self._edge.sender.peer.id
            worker.peer.send(
                NotFinite(step=parcel.step, microbatch=parcel.microbatch, sender=sender)
            )
            self.refuse(RefusalReason.FAILED)
        elif self._computation.accumulate and worker.peer.world.rng.random() < OWING_SHARE:
            self._request_worker(lambda: False, self._answer_first)
        else:
            accumulate = self._computation.accumulate
            self._request_worker(
                lambda: worker.accumulate(parcel.step, parcel.microbatch, accumulate),
                self._computed,
            )

    def _answer_first(self, _added: bool) -> None:
        """Answer, and count the microbatch later."""
        stage, receipts = self._stage, self._below.receipts
        receipt = stage.account.receipt(self._parcel.step, self._parcel.microbatch)
        Owed(stage, self._computation)
        self._reply(
            Answer(
                None, receipts if receipt is None else (*receipts, receipt),
                service_seconds=0.05 * stage.peer.slowness,
                total_seconds=stage.peer.world.now - self._arrived_at,
                owing=(*self._below.owing, stage.peer.id),
            )
        )  # fmt: skip

    def _computed(self, added: bool) -> None:
        parcel, stage = self._parcel, self._stage
        if added and stage.index not in parcel.accumulate:
            raise Violation(f"{stage.peer.id} of stage {stage.index} has added {parcel}")
        loss = stage.loss(parcel.step, parcel.microbatch)
        receipt = stage.account.finish(
            self._computation, added=added, tokens=TOKENS, loss_sum=loss,
            transcript=stage.worker.transcript(parcel.step, parcel.microbatch),
        )  # fmt: skip
        receipts = self._below.receipts
        self._reply(
            Answer(
                None, receipts if receipt is None else (*receipts, receipt),
                service_seconds=0.05 * stage.peer.slowness,
                total_seconds=stage.peer.world.now - self._arrived_at, owing=self._below.owing,
            )
        )  # fmt: skip

    def refuse(self, reason: RefusalReason) -> None:
        if not has_parameters_for(self._stage, self._parcel):
            reason = RefusalReason.WRONG_STEP
        self._reply(Answer(reason))

    def _reply(self, answer: Answer) -> None:
        self.cancel()
        edge, request = self._edge, self._request
        edge.back("answer", answer, lambda: edge.sender.answered(edge, request, answer))

    def cancel(self) -> None:
        """Give up what has not ended; what the worker has begun it goes on with."""
        self._ended = True
        del self._stage.tasks[self]
        tasks = self._edge.tasks[self._request]
        tasks.remove(self)
        if not tasks:
            del self._edge.tasks[self._request]
        if self._delivery is not None and self._stage.next is not None:
            self._stage.next.withdraw(self._delivery)


class Owed:
    """A microbatch that was answered before it is counted."""

    def __init__(self, stage: Stage, computation: Computation) -> None:
        self._stage, self._computation = stage, computation
        self._ended = False
        stage.owed[self] = None
        step, microbatch, worker = computation.step, computation.microbatch, stage.worker
        seconds = worker.peer.world.rng.choice((0.02, 0.02, 0.6))
        worker.peer.later(
            seconds,
            lambda: worker.request(
                0.05, lambda: worker.accumulate(step, microbatch, accumulate=True), self._computed
            ),
        )

    def _computed(self, added: bool) -> None:
        if self._ended:
            return
        stage, computation = self._stage, self._computation
        receipt = stage.account.finish(
            computation, added=added, tokens=TOKENS,
            loss_sum=stage.loss(computation.step, computation.microbatch),
            transcript=stage.worker.transcript(computation.step, computation.microbatch),
        )  # fmt: skip
        self._end(counted=receipt is not None)
        if not stage.owed and stage.peer.holding is stage:
            stage.peer.report_receipts(stage.account)

    def give_up(self) -> None:
        """The stage is served no longer, or the peer's user needs the machine."""
        self._end(counted=False)

    def _end(self, *, counted: bool) -> None:
        self._ended = True
        del self._stage.owed[self]
        if not counted:
            step, microbatch = self._computation.step, self._computation.microbatch
            self._stage.peer.send(NotCounted(step=step, microbatches=(microbatch,)))


def has_parameters_for(stage: Stage, parcel: Parcel) -> bool:
    return stage.account.works_on(parcel.step)
