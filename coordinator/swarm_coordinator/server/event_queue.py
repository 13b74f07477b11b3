"""The one queue of events: many put, one task takes, strictly in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from swarm_coordinator.core.events import Command, Event, Tick

TICK_SECONDS = 0.25
EVENTS_PER_TURN = 16
"""About two milliseconds of work."""
EVENT_BUFFER = 4096
"""Events that wait for the core. When it is full, clients are not read from: they slow down."""


@dataclass(slots=True, eq=False)
class _PendingEvent:
    """Somebody waits for an event to have had its effect."""

    done: trio.Event = field(default_factory=trio.Event)
    commands: list[Command] = field(default_factory=list)


class EventQueue:
    """`take_all` is the one task that takes events off it."""

    def __init__(self) -> None:
        self._put, self._events = trio.open_memory_channel[Event](EVENT_BUFFER)
        self._awaited: dict[int, _PendingEvent] = {}
        self._tick_queued = False

    async def put(self, event: Event) -> None:
        """Waits for room only when there is none: its callers have just given others a turn."""
        try:
            self._put.send_nowait(event)
        except trio.WouldBlock:
            await self._put.send(event)

    async def put_and_wait(self, event: Event) -> list[Command]:
        """Hand the core an event; what it commanded, when all of that has been carried out."""
        awaited = self._awaited[id(event)] = _PendingEvent()
        await self._put.send(event)
        await awaited.done.wait()
        return awaited.commands

    def complete(self, event: Event, commands: list[Command]) -> None:
        """Whoever waits for this event goes on."""
        awaited = self._awaited.pop(id(event), None)
        if awaited is not None:
            awaited.commands = commands
            awaited.done.set()

    async def take_all(self, act_on: Callable[[Event], Awaitable[bool]]) -> None:
        """Take events in order until `act_on` says that this is the end."""
        while True:
            event = await self._events.receive()
            # Everybody who waits gets a turn between two events that are waited for; a few that
            # lie ready are taken together, or ten thousand clients wait for ten thousand turns.
            for left in range(EVENTS_PER_TURN, -1, -1):
                if isinstance(event, Tick):
                    self._tick_queued = False
                if await act_on(event):
                    return
                if not left:
                    break
                try:
                    event = self._events.receive_nowait()
                except trio.WouldBlock:
                    break

    async def tick(self) -> None:
        """Put a Tick now and then."""
        while True:
            await trio.sleep(TICK_SECONDS)
            # When the core is behind, a second tick that waits would only put it further behind.
            if not self._tick_queued:
                self._tick_queued = True
                await self._put.send(Tick())
