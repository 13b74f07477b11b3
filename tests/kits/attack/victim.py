"""The attacked process from outside: its address, its memory, and whether it serves others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import trio

from kits.attack.raw import Target

FOLDER = Path(__file__).parents[2]
HELLO, ECHO = "/test/hello/1", "/test/echo/1"
MEGABYTE = 2**20
PATIENCE_SECONDS = 40.0


class Victim:
    """`python -m kits.attack.victim_program`, what it costs, and how honest peers fare there."""

    def __init__(self, popen: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self.target = Target.of(address)
        self._process = psutil.Process(popen.pid)
        self._before = self._process.memory_info().rss
        self.most_megabytes = 0.0
        self.served_seconds: list[float] = []
        self.refusals: list[str] = []

    def cpu_seconds(self) -> float:
        used = self._process.cpu_times()
        return used.user + used.system

    def sockets(self) -> int:
        return len(self._process.net_connections("tcp"))

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            grown = self._process.memory_info().rss - self._before
            self.most_megabytes = max(self.most_megabytes, grown / MEGABYTE)
            await trio.sleep(0.1)

    async def listen(self, honest: subprocess.Popen[bytes]) -> None:
        """To what the honest ones say, until cancelled."""
        assert honest.stdout is not None
        async with trio.lowlevel.FdStream(os.dup(honest.stdout.fileno())) as output:
            said = b""
            async for some in output:
                *lines, said = (said + some).split(b"\n")
                for line in lines:
                    what, _, rest = line.decode().partition(" ")
                    if what == "served":
                        self.served_seconds.append(float(rest))
                    else:
                        self.refusals.append(rest)

    async def served(self, more: int) -> None:
        """Returns when so many more honest peers have been served. TooSlowError otherwise."""
        wanted = len(self.served_seconds) + more
        with trio.fail_after(PATIENCE_SECONDS):
            while len(self.served_seconds) < wanted:
                await trio.sleep(0.05)


@contextmanager
def program(name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    popen = subprocess.Popen(
        [sys.executable, "-m", f"kits.attack.{name}", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=FOLDER, env=environment,
    )  # fmt: skip
    try:
        yield popen
        assert popen.poll() is None, f"{name} ended"
    finally:
        popen.kill()
        popen.communicate()


@asynccontextmanager
async def a_victim() -> AsyncIterator[Victim]:
    """Honest peers come and go all the time that the block takes, and afterwards."""
    with program("victim_program") as popen:
        assert popen.stdout is not None
        line = await trio.to_thread.run_sync(popen.stdout.readline)
        victim = Victim(popen, line.decode().strip())
        with program("honest_program", victim.address) as honest:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(victim.watch)
                nursery.start_soon(victim.listen, honest)
                await victim.served(2)
                yield victim
                await victim.served(3)
                nursery.cancel_scope.cancel()
