"""Which of certain programs are running. Reads nothing while none is asked for."""

from __future__ import annotations

from collections.abc import Iterable
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
    return name.strip().lower().removesuffix(".exe")


class AppProbe:
    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._names: dict[int, str] = {}
        self._first_seen: dict[int, float] = {}
        self._read_at: dict[int, float] = {}

    def running(self, wanted: Iterable[str]) -> frozenset[str]:
        """Those of the names for which a process is running."""
        names = {plain_name(name): name for name in wanted}
        if not names:
            self._names.clear()
            self._first_seen.clear()
            self._read_at.clear()
            return frozenset()
        self._look()
        running = set(self._names.values())
        return frozenset(name for plain, name in names.items() if plain in running)

    def _look(self) -> None:
        now = self._clock()
        pids = set(psutil.pids())
        for gone in self._names.keys() - pids:
            for table in (self._names, self._first_seen, self._read_at):
                table.pop(gone, None)
        # Processes older than this one are not about to exec; most are hours old.
        born = now if self._first_seen else now - NEW_PROCESS_SECONDS
        for pid in pids:
            first = self._first_seen.setdefault(pid, born)
            young = now - first < NEW_PROCESS_SECONDS
            # Spread by PID, so that not all are read at the same call.
            due = now - self._read_at.get(pid, -1e9) >= RECHECK_SECONDS + pid % 7
            if young or due:
                self._read_at[pid] = now
                self._names[pid] = self._name(pid)

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
