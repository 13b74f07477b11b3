"""Network outages for `swarm_client.fault_injection.faults`; imported only with a fault plan.

Bytes are held, not lost, as TCP does when a network loses every packet for a while. p2pd, which has
sockets of its own, is stopped for the same time.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import trio

from swarm_client.fault_injection.faults import continue_later
from swarm_shared.network.libp2p.tcp import BufferedTcpStream


class Outage:
    """An outage between this process and its connections; put in place by `install`."""

    def __init__(self) -> None:
        self._ends_at = 0.0

    def begin(self, seconds: float) -> None:
        self._ends_at = max(self._ends_at, trio.current_time() + seconds)
        p2pds = [
            child.pid
            for child in psutil.Process(os.getpid()).children(recursive=True)
            if child.name() == "p2pd"
        ]
        if p2pds:
            for pid in p2pds:
                os.kill(pid, signal.SIGSTOP)
            continue_later(p2pds, seconds)

    async def over(self) -> None:
        while (left := self._ends_at - trio.current_time()) > 0:
            await trio.sleep(left)


def install() -> Outage:
    """Make every connection of this process pass through the outage."""
    outage = Outage()
    read, write = BufferedTcpStream.read, BufferedTcpStream.write

    async def read_after(self: BufferedTcpStream, n: int | None = None) -> bytes:
        content = await read(self, n)
        await outage.over()
        return content

    async def write_after(self: BufferedTcpStream, data: bytes) -> Any:
        await outage.over()
        return await write(self, data)

    BufferedTcpStream.read = read_after  # type: ignore[method-assign]
    BufferedTcpStream.write = write_after  # type: ignore[method-assign]
    return outage
