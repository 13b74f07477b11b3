"""What takes real processes: a remote that is killed, and what reaches the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from swarm_shared.base.errors import LinkClosed
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, open_node

LIMITS = FrameLimits(max_payload_bytes=64 << 20)

REMOTE = """
import json, trio
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FrameLimits, open_node
limits = FrameLimits(max_payload_bytes=64 << 20)

async def echo(stream):
    while True:
        frame = await stream.receive()
        await stream.send(frame.header, frame.payload)

async def silent(stream):
    await trio.sleep_forever()

async def main():
    async with open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as node:
        node.serve("/test/echo/1", echo, limits)
        node.serve("/test/silent/1", silent, limits)
        print(json.dumps([node.peer_id, node.addresses]), flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@asynccontextmanager
async def remote_process() -> AsyncIterator[tuple[trio.Process, str, list[str]]]:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", REMOTE], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            received = await process.stdout.receive_some()
            assert received, "the remote process ended early"
            line += received
        peer, addresses = json.loads(line)
        yield process, peer, addresses
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


@pytest.mark.process
async def test_a_killed_remote_closes_its_links_at_once_whatever_they_were_doing() -> None:
    async with (
        remote_process() as (process, peer, addresses),
        open_node(Identity.generate()) as node,
        trio.open_nursery() as nursery,
    ):
        lost = trio.Event()
        node.on_disconnect.append(lambda remote: lost.set())
        closed: list[str] = []

        async def receiving(stream: FramedStream) -> None:
            with pytest.raises(LinkClosed):
                await stream.receive()
            closed.append("receiving")

        async def sending(stream: FramedStream) -> None:
            with pytest.raises(LinkClosed):
                await stream.send(b"", bytes(60 << 20))
            closed.append("sending")

        stream = await node.open_stream(peer, "/test/echo/1", LIMITS, addresses)
        await stream.send(b"hello", bytes(1 << 20))
        assert (await stream.receive()).header == b"hello"
        nursery.start_soon(receiving, stream)
        blocked = await node.open_stream(peer, "/test/silent/1", LIMITS)
        nursery.start_soon(sending, blocked)
        with trio.fail_after(10):
            while not blocked._stream.written_bytes:
                await trio.lowlevel.checkpoint()

        process.kill()
        with trio.fail_after(5):
            await lost.wait()
            while len(closed) < 2:
                await trio.lowlevel.checkpoint()
        assert not node.is_connected(peer)


TROUBLE = """
import logging
import trio
from swarm_shared.base.errors import NetworkError
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FrameLimits, open_node

async def main():
    async with (
        open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as server,
        open_node(Identity.generate()) as client,
    ):
        server.serve("/test/none/1", lambda stream: trio.sleep_forever(), FrameLimits())
        wrong = Identity.generate().peer_id
        address = server.addresses[0].removesuffix(f"/p2p/{server.peer_id}")
        for peer, addresses in ((wrong, [address]), (wrong, ["/ip4/127.0.0.1/tcp/1"])):
            try:
                await client.connect(peer, addresses)
            except NetworkError:
                pass
        stream = await client.open_stream(
            server.peer_id, "/test/none/1", FrameLimits(), server.addresses
        )
        try:
            await client.open_stream(server.peer_id, "/test/other/1", FrameLimits())
        except NetworkError:
            pass
        await server.disconnect(client.peer_id)

trio.run(main)
assert not logging.getLogger().handlers, "libp2p took over the root logger"
"""


@pytest.mark.process
async def test_libp2p_says_nothing_on_the_terminal_whatever_goes_wrong() -> None:
    result = await trio.run_process(
        [sys.executable, "-c", TROUBLE], capture_stdout=True, capture_stderr=True
    )
    assert (result.stdout, result.stderr) == (b"", b"")
