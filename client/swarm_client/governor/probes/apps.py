"""Which of certain programs are running. Reads nothing while none is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarm_shared.base.clock import Clock, monotonic

NEW_PROCESS_SECONDS = 5.0
"""Age up to which a process is read at every call: a new process becomes another program (exec)
soon after its start, if at all."""
RECHECK_SECONDS = 10.0
"""Seconds between two readings of an older process; a part of them at each call."""

LONGEST_SHORT_NAME = 15
"""Linux truncates names to this length; psutil finds the rest, in ten times the time."""


def plain_name(name: str) -> str:
    """Return a name as it is compared: in lower case, without `.exe`."""
    return name.strip().lower().removesuffix(".exe")


@dataclass(slots=True)
class _Process:
    first_seen: float
    read_at: float = -1e9
    name: str = ""


class AppProbe:
    """Finds running applications by name, and reads each process as seldom as it can."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._processes: dict[int, _Process] = {}

    def running(self, wanted: Iterable[str]) -> frozenset[str]:
        """Return the names of applications, of those given, for which a process is running."""
        names = {plain_name(name): name for name in wanted}
        if not names:
            self._processes.clear()
            return frozenset()
        self._look()
        running = {process.name for process in self._processes.values()}
        return frozenset(name for plain, name in names.items() if plain in running)

    def _look(self) -> None:
        now = self._clock()
        before = self._processes
        # Processes older than this one are not about to exec; most are hours old.
        born = now if before else now - NEW_PROCESS_SECONDS
        self._processes = {pid: before.get(pid) or _Process(born) for pid in psutil.pids()}
        for pid, process in self._processes.items():
            young = now - process.first_seen < NEW_PROCESS_SECONDS
            # Spread by PID, so that not all are read at the same call.
            if young or now - process.read_at >= RECHECK_SECONDS + pid % 7:
                process.read_at, process.name = now, self._name(pid)

    def _name(self, pid: int) -> str:
        try:
            short = Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
        except (OSError, UnicodeDecodeError):
            short = ""
        if 0 < len(short) < LONGEST_SHORT_NAME:
            return plain_name(short)
        try:
            return plain_name(psutil.Process(pid).name())
        except (psutil.Error, OSError):
            return ""
