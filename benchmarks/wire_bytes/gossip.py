"""What p2pd's live connections have sent, as the kernel counts it (`ss`); nothing without it.

p2pd is hivemind's Go daemon, in which its DHT lives: its sockets are not this project's.
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
    """Sampled while the run goes on; `total_bytes` is the last that was seen of each socket."""

    def __init__(self, program: str = "p2pd") -> None:
        self._program = program
        self._sockets: dict[tuple[str, ...], int] = {}
        self.measurable = shutil.which("ss") is not None

    @property
    def total_bytes(self) -> int | None:
        return sum(self._sockets.values()) if self.measurable else None

    def sample(self) -> None:
        """Of processes that descend from this one: others may run swarms on the same machine."""
        if self.measurable:
            command = ["ss", "-tinpH"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            ours = {child.pid for child in psutil.Process().children(recursive=True)}
            self.take(done.stdout, ours)

    def take(self, text: str, processes: Collection[int]) -> None:
        """One socket on a line, and how it does on the next one."""
        owner: re.Match[str] | None = None
        ends: tuple[str, ...] = ()
        for line in text.splitlines():
            if not line[:1].isspace():
                owner, ends = _OWNER.search(line), tuple(line.split()[3:5])
            elif owner is not None and owner["name"] == self._program:
                sent = _SENT.search(line)
                if sent is not None and int(owner["pid"]) in processes:
                    self._sockets[(owner["pid"], *ends)] = int(sent[1])
