"""Two of hivemind's p2pd: one behind a relay, and one that reaches it through that relay.

    python p2pd_pair.py FOLDER RELAY SIZE_BYTES

Prints the peer IDs of both, then, when the bytes went there and back, their number. asyncio, as
hivemind is.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.protocol.messages import ConfigureAveraging
from swarm_client.averaging.worker.hivemind_imports import load_hivemind
from swarm_client.averaging.worker.p2pd import ensure_identity, running_p2pd
from swarm_client.averaging.worker.p2pd_carrier import P2pdStreams
from swarm_shared.base.errors import NetworkError

ECHO = "/test/echo/1"
SLOT_SECONDS = 30.0


async def echo(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main(folder: Path, relay: str, size_bytes: int) -> None:
    hivemind = load_hivemind()
    async with AsyncExitStack() as stack:

        async def start(name: str, relays: tuple[str, ...]) -> Any:
            key = folder / f"{name}.key"
            ensure_identity(key)
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pd-"))
            settings = ConfigureAveraging(
                identity_path=str(key), socket_folder=sockets, trusted_relays=relays,
                host_addresses=("/ip4/127.0.0.1/tcp/0",),
            )  # fmt: skip
            p2p, _ = await stack.enter_async_context(running_p2pd(hivemind, settings, sys.stderr))
            return p2p

        hidden = await start("hidden", (relay,))
        await hidden.add_binary_stream_handler(ECHO, echo)
        caller = await start("caller", ())
        print(hidden.peer_id.to_base58(), caller.peer_id.to_base58(), flush=True)
        streams = P2pdStreams(hivemind, caller, IncomingHub())
        async with asyncio.timeout(SLOT_SECONDS):
            while True:
                try:
                    peer = hidden.peer_id.to_base58()
                    await streams.connect(peer, [f"{relay}/p2p-circuit/p2p/{peer}"])
                    break
                except NetworkError:  # it has no slot yet
                    await asyncio.sleep(0.1)
        _, reader, writer = await caller.call_binary_stream_handler(hidden.peer_id, ECHO)
        sent = os.urandom(size_bytes)

        async def send() -> None:
            for start in range(0, size_bytes, 65_536):
                writer.write(sent[start : start + 65_536])
                await writer.drain()

        sending = asyncio.create_task(send())
        received = await reader.readexactly(size_bytes)
        await sending
        assert received == sent
        print(len(received), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
