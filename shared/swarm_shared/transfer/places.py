"""How many answers a holder has in memory at once, and which one gives way."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio


class Places:
    """Places of answers. While others wait, the ones that were begun first have `turn_seconds`
    each: requesters that read nothing keep no place from those that do."""

    def __init__(self, count: int, turn_seconds: float) -> None:
        self._free = trio.Semaphore(count)
        self._turn_seconds = turn_seconds
        self._begun: dict[trio.CancelScope, float] = {}
        """Answers that have a place, with their beginning, the oldest first."""
        self._waiting = 0

    async def run(self, work: Callable[[], Awaitable[bool]]) -> bool:
        """Do the work in a place, in turn, and return its result; False if it had to give way."""
        await self._take()
        with trio.CancelScope() as scope:
            self._begun[scope] = trio.current_time()
            self._set_deadlines()
            try:
                return await work()
            finally:
                del self._begun[scope]
                self._free.release()
        return False

    async def _take(self) -> None:
        if self._free.value:
            self._free.acquire_nowait()
            return
        self._waiting += 1
        self._set_deadlines()
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
            self._set_deadlines()

    def _set_deadlines(self) -> None:
        for place, (scope, begun) in enumerate(self._begun.items()):
            scope.deadline = begun + self._turn_seconds if place < self._waiting else math.inf
