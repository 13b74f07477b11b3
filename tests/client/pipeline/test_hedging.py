"""Overdue microbatches go to a second peer; the first answer is taken."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from client.pipeline.test_pipeline import Peer, parcel, world
from swarm_client.pipeline.errors import MicrobatchAbandoned
from swarm_client.pipeline.hedging import (
    MIN_OVERDUE_SECONDS,
    OVERDUE_SECONDS_PER_STAGE,
    UNKNOWN_LATENCY_SECONDS,
    LatencyEstimate,
)

SOON = 0.1


def impatient() -> LatencyEstimate:
    return LatencyEstimate(min_seconds=SOON, unknown_seconds=SOON)


async def held(*peers: Peer) -> Peer:
    """Which of these, all holding what they get, has been given the microbatch."""
    while not any(peer.worker.forwards for peer in peers):
        await trio.sleep(0.01)
    return next(peer for peer in peers if peer.worker.forwards)


async def test_what_a_stuck_peer_holds_is_answered_by_another_and_counted_where_it_is_missing() -> (
    None
):
    async with world() as w, w.peer(0) as sender, w.peer(1) as one, w.peer(1) as other:
        w.missing = (1,)
        one.worker.hold, other.worker.hold = trio.Event(), trio.Event()
        downstream = w.downstream(sender, 1, latency=impatient())
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await downstream.send(parcel(4), lambda: True)

            nursery.start_soon(send)
            stuck = await held(one, other)
            free = other if stuck is one else one
            assert free.worker.hold is not None
            free.worker.hold.set()
        assert free.worker.forwards == [(4, True)]
        assert w.masks == [(1, 4)]
        assert downstream.hedged == 1
        while stuck.holding is not None and stuck.holding.in_flight:
            await trio.sleep(0.01)  # it is called off
        assert stuck.worker.accumulated == []


async def test_an_answer_that_comes_late_but_first_is_taken_and_the_second_one_is_called_off() -> (
    None
):
    async with world() as w, w.peer(0) as sender, w.peer(1) as one, w.peer(1) as other:
        one.worker.hold, other.worker.hold = trio.Event(), trio.Event()
        downstream = w.downstream(sender, 1, latency=impatient())
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await downstream.send(parcel(4), lambda: True)

            nursery.start_soon(send)
            first = await held(one, other)
            second = other if first is one else one
            await held(second)
            assert first.worker.hold is not None
            first.worker.hold.set()
        assert first.worker.accumulated == [4]
        while second.holding is not None and second.holding.in_flight:
            await trio.sleep(0.01)
        assert second.worker.accumulated == []


async def test_nobody_gets_a_second_copy_while_others_wait_for_room() -> None:
    """Then a stage is busy, and one more copy would make it slower."""
    async with world() as w, w.peer(0) as sender, w.peer(1) as one, w.peer(1) as other:
        one.worker.hold, other.worker.hold = trio.Event(), trio.Event()
        downstream = w.downstream(sender, 1, latency=impatient())
        async with trio.open_nursery() as nursery:
            for microbatch in range(5):  # two credits at each, so that one waits

                async def send(microbatch: int = microbatch) -> None:
                    await downstream.send(parcel(microbatch), lambda: True)

                nursery.start_soon(send)
            await trio.sleep(6 * SOON)
            assert downstream.hedged == 0
            one.worker.hold.set()
            other.worker.hold.set()
    assert sorted(one.worker.accumulated + other.worker.accumulated) == [0, 1, 2, 3, 4]


async def test_the_only_peer_of_a_stage_is_waited_for() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as only:
        only.worker.hold = trio.Event()
        downstream = w.downstream(sender, 1, latency=impatient())
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await downstream.send(parcel(2), lambda: True)

            nursery.start_soon(send)
            await held(only)
            await trio.sleep(6 * SOON)
            only.worker.hold.set()
    assert only.worker.forwards == [(2, True)]
    assert downstream.hedged == 0


async def test_a_microbatch_without_an_answer_is_given_up_when_its_step_is_over() -> None:
    """Or what it takes up would be missing in the next step."""
    async with world() as w, w.peer(0) as sender, w.peer(1) as stuck:
        stuck.worker.hold = trio.Event()
        wanted = [True]
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                with pytest.raises(MicrobatchAbandoned):
                    await w.downstream(sender, 1).send(parcel(2), lambda: wanted[0])

            nursery.start_soon(send)
            await held(stuck)
            wanted[0] = False
        while stuck.holding is not None and stuck.holding.in_flight:
            await trio.sleep(0.01)


async def test_a_sender_that_has_given_its_stage_up_opens_no_more_links() -> None:
    async with world() as w, w.peer(0) as sender, w.peer(1) as last:
        downstream = w.downstream(sender, 1)
        downstream.close()
        with pytest.raises(MicrobatchAbandoned):
            await downstream.send(parcel(), lambda: True)
        assert last.worker.forwards == []


def test_what_is_late_follows_from_what_is_usual() -> None:
    latency = LatencyEstimate()
    assert latency.is_expected(UNKNOWN_LATENCY_SECONDS - 1, depth=1)
    assert not latency.is_expected(UNKNOWN_LATENCY_SECONDS, depth=1)
    for _ in range(50):
        latency.observe(0.1)
    assert latency.is_expected(MIN_OVERDUE_SECONDS - 0.1, depth=1)
    assert not latency.is_expected(MIN_OVERDUE_SECONDS, depth=1)
    # Whoever sends to the last stage acts before those upstream of it.
    assert latency.is_expected(MIN_OVERDUE_SECONDS, depth=2)
    assert not latency.is_expected(MIN_OVERDUE_SECONDS + OVERDUE_SECONDS_PER_STAGE, depth=2)
    for i in range(50):
        latency.observe(6.0 if i % 2 else 14.0)
    assert latency.is_expected(20.0, depth=1)
    assert not latency.is_expected(40.0, depth=1)
