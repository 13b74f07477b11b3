"""The queue of the core's events: many tasks put, one task takes, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from swarm_coordinator.core.events import Command, Event, HeartbeatsReceived, PeerHeartbeat, Tick

TICK_SECONDS = 0.25
"""Seconds between ticks of the core."""
EVENTS_PER_TURN = 16
"""Events processed before other tasks run: about two milliseconds of work."""
EVENT_BUFFER = 4096
"""Capacity of the queue. While it is full, clients are not read from, which slows them down."""

MAX_HEARTBEATS = 16_384
"""Heartbeats of one event. The core may stand still, as while a disk is slow, and they go on."""


class EventQueue:
    """A bounded queue; only `take_all` takes events."""

    def __init__(self) -> None:
        self._put, self._events = trio.open_memory_channel[Event](EVENT_BUFFER)
        self._awaited: dict[int, tuple[trio.Event, list[Command]]] = {}
        """The events whose sender waits, by identity: each with what to set and the list to fill
        once its commands are carried out."""
        self._tick_queued = False
        self._queued_heartbeats: list[PeerHeartbeat] | None = None
        """The heartbeats of the event that is in the queue; None when none is."""
        self._heartbeats_taken = trio.Event()

    async def put(self, event: Event) -> None:
        """Put an event. Yields only while the queue is full: callers have just yielded."""
        try:
            self._put.send_nowait(event)
        except trio.WouldBlock:
            await self._put.send(event)

    async def put_heartbeat(self, heartbeat: PeerHeartbeat) -> None:
        """Put a heartbeat. All that arrive before the event is taken are one event; waits while it
        has MAX_HEARTBEATS."""
        while (
            self._queued_heartbeats is not None and len(self._queued_heartbeats) >= MAX_HEARTBEATS
        ):
            self._heartbeats_taken = trio.Event()
            await self._heartbeats_taken.wait()
        if self._queued_heartbeats is not None:
            self._queued_heartbeats.append(heartbeat)
            return
        self._queued_heartbeats = [heartbeat]
        try:
            await self.put(HeartbeatsReceived(self._queued_heartbeats))
        except BaseException:  # cancelled while the queue was full: the next one queues the event
            self._queued_heartbeats = None
            raise

    async def put_and_wait(self, event: Event) -> list[Command]:
        """Put an event and return the core's commands once all of them are carried out."""
        done, commands = self._awaited[id(event)] = trio.Event(), []
        await self._put.send(event)
        await done.wait()
        return commands

    def complete(self, event: Event, commands: list[Command]) -> None:
        """Resume the sender of this event, if it waits."""
        if awaited := self._awaited.pop(id(event), None):
            awaited[1].extend(commands)
            awaited[0].set()

    async def take_all(self, act_on: Callable[[Event], Awaitable[bool]]) -> None:
        """Pass events to `act_on`, in order, until it returns True."""
        while True:
            event = await self._events.receive()
            # Other tasks run whenever the queue is empty. Events that are ready are taken several
            # at a time, or ten thousand of them would need ten thousand turns of the event loop.
            for remaining in range(EVENTS_PER_TURN, -1, -1):
                if isinstance(event, Tick):
                    self._tick_queued = False
                elif isinstance(event, HeartbeatsReceived):
                    self._queued_heartbeats = None
                    self._heartbeats_taken.set()
                if await act_on(event):
                    return
                if not remaining:
                    break
                try:
                    event = self._events.receive_nowait()
                except trio.WouldBlock:
                    break

    async def tick(self) -> None:
        """Put a Tick every TICK_SECONDS until cancelled."""
        while True:
            await trio.sleep(TICK_SECONDS)
            # A second queued tick would only delay a core that is behind.
            if not self._tick_queued:
                self._tick_queued = True
                await self._put.send(Tick())
