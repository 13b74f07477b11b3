"""The queue of the core's events: heartbeats become one event, and none is lost for good."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from swarm_coordinator.core.events import (
    Event,
    HeartbeatsReceived,
    PeerHeartbeat,
    SessionNumber,
    Tick,
)
from swarm_coordinator.server import event_queue
from swarm_coordinator.server.event_queue import EVENT_BUFFER, EventQueue
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import Heartbeat


def beat(number: int) -> PeerHeartbeat:
    return PeerHeartbeat(SessionNumber(number), PeerId(f"peer {number}"), Heartbeat())


async def taken(queue: EventQueue, count: int) -> list[Event]:
    """The next `count` events."""
    found: list[Event] = []

    async def act_on(event: Event) -> bool:
        found.append(event)
        return len(found) == count

    await queue.take_all(act_on)
    return found


async def test_heartbeats_before_the_event_is_taken_are_one_event() -> None:
    queue = EventQueue()
    for number in range(3):
        await queue.put_heartbeat(beat(number))
    await queue.put(Tick())
    assert await taken(queue, 2) == [HeartbeatsReceived([beat(0), beat(1), beat(2)]), Tick()]
    await queue.put_heartbeat(beat(3))
    assert await taken(queue, 1) == [HeartbeatsReceived([beat(3)])]


async def test_a_session_that_ends_at_a_full_queue_takes_no_later_heartbeats_with_it() -> None:
    queue = EventQueue()
    for _ in range(EVENT_BUFFER):
        await queue.put(Tick())
    with trio.move_on_after(0) as scope:
        await queue.put_heartbeat(beat(0))
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.put_heartbeat, beat(1))
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(5):
            assert (await taken(queue, EVENT_BUFFER + 1))[-1] == HeartbeatsReceived([beat(1)])


async def test_no_more_heartbeats_wait_than_an_event_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_queue, "MAX_HEARTBEATS", 3)
    queue, put = EventQueue(), 0

    async def flood() -> None:
        nonlocal put
        for number in range(7):
            await queue.put_heartbeat(beat(number))
            put += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        await trio.testing.wait_all_tasks_blocked()
        assert put == 3
        events = await taken(queue, 3)
    heard = [one for event in events if isinstance(event, HeartbeatsReceived)
             for one in event.heartbeats]  # fmt: skip
    assert heard == [beat(number) for number in range(7)]
