"""Bytes of two microbatches over a real connection in one process (frames, muxer, Noise), counted
in place of a socket.

The clock stands still and tasks run in a fixed order, so that the same code moves the same bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import trio
import trio.testing
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import X25519PrivateKey
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport as NoiseTransport

from benchmarks.counts.instructions import Cost, Meter
from benchmarks.counts.messages import backward, forward
from benchmarks.counts.world import identity
from swarm_shared.network import FramedStream, FrameLimits
from swarm_shared.network.framed_stream import LinkTraffic
from swarm_shared.network.libp2p.yamux import YamuxConnection, YamuxStream
from swarm_shared.protocol import STAGE_PROTOCOL, Backward, Forward, encode

STAGE = 1
LIMITS = FrameLimits(max_header_bytes=2**19, max_payload_bytes=2**24)

ResultT = TypeVar("ResultT")


class Pipe(ReadWriteCloser):  # type: ignore[misc]
    """One end of a wire; reads the requested number of bytes, as the socket's buffered reader."""

    def __init__(self) -> None:
        self.other: Pipe
        self.written_bytes = 0
        self._data = bytearray()
        self._arrived = trio.Event()
        self._ended = False

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.written_bytes += len(data)
        self.other._data += data
        self.other._arrived.set()

    async def read(self, n: int | None = None) -> bytes:
        wanted = 65_535 if n is None else n
        while len(self._data) < wanted and not self._ended:
            self._arrived = trio.Event()
            await self._arrived.wait()
        taken = bytes(self._data[:wanted])
        del self._data[:wanted]
        return taken

    async def close(self) -> None:
        self._ended = self.other._ended = True
        self._arrived.set()
        self.other._arrived.set()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Bytes of one message: `wire` left the sender's end, of which `least` are tensors."""

    least: int
    framed: int
    wire: int
    credits: int
    """Bytes sent back by the receiver's muxer, before encryption."""
    cost: Cost


def exchange_bytes() -> dict[str, int]:
    """Count a forward with its activation and a backward with its gradient."""
    found: dict[str, int] = {}
    for header in (forward(STAGE), backward(STAGE)):
        done = exchanged(header)
        found[f"{header.kind}: tensors"] = done.least
        found[f"{header.kind}: with its frame"] = done.framed
        found[f"{header.kind}: on the wire"] = done.wire
        found[f"{header.kind}: credits that come back"] = done.credits
    return found


def exchanged(header: Forward | Backward) -> Exchanged:
    """Count the second transfer over a connection: windows are open, caches are filled."""
    return run_alike(lambda: _exchange(header))


def run_alike(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run `work` under trio deterministically: trio randomises the order of task batches."""
    trio._core._run._r.seed(0)  # type: ignore[attr-defined]
    return trio.run(work, clock=trio.testing.MockClock(rate=0.0))


async def _exchange(header: Forward | Backward) -> Exchanged:
    size = forward(STAGE).input_bytes
    targets = bytes(forward(STAGE).target_bytes) if isinstance(header, Forward) else b""
    parts, encoded = (bytes(size), targets), encode(header)
    async with _connected() as (ours, theirs, pipe), trio.open_nursery() as nursery:
        stream = _framed(await ours.open_stream())
        nursery.start_soon(_take_all, theirs)
        await stream.send(encoded, parts)
        await trio.testing.wait_all_tasks_blocked()
        wire, credits = pipe.written_bytes, theirs.sent_bytes
        with Meter() as meter:
            await stream.send(encoded, parts)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return Exchanged(
        least=size, framed=12 + len(encoded) + size + len(targets),
        wire=pipe.written_bytes - wire, credits=theirs.sent_bytes - credits, cost=meter.cost,
    )  # fmt: skip


async def _take_all(connection: YamuxConnection) -> None:
    stream = _framed(await connection.accept_stream())
    while True:
        await stream.receive()


def _framed(muxed: object) -> FramedStream:
    assert isinstance(muxed, YamuxStream)
    return FramedStream(muxed, STAGE_PROTOCOL, LIMITS, LinkTraffic())


@asynccontextmanager
async def _connected() -> AsyncIterator[tuple[YamuxConnection, YamuxConnection, Pipe]]:
    ends = Pipe(), Pipe()
    ends[0].other, ends[1].other = ends[1], ends[0]
    keys = [_keys(number) for number in (1, 2)]
    ids = [ID.from_pubkey(pair.public_key) for pair, _ in keys]
    secured: dict[int, YamuxConnection] = {}

    async def secure(end: int) -> None:
        pair, noise_key = keys[end]
        transport = NoiseTransport(pair, noise_privkey=noise_key)
        raw = RawConnection(ends[end], initiator=end == 0)
        if end == 0:
            connection = await transport.secure_outbound(raw, ids[1])
        else:
            connection = await transport.secure_inbound(raw)
        secured[end] = YamuxConnection(connection, ids[1 - end], is_initiator=end == 0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(secure, 0)
        nursery.start_soon(secure, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(secured[0].start)
        nursery.start_soon(secured[1].start)
        await trio.testing.wait_all_tasks_blocked()
        yield secured[0], secured[1], ends[0]
        nursery.cancel_scope.cancel()


def _keys(number: int) -> tuple[KeyPair, X25519PrivateKey]:
    private = Ed25519PrivateKey.from_bytes(identity(number).private_seed)
    noise_key = X25519PrivateKey.from_bytes(bytes([number]) * 32)
    return KeyPair(private, private.get_public_key()), noise_key
