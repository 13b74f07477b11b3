"""The step protocol between real nodes: routing, retries with masks, refusals, receipts.

Only the stage worker is replaced, by one that computes nothing and records its calls.
"""

from __future__ import annotations

import base64
import itertools
import random
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from kits.client.held_stage import held_stage
from kits.members import ORGANISER, certificate, peer_record
from kits.tickets import ticket
from kits.transcripts import TRANSCRIPT
from kits.waiting import until
from swarm_client.membership.admission_gate import AdmissionGate
from swarm_client.membership.member_context import MemberContext
from swarm_client.membership.membership import CurrentMembership
from swarm_client.membership.roster import RosterView
from swarm_client.pipeline import stage_server
from swarm_client.pipeline.downstream import Downstream, MicrobatchAbandoned, MicrobatchRequest
from swarm_client.pipeline.edge import Edge, Stream, open_edge
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.mask_client import MaskClient
from swarm_client.pipeline.stage_links import StageLinks
from swarm_client.pipeline.stage_server import StageServer
from swarm_client.stage.handle.slots import Output
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.messages import WeightsDone
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Frame, FramedStream, FrameLimits, Node, open_node
from swarm_shared.protocol import (
    STAGE_PROTOCOL,
    Backward,
    Forward,
    Mask,
    MaskRequest,
    NotCounted,
    NotFinite,
    PeerRecord,
    Receipts,
    RefusalReason,
    Roster,
    StageHello,
    StageRefused,
    encode,
    parse,
    stage_answers,
    stage_requests,
)
from swarm_shared.protocol.framing import encode_frame
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.latency import LatencyEstimate

RUN = "ab" * 32
LIMITS = FrameLimits(max_header_bytes=2**16, max_payload_bytes=2**16)
TOKENS = 4
INPUT = bytes(range(16))
TARGETS = b"t" * 16


@dataclass
class RecordingWorker:
    """Stands in for the child process: every output is its input reversed."""

    is_last: bool
    accumulated: list[int] = field(default_factory=list)
    forwards: list[tuple[int, bool]] = field(default_factory=list)
    discarded: int = 0
    hold: trio.Event | None = None
    owes: trio.Event | None = None
    """If set: answers come before the weights' gradients, which wait for it."""
    fails: bool = False
    """Whether these cannot be computed."""
    entered: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.sizes = SimpleNamespace(input_bytes=16, output_gradient_bytes=16)
        self._numbers = itertools.count(1)
        self._wants: dict[int, tuple[int, bool]] = {}

    async def forward(
        self, step: int, microbatch: int, accumulate: bool, parts: Sequence[bytes]
    ) -> Output:
        self.forwards.append((microbatch, accumulate))
        self.entered.set()
        if self.hold is not None:
            await self.hold.wait()
        request = next(self._numbers)
        payload = memoryview(bytes(parts[0])[::-1])
        if not self.is_last:
            self._wants[request] = (microbatch, accumulate)
            return Output(request, payload, TOKENS, 0.01)
        return self._answer(request, payload, 8.0, microbatch, accumulate)

    async def backward(self, handle: Output, payload: bytes) -> Output:
        microbatch, accumulate = self._wants.pop(handle.request)
        gradient = memoryview(bytes(payload))
        return self._answer(handle.request, gradient, None, microbatch, accumulate)

    def _answer(
        self, request: int, gradient: memoryview, loss_sum: float | None, microbatch: int,
        accumulate: bool,
    ) -> Output:  # fmt: skip
        if self.owes is not None and accumulate:
            self._wants[request] = (microbatch, accumulate)
            return Output(request, gradient, TOKENS, 0.01, loss_sum, owed=True)
        added = self._add(microbatch, accumulate)
        return Output(request, gradient, TOKENS, 0.01, loss_sum, added, TRANSCRIPT)

    async def count_weights(self, handle: Output) -> WeightsDone:
        assert self.owes is not None
        await self.owes.wait()
        if self.fails:
            raise RequestFailed("not_finite", "a gradient holds NaNs")
        added = self._add(*self._wants.pop(handle.request))
        return WeightsDone(seconds=0.02, added=added, transcript=TRANSCRIPT)

    def discard(self, handle: Output) -> None:
        self.discarded += 1

    def _add(self, microbatch: int, accumulate: bool) -> bool:
        added = accumulate and microbatch not in self.accumulated
        if added:
            self.accumulated.append(microbatch)
        return added


def certify(identity: Identity, run: str = RUN) -> str:
    return certificate(identity.peer_id, run)


class Peer:
    """One volunteer's engine: a node, a stage server, and what it holds."""

    def __init__(self, world: World, identity: Identity, node: Node, stage: int) -> None:
        self.node, self.identity = node, identity
        self.worker = RecordingWorker(is_last=stage == world.stages - 1)
        self.membership = SimpleNamespace(
            run=RUN, organiser=world.organiser.peer_id, certificate=certify(identity),
            manifest=world.manifest,
        )  # fmt: skip
        self.holding = held_stage(identity, self.worker, stage, run=RUN)
        self.uplink_seconds = 0.0
        self.sent: list[NotFinite | NotCounted | Receipts] = []
        """What the coordinator was sent."""
        self.attached = True
        self.view = RosterView()
        """Its own, for whom it serves; whom it uses is the world's."""
        gate = AdmissionGate(RUN, world.organiser.peer_id, self.view)
        member = MemberContext(
            identity, node, CurrentMembership(self.membership), self.view, gate, self,
            world.nursery, print,
        )  # fmt: skip
        self.server = StageServer(member, self)
        self.server.holding = self.holding
        node.serve(STAGE_PROTOCOL, self.server.handle, LIMITS)
        self.record = peer_record(
            node.peer_id, stage, addresses=node.addresses, certificate=self.membership.certificate
        )

    def microbatch_seconds(self, _holding: Holding) -> float:
        """In the uplink share's place."""
        return self.uplink_seconds

    def send(self, message: NotFinite | NotCounted | Receipts) -> bool:
        """In the coordinator link's place."""
        self.sent.append(message)
        return True


class World:
    def __init__(self, nursery: trio.Nursery, stages: int = 2) -> None:
        self.nursery, self.stages = nursery, stages
        self.organiser = ORGANISER
        self.roster = RosterView()
        self.peers: list[Peer] = []
        self.senders: list[Downstream] = []
        self.masks: list[tuple[int, int]] = []
        self.missing: tuple[int, ...] = ()
        self.manifest = SimpleNamespace(
            stage_count=stages,
            tokens_per_microbatch=TOKENS,
            activation_bytes=16,
            gradient_bytes=16,
            limits=SimpleNamespace(edge_credits=2, stage_queue=3),
            training=SimpleNamespace(sequences_per_microbatch=1),
        )

    @asynccontextmanager
    async def peer(self, stage: int) -> AsyncIterator[Peer]:
        identity = Identity.generate()
        async with open_node(identity, ["/ip4/127.0.0.1/tcp/0"]) as node:
            peer = Peer(self, identity, node, stage)
            if stage < self.stages - 1:
                peer.holding.next_stage = self.downstream(peer, stage + 1)
            self.peers.append(peer)
            self.publish()
            yield peer

    def publish(self, *without: Peer) -> None:
        """To those who send; everybody serves everybody."""
        everybody = tuple(p.record for p in self.peers)
        for peer in self.peers:
            peer.view.replace(Roster(serial=1, peers=everybody))
        members = tuple(p.record for p in self.peers if p not in without)
        self.roster.replace(Roster(serial=1, peers=members))
        for sender in self.senders:
            sender.roster_changed()

    def downstream(
        self,
        sender: Peer,
        stage: int,
        certificate: str | None = None,
        latency: LatencyEstimate | None = None,
        wrap: Callable[[Stream], Stream] = lambda stream: stream,
    ) -> Downstream:
        hello = StageHello(run=RUN, certificate=certificate or sender.membership.certificate)
        sending = Downstream(
            stage,
            self.roster,
            Links(sender.node, hello, wrap).open_edge,
            Masks(self).client,
            self.nursery,
            StageRouting(random.Random(1), 8),
            latency=latency,
        )
        self.senders.append(sending)
        return sending


@dataclass
class Links:
    """Streams of one peer to the others' stages."""

    node: Node
    hello: StageHello
    wrap: Callable[[Stream], Stream]

    async def open_edge(self, record: PeerRecord) -> Edge:
        stream = await self.node.open_stream(record.peer, STAGE_PROTOCOL, LIMITS, record.addresses)
        return await open_edge(self.wrap(stream), self.hello)


class Masks:
    """A coordinator that answers every question about a mask at once, as the world says."""

    def __init__(self, world: World) -> None:
        self.client = MaskClient(self)
        self._world = world

    def send(self, message: FrozenModel) -> bool:
        assert isinstance(message, MaskRequest)
        self._world.masks.append((message.step, message.microbatch))
        self.client.answer(Mask(request=message.request, accumulate=self._world.missing))
        return True


@asynccontextmanager
async def world(stages: int = 2) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(nursery, stages)
        nursery.cancel_scope.cancel()


def parcel(
    microbatch: int = 0, step: int = 1, accumulate: tuple[int, ...] = (0, 1)
) -> MicrobatchRequest:
    return MicrobatchRequest(
        step, microbatch, accumulate, INPUT, TARGETS,
        ticket(RUN, step, microbatch, INPUT, TARGETS),
    )  # fmt: skip


def opened(receipts: Sequence[str]) -> list[Receipt]:
    return [Receipt.open(base64.b64decode(one)) for one in receipts]


async def send_until_refused(
    downstream: Downstream, receiver: Peer, request: MicrobatchRequest
) -> None:
    """Until the receiver has refused it at least once; then its step is over."""
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            with pytest.raises(MicrobatchAbandoned):
                await downstream.send(request)

        nursery.start_soon(send)
        await until(lambda: any(receiver.server.refused.values()))
        downstream.oldest_step_is(None)


async def test_a_request_is_an_activation_and_its_answer_the_gradient_with_all_receipts() -> None:
    async with world() as w, w.peer(0) as first, w.peer(1) as last, w.peer(0) as trainer:
        w.publish(trainer)
        answer = await w.downstream(trainer, 0).send(parcel(3))
    assert last.worker.accumulated == first.worker.accumulated == [3]
    receipts = opened(answer.header.receipts)
    assert [(r.peer, r.stage, r.loss_sum) for r in receipts] == [
        (last.identity.peer_id, 1, 8.0),
        (first.identity.peer_id, 0, None),
    ]
    # Stage 0 reversed the input, the last stage reversed it again: the gradient is the input.
    assert bytes(answer.payload) == INPUT


async def test_an_answer_comes_before_it_is_counted_and_the_receipt_goes_to_the_coordinator() -> (
    None
):
    async with world() as w, w.peer(0) as first, w.peer(1) as last, w.peer(0) as trainer:
        w.publish(trainer)
        first.worker.owes, last.worker.owes = trio.Event(), trio.Event()
        answer = await w.downstream(trainer, 0).send(parcel(3))
        assert bytes(answer.payload) == INPUT
        assert answer.header.receipts == ()
        assert answer.header.owing == (last.node.peer_id, first.node.peer_id)
        assert first.worker.accumulated == last.worker.accumulated == []
        assert first.holding.owed == 1

        first.worker.owes.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        (message,) = first.sent
        assert isinstance(message, Receipts)
        (receipt,) = opened(message.receipts)
        assert (receipt.peer, receipt.microbatch) == (first.identity.peer_id, 3)
        assert last.sent == []
        # Forward, backward and weights are one microbatch of its rate.
        assert first.holding.meter.computed == 1
        assert first.holding.meter.busy_seconds == pytest.approx(0.04)


async def test_a_receipt_of_the_time_without_a_session_is_left_for_the_next_one() -> None:
    """Its Hello may have been sent before, without the receipt."""
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        last.worker.owes, last.attached = trio.Event(), False
        await w.downstream(sender, 1).send(parcel(3, accumulate=(1,)))
        last.worker.owes.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert last.worker.accumulated == [3]
        assert last.sent == []
        assert len(last.holding.account.take_unreported()) == 1


async def test_a_sender_that_goes_does_not_stop_what_it_was_answered_before_it_was_counted() -> (
    None
):
    async with world() as w, w.peer(1) as last:
        last.worker.owes = trio.Event()
        async with w.peer(0) as sender:
            await w.downstream(sender, 1).send(parcel(3, accumulate=(1,)))
        last.worker.owes.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert last.worker.accumulated == [3]
        assert [type(message) for message in last.sent] == [Receipts]


async def test_what_cannot_be_counted_after_its_answer_is_said_to_the_coordinator() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        last.worker.owes, last.worker.fails = trio.Event(), True
        last.worker.owes.set()
        await w.downstream(sender, 1).send(parcel(3, accumulate=(1,)))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert last.sent == [
            NotFinite(step=1, microbatch=3, sender=sender.node.peer_id),
            NotCounted(step=1, microbatches=(3,)),
        ]
        assert last.holding.account.count(1) == 0


async def test_a_pause_gives_up_what_is_answered_and_not_counted() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        last.worker.owes = trio.Event()
        await w.downstream(sender, 1).send(parcel(3, accumulate=(1,)))
        last.server.paused = True
        last.server.hand_back()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert last.sent == [NotCounted(step=1, microbatches=(3,))]
        assert last.holding.owed == 0


@pytest.mark.parametrize("field", ["receipts", "owing"])
async def test_an_answer_that_names_more_peers_than_there_are_stages_is_no_answer(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = StageServer._run_task

    async def crowded(self: StageServer, work: Any) -> Any:
        answer = await honest(self, work)
        if answer is None or work.holding.stage == 0:
            return answer
        many = {"receipts": ("r",) * 512, "owing": (self.member.node.peer_id,) * 512}
        header = answer.header.model_copy(update={field: many[field]})
        return replace(answer, header=header)

    monkeypatch.setattr(StageServer, "_run_task", crowded)
    async with world() as w, w.peer(0) as first, w.peer(1), w.peer(0) as trainer:
        w.publish(trainer)
        w.missing = (0, 1)
        with pytest.raises(MicrobatchAbandoned, match="of 1 stages"):
            await w.downstream(trainer, 0).send(parcel(3))
        assert first.worker.accumulated == []


async def test_a_peer_whose_line_takes_longer_than_its_device_gets_as_much_as_its_line_takes() -> (
    None
):
    async with world() as w, w.peer(0) as sender, w.peer(1) as thin, w.peer(1) as wide:
        thin.uplink_seconds, wide.uplink_seconds = 30.0, 10.0
        downstream = w.downstream(sender, 1)
        microbatches = iter(range(20))
        while not (thin.worker.accumulated and wide.worker.accumulated):
            await downstream.send(parcel(next(microbatches)))
        thin.worker.entered = trio.Event()
        thin.worker.forwards.clear()
        wide.worker.forwards.clear()
        thin.worker.hold = wide.worker.hold = trio.Event()
        async with trio.open_nursery() as nursery:
            for microbatch in range(20, 23):
                nursery.start_soon(downstream.send, parcel(microbatch))
            with trio.fail_after(5):
                await thin.worker.entered.wait()
            wide.worker.hold.set()
    # Two there would be done before one at the other, and that is all it may be given.
    assert len(wide.worker.forwards) == 2
    assert len(thin.worker.forwards) == 1


async def test_a_peer_that_dies_is_replaced_and_only_the_masked_stages_count_again() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as survivor:
        w.missing = ()  # the dead one had counted it and reported, the coordinator says
        async with w.peer(1) as dying:
            dying.worker.hold = trio.Event()
            survivor.worker.hold = trio.Event()
            somebody = dying.worker.entered = survivor.worker.entered = trio.Event()
            sender.holding.next_stage = w.downstream(sender, 1)
            async with trio.open_nursery() as nursery:
                answers: list[object] = []

                async def send() -> None:
                    assert sender.holding.next_stage is not None
                    answers.append(await sender.holding.next_stage.send(parcel(5)))

                nursery.start_soon(send)
                await somebody.wait()
                first, other = (dying, survivor) if dying.worker.forwards else (survivor, dying)
                assert other.worker.hold is not None
                other.worker.hold.set()
                await first.node.disconnect(sender.identity.peer_id)
    assert len(answers) == 1
    assert w.masks == [(1, 5)]
    assert first.worker.forwards == [(5, True)]
    assert other.worker.forwards == [(5, False)]  # computed and passed on, not counted
    assert other.worker.accumulated == []


@pytest.mark.parametrize("why", ["full", "paused"])
async def test_a_peer_that_is_busy_is_passed_over_without_a_mask_until_it_has_room(
    why: str,
) -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as busy, w.peer(1) as free:
        busy.holding.in_flight, busy.server.paused = (3, False) if why == "full" else (0, True)
        downstream = w.downstream(sender, 1)
        for microbatch in range(4):
            await downstream.send(parcel(microbatch))
        assert free.worker.accumulated == [0, 1, 2, 3]
        assert busy.worker.forwards == []
        assert busy.server.refused[RefusalReason.BUSY] >= 1
        assert w.masks == []
        busy.holding.in_flight, busy.server.paused = 0, False
        w.publish(free)
        await downstream.send(parcel(4))
    assert busy.worker.accumulated == [4]


async def test_a_peer_that_has_not_applied_yet_is_asked_again_until_it_has() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as slow:

        async def catch_up() -> None:
            await until(lambda: slow.server.refused[RefusalReason.WRONG_STEP] >= 2)
            slow.holding.account.applied(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(catch_up)
            await w.downstream(sender, 1).send(parcel(0, step=2))
    assert slow.worker.accumulated == [0]


@pytest.mark.parametrize("wrong", ["another run", "another key", "garbage", "revoked"])
async def test_a_sender_without_a_certificate_of_this_run_is_not_admitted(wrong: str) -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as guarded:
        certificate = {
            "another run": certify(sender.identity, run="cd" * 32),
            "another key": certify(Identity.generate()),
            "garbage": "AAAA",
            "revoked": certify(sender.identity),
        }[wrong]
        if wrong == "revoked":
            guarded.view.replace(Roster(serial=1, peers=(), revoked=(sender.identity.peer_id,)))
        await send_until_refused(w.downstream(sender, 1, certificate), guarded, parcel())
    assert guarded.server.refused[RefusalReason.NOT_ADMITTED] >= 1
    assert guarded.worker.forwards == []


async def test_a_sender_that_is_revoked_later_is_refused_on_the_link_that_it_has() -> None:
    """Its connection is closed, too; but nothing that comes before that is served."""
    async with world() as w, w.peer(0) as sender, w.peer(1) as guarded:
        downstream = w.downstream(sender, 1)
        await downstream.send(parcel(0))
        guarded.view.replace(Roster(serial=1, peers=(), revoked=(sender.identity.peer_id,)))
        await send_until_refused(downstream, guarded, parcel(1))
    assert [microbatch for microbatch, _ in guarded.worker.forwards] == [0]
    assert guarded.server.refused[RefusalReason.NOT_ADMITTED] >= 1


async def test_a_receiver_that_is_revoked_in_the_middle_of_a_microbatch_is_replaced() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as revoked, w.peer(1) as other:
        revoked.worker.hold = trio.Event()  # it never answers
        other.worker.hold = trio.Event()
        w.publish(other)
        downstream = w.downstream(sender, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(downstream.send, parcel(4))
            await revoked.worker.entered.wait()
            members = tuple(p.record for p in w.peers if p is not revoked)
            w.roster.replace(Roster(serial=2, peers=members, revoked=(revoked.identity.peer_id,)))
            downstream.roster_changed()
            # What it has is cancelled there, although the other peer has not answered yet.
            await until(lambda: revoked.holding is None or not revoked.holding.in_flight)
            other.worker.hold.set()
    assert [microbatch for microbatch, _ in other.worker.forwards] == [4]


async def test_a_microbatch_that_is_already_held_is_not_counted_twice_and_shows_its_receipt() -> (
    None
):
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        downstream = w.downstream(sender, 1)
        first = await downstream.send(parcel(2))
        again = await downstream.send(parcel(2))
    assert last.worker.forwards == [(2, True), (2, False)]
    assert last.worker.accumulated == [2]
    assert first.header.receipts == again.header.receipts


@pytest.mark.parametrize("stage", [0, 1])
async def test_what_was_counted_for_a_sender_that_went_is_signed_for_the_next_that_asks(
    stage: int,
) -> None:
    """The worker had added it when its sender was lost; it will not add it again."""
    async with world() as w, w.peer(0) as first, w.peer(1) as last, w.peer(0) as sender:
        w.publish(sender)
        holder = (first, last)[stage]
        holder.worker.hold = trio.Event()
        async with w.peer(0) as lost:
            w.publish(sender, lost)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.downstream(lost, stage).send, parcel(7))
                await holder.worker.entered.wait()
                nursery.cancel_scope.cancel()
        holder.worker.accumulated.append(7)  # as the real one does, whoever waits for it
        holder.worker.hold.set()
        answer = await w.downstream(sender, stage).send(parcel(7))
    receipts = opened(answer.header.receipts)
    assert holder.identity.peer_id in {r.peer for r in receipts}
    assert holder.worker.accumulated == [7]


async def test_a_peer_that_was_not_asked_to_count_signs_nothing() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        answer = await w.downstream(sender, 1).send(parcel(2, accumulate=()))
    assert last.worker.forwards == [(2, False)]
    assert answer.header.receipts == ()


async def test_while_a_step_closes_the_next_one_is_counted_where_gradients_may_lag() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        downstream = w.downstream(sender, 1)
        await downstream.send(parcel(2))
        last.holding.account.staleness = 1
        last.holding.account.settle()
        late = await downstream.send(parcel(3))
        ahead = [await downstream.send(parcel(index, step=2)) for index in (2, 4, 4)]
    # What is held of one step does not affect the other.
    assert last.worker.forwards == [(2, True), (3, False), (2, True), (4, True), (4, False)]
    assert late.header.receipts == ()
    receipts = [one for answer in ahead for one in opened(answer.header.receipts)]
    assert [(r.step, r.microbatch) for r in receipts] == [(2, 2), (2, 4), (2, 4)]
    assert len(last.holding.account.take_unreported()) == 3
    assert (last.holding.account.count(1), last.holding.account.count(2)) == (1, 2)


async def test_a_step_too_far_ahead_is_refused() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        last.holding.account.staleness = 1
        stream = await raw_edge(w, sender, last)
        answers = []
        for request, step in ((1, 0), (2, 1), (3, 2), (4, 3)):
            await stream.send(forward(request, step=step), (INPUT, TARGETS))
            answers.append(await answer_to(stream))
    refused = [
        answer.request
        for answer in answers
        if isinstance(answer, StageRefused) and answer.reason is RefusalReason.WRONG_STEP
    ]
    assert refused == [1, 4]
    assert [microbatch for microbatch, _ in last.worker.forwards] == [2, 3]


async def test_a_payload_of_another_size_ends_the_link_and_reaches_no_worker() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        short = MicrobatchRequest(
            1, 0, (1,), INPUT[:-1], TARGETS, ticket(RUN, 1, 0, INPUT, TARGETS)
        )
        with pytest.raises(MicrobatchAbandoned, match="attempts to reach stage 1 failed"):
            await w.downstream(sender, 1).send(short)
    assert last.worker.forwards == []


async def test_credits_bound_what_one_sender_has_outstanding_at_one_receiver() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        last.worker.hold = trio.Event()
        downstream = w.downstream(sender, 1)
        async with trio.open_nursery() as nursery:
            for microbatch in range(5):
                nursery.start_soon(downstream.send, parcel(microbatch))
            await last.worker.entered.wait()
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert len(last.worker.forwards) == 2  # the credits that it granted
            last.worker.hold.set()
    assert sorted(last.worker.accumulated) == [0, 1, 2, 3, 4]


# Senders that do not keep to the rules


async def raw_edge(w: World, sender: Peer, receiver: Peer) -> FramedStream:
    """The hello is in order; what follows is up to the caller."""
    stream = await sender.node.open_stream(
        receiver.node.peer_id, STAGE_PROTOCOL, LIMITS, receiver.node.addresses
    )
    await stream.send(
        encode(StageHello(run=RUN, certificate=sender.membership.certificate)),
    )
    assert parse(stage_answers, (await stream.receive(10)).header).kind == "stage_hello_answer"
    return stream


def forward(request: int, stage: int = 1, **changes: object) -> bytes:
    message = Forward(
        request=request, step=1, microbatch=request, stage=stage, accumulate=(1,),
        input_bytes=len(INPUT), target_bytes=len(TARGETS), ticket="",
    ).model_copy(update=changes)  # fmt: skip
    leased = ticket(RUN, message.step, message.microbatch, INPUT, TARGETS)
    return encode(message.model_copy(update={"ticket": leased, **changes}))


async def send_without_end(stream: FramedStream) -> None:
    for request in itertools.count():
        await stream.send(forward(request), (INPUT, TARGETS), timeout_seconds=10)


async def answer_to(stream: FramedStream) -> object:
    return parse(stage_answers, (await stream.receive(10)).header)


@pytest.mark.parametrize("stage", [1, 2])
async def test_a_member_of_another_stage_than_the_one_before_has_no_business_here(
    stage: int,
) -> None:
    async with world(stages=3) as w, w.peer(stage) as sender, w.peer(1) as receiver:
        stream = await raw_edge(w, sender, receiver)
        await stream.send(forward(1), (INPUT, TARGETS))
        answer = await answer_to(stream)
        assert isinstance(answer, StageRefused)
        assert answer.reason is RefusalReason.WRONG_STEP
        # The roster that has it in the preceding stage had not arrived yet.
        moved = sender.record.model_copy(update={"stage": 0})
        receiver.view.replace(Roster(serial=2, peers=(moved, receiver.record)))
        receiver.holding.next_stage = None
        receiver.worker.is_last = True
        await stream.send(forward(2), (INPUT, TARGETS))
        assert isinstance(await answer_to(stream), Backward)
    assert [microbatch for microbatch, _ in receiver.worker.forwards] == [2]


async def test_a_member_that_is_in_no_stage_has_no_business_here() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(0) as receiver:
        receiver.view.replace(Roster(serial=2, peers=(receiver.record,)))
        stream = await raw_edge(w, sender, receiver)
        await stream.send(forward(1, stage=0), (INPUT, TARGETS))
        assert isinstance(await answer_to(stream), StageRefused)
    assert receiver.worker.forwards == []


async def test_who_sends_more_than_it_was_granted_is_cut_off() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        last.worker.hold = trio.Event()
        stream = await raw_edge(w, sender, last)
        with pytest.raises(LinkClosed):
            await send_without_end(stream)
        # The queue holds three; none of the remaining ones was kept for long.
        assert len(last.worker.forwards) <= w.manifest.limits.stage_queue
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert last.holding.in_flight == 0
        assert last.node.handler_errors == {}
        last.worker.hold.set()
        answer = await w.downstream(sender, 1).send(parcel(3))
    assert answer.header.receipts


async def test_who_does_not_read_its_answers_gives_its_places_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm_client.pipeline.stage_server.ANSWER_STALL_SECONDS", 0.5)
    big = 4 * 2**20
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        w.manifest.tokens_per_microbatch = w.manifest.activation_bytes = big
        last.worker.sizes.input_bytes = big
        payload = bytes(5 * big)
        stream = await raw_edge(w, sender, last)
        # Nothing is answered, and so nothing stalls, before all has been sent.
        last.worker.hold = trio.Event()
        for request in range(3):
            leased = ticket(RUN, 1, request, b"", bytes(4 * big))
            changes = {"input_bytes": big, "target_bytes": 4 * big, "ticket": leased}
            await stream.send(forward(request, **changes), payload, timeout_seconds=20)
        last.worker.hold.set()
        # The answers are as long as the inputs, and are not read.
        await until(lambda: len(last.worker.forwards) >= 3 and not last.holding.in_flight, 10)
        with pytest.raises(LinkClosed):
            await send_without_end(stream)
        assert last.node.handler_errors == {}


async def test_what_is_refused_is_not_kept_until_its_sender_reads_that() -> None:
    class Unread:
        def __init__(self, remote: str) -> None:
            self.remote = remote

        async def send(self, header: bytes, **limits: object) -> None:
            await trio.sleep_forever()

    async with world() as w, w.peer(0) as sender, w.peer(1) as last, trio.open_nursery() as nursery:
        payload = bytearray(100)
        before = sys.getrefcount(payload)
        message = parse(stage_requests, forward(1, step=9))
        scope = trio.CancelScope()
        stream: Any = Unread(sender.node.peer_id)
        serve = last.server._serve
        nursery.start_soon(serve, stream, message, payload, scope, {1: scope})
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert last.server.refused[RefusalReason.WRONG_STEP] == 1
        assert sys.getrefcount(payload) == before
        nursery.cancel_scope.cancel()


async def test_a_microbatch_of_a_wrong_size_ends_the_link_to_the_own_stage_alone() -> None:
    """The manifest of a new session can have another size than the samples."""
    async with world() as w, w.peer(0) as own:
        links = StageLinks(own.server.member, own.server, MaskClient(own))
        sending = Downstream(
            0, w.roster, links.open_edge, Masks(w).client, w.nursery,
            StageRouting(random.Random(1), 8),
        )  # fmt: skip
        sending.oldest_step_is(1)
        w.publish()
        with pytest.raises(MicrobatchAbandoned):
            await sending.send(replace(parcel(), targets=TARGETS[1:]))
        assert own.worker.accumulated == []


async def test_the_oldest_request_that_does_not_end_is_given_up_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_server, "ASSEMBLY_BYTES", 500)
    async with world() as w, w.peer(1) as last, w.peer(0) as first, w.peer(0) as other:

        async def begin(sender: Peer) -> tuple[FramedStream, bytes]:
            """A request without its last byte, and that byte."""
            stream = await sender.node.open_stream(
                last.node.peer_id, STAGE_PROTOCOL, LIMITS, last.node.addresses
            )
            await stream.send(encode(StageHello(run=RUN, certificate=certify(sender.identity))))
            await stream.receive()
            forward = Forward(
                request=1, step=1, microbatch=0, stage=1, accumulate=(1,), input_bytes=16,
                target_bytes=16, ticket="t" * 100,
            )  # fmt: skip
            whole = b"".join(encode_frame(encode(forward), INPUT + TARGETS))
            assert 250 < len(whole) < 500
            await stream._stream.write(whole[:-1])
            return stream, whole[-1:]

        begun = last.server._assembly_budget._held
        oldest, its_end = await begin(first)
        await until(lambda: len(begun) == 1)
        (one,) = begun
        newer, newer_end = await begin(other)
        await until(lambda: len(begun) == 1 and one not in begun)
        await newer._stream.write(newer_end)
        refused = parse(stage_answers, (await newer.receive()).header)
        assert isinstance(refused, StageRefused)
        await oldest._stream.write(its_end)
        with pytest.raises(LinkClosed):
            await oldest.receive()


async def test_a_request_that_is_refused_does_not_stay_in_memory() -> None:
    """Until the next one comes, which may be never."""

    class Payload(bytearray):
        pass

    async with world() as w, w.peer(1) as last, w.peer(0) as sender:
        hello = StageHello(run=RUN, certificate=certify(sender.identity))
        forward = Forward(
            request=1, step=1, microbatch=0, stage=1, accumulate=(1,), input_bytes=16,
            target_bytes=16, ticket="",
        )  # fmt: skip
        kept: list[weakref.ref[Payload]] = []

        async def receive(timeout_seconds: float | None = None) -> Frame:
            await trio.testing.wait_all_tasks_blocked()
            if not stream.received:
                stream.received = 1
                return Frame(encode(hello), bytearray())
            if not kept:
                payload = Payload(INPUT + TARGETS)
                kept.append(weakref.ref(payload))
                return Frame(encode(forward), payload)
            assert kept[0]() is None
            raise LinkClosed("it has seen enough")

        async def send(*_: object, **__: object) -> None:
            await trio.lowlevel.checkpoint()

        stream: Any = SimpleNamespace(
            remote=sender.node.peer_id, receive=receive, send=send, received=0,
            expect=lambda limits: None, assemble_within=lambda budget, most: None,
        )  # fmt: skip
        await last.server.handle(stream)
        assert last.server.refused
        assert kept
