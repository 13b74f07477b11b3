"""Runs hivemind's p2pd as a volunteer's averaging worker does, controlled by lines of JSON.

    python -m benchmarks.net.p2pd_program FOLDER [RELAY…]

It uses asyncio, as hivemind does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kits.network_lab.commanded_process import obey, say
from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.protocol.messages import ConfigureAveraging
from swarm_client.averaging.worker.hivemind_imports import Hivemind, load_hivemind
from swarm_client.averaging.worker.p2pd import ensure_identity, running_p2pd
from swarm_client.averaging.worker.p2pd_carrier import P2pdStreams, current_addresses
from swarm_shared.base.errors import SwarmError

SINK = "/lab/sink/1"
WRITE_BYTES = 64 * 2**10
"""Bytes per write, as in the all-reduce."""
LAST = b"last"


async def sink(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the number of bytes announced by the first eight, then answer."""
    left = int.from_bytes(await reader.readexactly(8), "big")
    while left:
        chunk = await reader.read(2**20)
        if not chunk:
            return
        left -= len(chunk)
    writer.write(LAST)
    await writer.drain()
    writer.close()


class Program:
    def __init__(self, hivemind: Hivemind, p2p: Any, relays: tuple[str, ...]) -> None:
        self._hivemind = hivemind
        self._p2p = p2p
        self._streams = P2pdStreams(hivemind, p2p, IncomingHub())
        self._relays = relays

    async def do(self, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await getattr(self, f"do_{what}")(**arguments)
        return answer

    async def do_tell(self) -> dict[str, Any]:
        return {
            "peer": self._p2p.peer_id.to_base58(),
            "addresses": await current_addresses(self._streams, self._relays),
        }

    async def do_connect(self, peer: str, addresses: list[str]) -> dict[str, Any]:
        await self._streams.connect(peer, addresses)
        return {}

    async def do_send(self, peer: str, size_bytes: int, frame_bytes: int) -> dict[str, Any]:
        identity = self._hivemind.PeerID.from_base58(peer)
        _, reader, writer = await self._p2p.call_binary_stream_handler(identity, SINK)
        payload = memoryview(os.urandom(frame_bytes))
        writer.write((size_bytes // frame_bytes * frame_bytes).to_bytes(8, "big"))
        for _ in range(size_bytes // frame_bytes):
            for start in range(0, frame_bytes, WRITE_BYTES):
                writer.write(payload[start : start + WRITE_BYTES])
                await writer.drain()
        await reader.readexactly(len(LAST))
        writer.close()
        return {}


async def standard_input() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await reader.readline():
        yield line


async def main(folder: Path, relays: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    hivemind = load_hivemind()
    key = folder / "p2pd.key"
    ensure_identity(key)
    # The path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="p2pd-") as sockets:
        settings = ConfigureAveraging(
            identity_path=str(key), socket_folder=sockets, trusted_relays=relays
        )
        async with running_p2pd(hivemind, settings, sys.stderr) as (p2p, _):
            program = Program(hivemind, p2p, relays)
            await p2p.add_binary_stream_handler(SINK, sink)
            say(await program.do_tell())
            expected: tuple[type[Exception], ...]
            expected = (SwarmError, *hivemind.daemon_errors, asyncio.IncompleteReadError)
            await obey(standard_input(), program.do, expected)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), tuple(sys.argv[2:])))
