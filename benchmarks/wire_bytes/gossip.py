"""Bytes sent by p2pd's live connections, as counted by the kernel (`ss`); nothing without `ss`.

p2pd is hivemind's Go daemon and runs its DHT; this project has no access to its sockets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection

import psutil

_OWNER = re.compile(r'\(\("(?P<name>[^"]+)",pid=(?P<pid>\d+),fd=(?P<descriptor>\d+)\)')
_SENT = re.compile(r"\bbytes_sent:(\d+)")


class Gossip:
    """Samples during the run; `total_bytes` sums the last sample of each socket."""

    def __init__(self) -> None:
        self._sockets: dict[tuple[str, ...], int] = {}
        self.measurable = shutil.which("ss") is not None

    @property
    def total_bytes(self) -> int | None:
        return sum(self._sockets.values()) if self.measurable else None

    def sample(self) -> None:
        """Sample descendants of this process only: the machine may run other swarms."""
        if self.measurable:
            command = ["ss", "-tinpH"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            ours = {child.pid for child in psutil.Process().children(recursive=True)}
            self.take(done.stdout, ours)

    def take(self, text: str, processes: Collection[int]) -> None:
        """Parse `ss` output: a socket per line, followed by a line of its statistics."""
        owner: re.Match[str] | None = None
        ends: tuple[str, ...] = ()
        for line in text.splitlines():
            if not line[:1].isspace():
                owner, ends = _OWNER.search(line), tuple(line.split()[3:5])
            elif owner is not None and owner["name"] == "p2pd":
                sent = _SENT.search(line)
                if sent is not None and int(owner["pid"]) in processes:
                    self._sockets[(owner["pid"], *ends)] = int(sent[1])
