"""What `swarm_client.pipeline.downstream` adds to the rules: requests that are cancelled at their
receivers, tensors that nothing uses any more, questions that end with the session.

The rules themselves: `tests/shared/volunteer_rules/test_delivery.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import trio
import trio.testing

from client.pipeline.test_pipeline import RUN, Peer, parcel, world
from kits.tickets import ticket
from kits.waiting import until
from swarm_client.pipeline.downstream import MicrobatchAbandoned, MicrobatchRequest
from swarm_client.pipeline.edge import EdgeAnswer, Stream
from swarm_client.pipeline.mask_client import MaskClient
from swarm_client.pipeline.trainer import Trainer
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.protocol import (
    Lease,
    LeasedMicrobatch,
    LeaseResult,
    Mask,
    MaskRequest,
)
from swarm_shared.volunteer_rules.latency import LatencyEstimate

SOON = 0.1


def impatient() -> LatencyEstimate:
    return LatencyEstimate(min_seconds=SOON, unknown_seconds=SOON)


async def held(*peers: Peer) -> Peer:
    """Which of these, all holding what they get, has been given the microbatch."""
    await until(lambda: any(peer.worker.forwards for peer in peers))
    return next(peer for peer in peers if peer.worker.forwards)


async def relieved(peer: Peer) -> None:
    """Wait until what the peer has in flight is cancelled."""
    await until(lambda: peer.holding is None or not peer.holding.in_flight)


async def test_what_a_stuck_peer_holds_is_answered_by_another_and_counted_where_it_is_missing() -> (
    None
):
    async with world() as w, w.peer(0) as sender, w.peer(1) as one, w.peer(1) as other:
        w.missing = (0, 1)
        one.worker.hold, other.worker.hold = trio.Event(), trio.Event()
        downstream = w.downstream(sender, 1, latency=impatient())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(downstream.send, parcel(4))
            stuck = await held(one, other)
            free = other if stuck is one else one
            assert free.worker.hold is not None
            free.worker.hold.set()
        assert free.worker.forwards == [(4, True)]
        assert w.masks == [(1, 4)]
        assert downstream._dispatcher.hedged == 1
        await relieved(stuck)
        assert stuck.worker.accumulated == []


@pytest.mark.parametrize("how", ["its step is over", "the sender is cancelled", "it closes"])
async def test_a_microbatch_that_is_not_wanted_any_more_is_cancelled_at_its_receiver(
    how: str,
) -> None:
    """Or the room that it takes would be missing in the next step."""
    async with world() as w, w.peer(0) as sender, w.peer(1) as stuck:
        stuck.worker.hold = trio.Event()
        downstream = w.downstream(sender, 1)
        ended: list[str] = []

        async def send(scope: trio.CancelScope) -> None:
            with scope:
                try:
                    await downstream.send(parcel(2))
                except MicrobatchAbandoned as error:
                    ended.append(str(error))

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(send, scope)
            await held(stuck)
            if how == "its step is over":
                downstream.oldest_step_is(Step(2))
            elif how == "it closes":
                downstream.close()
            else:
                scope.cancel()
        await relieved(stuck)
        assert (
            ended
            == {
                "its step is over": ["the step is over"],
                "the sender is cancelled": [],
                "it closes": ["this peer has given up its stage"],
            }[how]
        )


class SlowStream:
    """A stream that takes a payload slowly, and shows whether it is still reading the tensor."""

    def __init__(self, stream: Stream, reading: list[object]) -> None:
        self._stream, self._reading = stream, reading
        self.remote, self.superseded = stream.remote, False
        self.receive, self.close, self.reset = stream.receive, stream.close, stream.reset

    async def send(self, header: bytes, payload: tuple[bytes, ...] = ()) -> None:
        if payload and self._reading:
            self._reading.append(payload)
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                self._reading.remove(payload)
        elif payload:
            self._reading.append("the first is sent at once")
        await self._stream.send(header, payload)


async def test_when_a_send_returns_no_request_reads_its_tensor_any_more() -> None:
    """The tensor is a slot in shared memory, which gets the next one's bytes: a hedge that is sent
    late would be of another microbatch."""
    async with world() as w, w.peer(0) as sender, w.peer(1) as one, w.peer(1) as other:
        w.missing = (1,)
        one.worker.hold = other.worker.hold = trio.Event()
        reading: list[object] = []
        downstream = w.downstream(
            sender, 1, latency=impatient(), wrap=lambda stream: SlowStream(stream, reading)
        )
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await downstream.send(parcel(4))
                assert len(reading) == 1

            nursery.start_soon(send)
            await until(lambda: len(reading) >= 2)
            one.worker.hold.set()


async def test_over_a_better_link_the_next_microbatch_takes_a_new_edge() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        downstream = w.downstream(sender, 1)
        await downstream.send(parcel(0))
        (first,) = downstream._edges.values()
        first._stream = SlowStream(first._stream, [])  # type: ignore[assignment]
        first._stream.superseded = True  # type: ignore[misc]
        await downstream.send(parcel(1))
        (second,) = downstream._edges.values()
        assert second is not first
        await until(lambda: first.closed)
    assert last.worker.accumulated == [0, 1]


async def test_a_trainer_hands_back_what_is_of_a_step_that_is_over() -> None:
    async with world() as w, w.peer(0) as stuck, w.peer(0) as trainer:
        w.publish(trainer)
        stuck.worker.hold = trio.Event()
        coordinator = RecordingCoordinator()
        training = Trainer(coordinator, w.nursery)
        training.oldest_step_is(Step(1))
        training.begin(OneSample(), w.downstream(trainer, 0))
        training.take(lease(3))
        await held(stuck)
        training.oldest_step_is(Step(2))
        await coordinator.reported.wait()
        await relieved(stuck)
    results = [(r.step, r.microbatch, r.lease, r.ok) for r in coordinator.results]
    assert results == [(1, 3, 7, False)]


SAMPLE = np.arange(4, dtype="<u4").tobytes()


def lease(*microbatches: int, step: int = 1, is_copy: bool = False) -> Lease:
    """A lease of microbatches that have one sample, one at a time."""
    leased = tuple(
        LeasedMicrobatch(
            microbatch=MicrobatchIndex(index), accumulate=(StageIndex(0),),
            ticket=ticket(RUN, step, index, SAMPLE, SAMPLE), is_copy=is_copy,
        )
        for index in microbatches
    )  # fmt: skip
    return Lease(step=Step(step), lease=7, microbatches=leased, window=1, max_window=1)


@pytest.mark.parametrize("is_copy", [False, True])
async def test_that_a_lease_is_of_a_copy_reaches_the_senders_of_every_stage(
    is_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on: list[bool] = []
    async with world() as w, w.peer(0) as first, w.peer(1), w.peer(0) as trainer:
        w.publish(trainer)
        behind = first.holding.next_stage
        assert behind is not None
        send = behind.send

        async def recorded(request: MicrobatchRequest) -> EdgeAnswer:
            passed_on.append(request.is_copy)
            return await send(request)

        monkeypatch.setattr(behind, "send", recorded)
        coordinator = RecordingCoordinator()
        training = Trainer(coordinator, w.nursery)
        training.oldest_step_is(Step(1))
        training.begin(OneSample(), w.downstream(trainer, 0))
        training.take(lease(3, is_copy=is_copy))
        with trio.fail_after(10):
            await coordinator.reported.wait()
    assert [result.ok for result in coordinator.results] == [True]
    assert passed_on == [is_copy]


async def test_a_trainer_announces_a_lease_to_its_data_and_takes_the_announcement_back() -> None:
    async with world() as w, w.peer(0) as trainer:
        w.publish(trainer)
        samples, coordinator = WithoutData(), RecordingCoordinator()
        training = Trainer(coordinator, w.nursery)
        training.begin(samples, w.downstream(trainer, 0))
        training.take(lease(3))
        assert samples.calls == ["over None", "expect 1"]
        with trio.fail_after(10):
            await coordinator.reported.wait()
        assert [(one.ok, one.reason) for one in coordinator.results] == [(False, "no data here")]
        training.oldest_step_is(Step(2))
        training.pause()
        training.take(lease(3))
        assert samples.calls[2:] == ["over 2", "clear"], "a refused lease is not announced"


class RecordingCoordinator:
    """Keeps the results of leases."""

    def __init__(self) -> None:
        self.results: list[LeaseResult] = []
        self.reported = trio.Event()

    def send(self, message: LeaseResult) -> bool:
        self.results.append(message)
        self.reported.set()
        return True


class OneSample:
    async def drawn(self, step: Step, microbatch: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(4), np.arange(4)

    def expect(self, lease: Lease) -> None: ...

    def over(self, oldest: Step | None) -> None: ...

    def clear(self) -> None: ...


class WithoutData(OneSample):
    """Has no data, and records what is announced."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def drawn(self, step: Step, microbatch: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]:
        raise NetworkError("no data here")

    def expect(self, lease: Lease) -> None:
        self.calls.append(f"expect {lease.step}")

    def over(self, oldest: Step | None) -> None:
        self.calls.append(f"over {oldest}")

    def clear(self) -> None:
        self.calls.append("clear")


# Questions to the coordinator


class Session:
    """A link to the coordinator, or none."""

    def __init__(self, *, attached: bool = True) -> None:
        self.attached = attached
        self.sent: list[MaskRequest] = []

    def send(self, message: FrozenModel) -> bool:
        assert isinstance(message, MaskRequest)
        self.sent.append(message)
        return self.attached


def ask_one() -> tuple[MaskClient, list[MaskRequest]]:
    session = Session()
    return MaskClient(session), session.sent


async def test_a_mask_goes_to_the_question_that_it_answers() -> None:
    client, sent = ask_one()
    masks: dict[int, object] = {}

    async def ask(microbatch: int) -> None:
        masks[microbatch] = await client.ask(Step(3), MicrobatchIndex(microbatch))

    async with trio.open_nursery() as nursery:
        for microbatch in range(2):
            nursery.start_soon(ask, microbatch)
        await trio.testing.wait_all_tasks_blocked()
        assert {(r.step, r.microbatch) for r in sent} == {(3, 0), (3, 1)}
        for request in sent:
            client.answer(mask_for(request.request, request.microbatch))
    assert masks == {0: (0,), 1: (1,)}
    client.answer(mask_for(sent[0].request, 0))  # it is not asked any more


def mask_for(request: int, stage: int) -> Mask:
    return Mask(request=request, accumulate=(StageIndex(stage),))


async def test_a_question_ends_without_an_answer_when_its_session_does() -> None:
    """The next coordinator may be another process, which has no record of the question."""
    client, sent = ask_one()
    answers: list[object] = []

    async def ask() -> None:
        answers.append(await client.ask(Step(3), MicrobatchIndex(0)))

    with trio.fail_after(1.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert len(sent) == 1
            client.session_lost()
        assert answers == [None]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            client.answer(mask_for(sent[0].request, 1))  # of the lost session, and late
            client.answer(mask_for(sent[1].request, 2))
    assert answers == [None, (2,)]


async def test_a_question_without_a_session_has_no_answer() -> None:
    masks = MaskClient(Session(attached=False))
    assert await masks.ask(Step(3), MicrobatchIndex(0)) is None
