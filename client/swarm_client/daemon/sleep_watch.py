"""Notices that this program was away: the machine slept, or the program was stopped (trio).

Whoever comes back finds its links closed and its place given to others, and joins again by itself;
here is only what a person is told of it. Three clocks tell the cases apart: one that stands still
while the machine sleeps, one that does not, and the calendar's for people.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from swarm_shared.base.clock import Clock, monotonic, wall
from swarm_shared.base.units import duration_text

CHECK_SECONDS: Final = 2.0
MIN_INTERRUPTION_SECONDS: Final = 10.0
"""A machine whose cores are all busy lets a program wait, but not for so long; and a run hardly
notices shorter ones."""
SHOWN_SECONDS: Final = 600.0
"""For so long it is a reason why a stage is not held yet."""


def clock_through_sleep() -> float:
    """Seconds of a clock that goes on while the machine sleeps and that nobody sets."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # Unlike Python's own, which stands still there.
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return wall()


@dataclass(frozen=True, slots=True)
class Interruption:
    began: float
    """Unix seconds."""
    seconds: float
    slept: bool
    """The machine did; else only this program was stopped."""

    @property
    def sentence(self) -> str:
        what = "this machine slept" if self.slept else "this program was stopped"
        return f"{what} for {duration_text(self.seconds)}"


class SleepWatch:
    """Run `run` beside what may be away."""

    def __init__(
        self,
        on_return: Callable[[Interruption], None],
        calendar: Clock = wall,
        awake: Clock = monotonic,
        always: Clock = clock_through_sleep,
    ) -> None:
        self._on_return = on_return
        self._calendar = calendar
        self._awake = awake
        self._always = always
        self._last = (awake(), always())

    async def run(self) -> None:
        while True:
            await trio.sleep(CHECK_SECONDS)
            self.check()

    def check(self) -> None:
        """Called every CHECK_SECONDS; that it was not is what it notices."""
        awake, always = self._awake(), self._always()
        before, self._last = self._last, (awake, always)
        asleep = max(0.0, (always - before[1]) - (awake - before[0]))
        stopped = max(0.0, awake - before[0] - CHECK_SECONDS)
        if asleep + stopped >= MIN_INTERRUPTION_SECONDS:
            seconds = asleep + stopped
            began = self._calendar() - seconds
            self._on_return(Interruption(began, seconds, slept=asleep >= stopped))
