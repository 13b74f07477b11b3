"""The attacked process from outside: its address, its memory, and whether it serves others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import trio

from attack_kit.raw import Target
from swarm_shared.identity import Identity
from swarm_shared.network import FrameLimits, open_node

FOLDER = Path(__file__).parents[1]
HELLO, ECHO = "/test/hello/1", "/test/echo/1"
LIMITS = FrameLimits(max_header_bytes=512 * 1024)
MEGABYTE = 2**20


class Victim:
    """`python -m attack_kit.victim_program`, and what it costs."""

    def __init__(self, popen: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self.target = Target.of(address)
        self._process = psutil.Process(popen.pid)
        self._before = self._process.memory_info().rss
        self.most_megabytes = 0.0
        self.slowest_seconds = 0.0

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

    async def serves(self, identity: Identity | None = None) -> bool:
        """An honest newcomer says hello, and how long that takes is kept."""
        began = trio.current_time()
        async with open_node(identity or Identity.generate()) as node:
            stream = await node.open_stream(self.target.peer, HELLO, LIMITS, [self.address])
            await stream.send(b"good day")
            answer = await stream.receive(timeout_seconds=20)
        self.slowest_seconds = max(self.slowest_seconds, trio.current_time() - began)
        return answer.header == b"good day"

    async def serves_all_the_time(self) -> None:
        while True:
            assert await self.serves()
            await trio.sleep(0.3)


@asynccontextmanager
async def a_victim() -> AsyncIterator[Victim]:
    """Honest peers come and go all the time that the block takes, and must be served."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    popen = subprocess.Popen(
        [sys.executable, "-m", "attack_kit.victim_program"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=FOLDER, env=environment,
    )  # fmt: skip
    try:
        assert popen.stdout is not None
        line = await trio.to_thread.run_sync(popen.stdout.readline)
        victim = Victim(popen, line.decode().strip())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(victim.watch)
            nursery.start_soon(victim.serves_all_the_time)
            yield victim
            assert await victim.serves()
            nursery.cancel_scope.cancel()
        assert popen.poll() is None
    finally:
        popen.kill()
        popen.communicate()
