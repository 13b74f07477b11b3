"""Detects that this program was interrupted: the machine slept, or the program was stopped (trio).

After an interruption the links are closed and the stage is given to another peer; the volunteer
joins again by itself. This module only detects the interruption for the report. Three clocks
distinguish the cases: one that stands still while the machine sleeps, one that does not, and the
calendar's for people.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from swarm_client.control.status_document import InterruptionView
from swarm_shared.base.clock import Clock, clock_through_sleep, monotonic, wall
from swarm_shared.base.text import duration_text

CHECK_SECONDS: Final = 2.0
"""Seconds between two checks."""
MIN_INTERRUPTION_SECONDS: Final = 10.0
"""Shortest reported interruption. A fully loaded machine delays a program, but not for this long,
and a run hardly notices shorter ones."""
SHOWN_SECONDS: Final = 600.0
"""Seconds for which an interruption explains why no stage is held yet."""


@dataclass(slots=True, eq=False)
class SleepWatch:
    """Run `run` beside the code that may be interrupted."""

    on_return: Callable[[InterruptionView], None]
    calendar: Clock = wall
    awake: Clock = monotonic
    always: Clock = clock_through_sleep
    _last: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._last = (self.awake(), self.always())

    async def run(self) -> None:
        while True:
            await trio.sleep(CHECK_SECONDS)
            self.check()

    def check(self) -> None:
        """Called every CHECK_SECONDS; a longer gap between two calls is an interruption."""
        awake, always = self.awake(), self.always()
        before, self._last = self._last, (awake, always)
        asleep = max(0.0, (always - before[1]) - (awake - before[0]))
        stopped = max(0.0, awake - before[0] - CHECK_SECONDS)
        if asleep + stopped >= MIN_INTERRUPTION_SECONDS:
            seconds = asleep + stopped
            slept = asleep >= stopped
            what = "this machine slept" if slept else "this program was stopped"
            self.on_return(
                InterruptionView(
                    began=self.calendar() - seconds, seconds=seconds, slept=slept,
                    sentence=f"{what} for {duration_text(seconds)}",
                )
            )  # fmt: skip
