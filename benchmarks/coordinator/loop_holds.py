"""Profiler of a trio loop: time per task, and long single occupations of the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from swarm_shared.base.clock import Clock

LONG_SECONDS = 0.005
SHOWN = 15


class LoopHolds(trio.abc.Instrument):
    """Reads the clock twice per step: shares are right, sums include its own cost."""

    def __init__(self, clock: Clock) -> None:
        self.watching = False
        self._clock = clock
        self._began = 0.0
        self._seconds: dict[str, float] = {}
        self._steps: Counter[str] = Counter()
        self._long: list[tuple[float, str, str]] = []
        self._doing = ""

    def does(self, what: str) -> None:
        """Set a label for the current step."""
        self._doing = what

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._doing = ""
        self._began = self._clock()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self.watching:
            return
        took = self._clock() - self._began
        name = task.name.removeprefix("swarm_coordinator.")
        self._seconds[name] = self._seconds.get(name, 0.0) + took
        self._steps[name] += 1
        if took > LONG_SECONDS:
            self._long.append((took, name, self._doing))

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.watching = True
        yield
        self.watching = False

    def lines(self) -> list[str]:
        found = ["      s     steps  us each  task"]
        for name, seconds in sorted(self._seconds.items(), key=lambda item: -item[1])[:SHOWN]:
            steps = self._steps[name]
            found.append(f"{seconds:7.2f} {steps:9,} {1e6 * seconds / steps:8.1f}  {name}")
        held: dict[str, list[float]] = {}
        for took, name, doing in self._long:
            held.setdefault(f"{name} {doing}".strip(), []).append(took)
        found.append(f"held for more than {1e3 * LONG_SECONDS:.0f} ms:")
        found.append("  times  longest ms  all s  task")
        for what, times in sorted(held.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
            found.append(f"{len(times):7} {1e3 * max(times):11.0f} {sum(times):6.2f}  {what}")
        return found
