"""What the all-reduce needs from a network, and the waiting room for streams that come early.

A carrier opens byte streams to members and hands over the streams that members open to us. Who
is at the other end is authenticated by the carrier, before the first byte. Errors of a broken
stream are NetworkError (LinkClosed, LinkTimeout) or ProtocolError, from either loop.

`IncomingHub` serves all rounds of one carrier. A stream may arrive before the local side has
heard of its round. It then waits, unread while its remote is in no group known lately (nothing is
ever read from an outsider), and bounded in number and time. One that comes after its round has
failed is told why.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from swarm_client.averaging.frames import HELLO_BYTES, Hello
from swarm_client.averaging.plan import RoundSpec
from swarm_shared.errors import NetworkError, ProtocolError
from swarm_shared.types import PeerId

MAX_PARKED = 256
MAX_PARKED_PER_REMOTE = 8
"""A member opens one stream per round and reducer; attempts may overlap a little."""
PARK_SECONDS = 30.0
"""Longer than any member waits for another to join."""
HELLO_SECONDS = 5.0
FAREWELL_SECONDS = 1.0
_MAX_FINISHED = 64


class Channel(Protocol):
    """One authenticated, ordered, reliable byte stream."""

    async def send(self, data: bytes | memoryview) -> None:
        """Returns when the bytes are on their way and more may be sent (backpressure)."""

    async def receive(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """At least one byte, or nothing at the end of the stream."""

    async def aclose(self) -> None:
        """End the stream; what was sent still arrives."""

    async def abort(self) -> None:
        """Drop the stream at once; the remote's next read fails or ends. Never raises."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A stream that member `sender` opened to us for this round."""

    sender: PeerId
    hello: Hello
    channel: Channel


class Arrivals:
    """The streams of one round as they come."""

    def __init__(self, stream: MemoryObjectReceiveStream[Incoming]) -> None:
        self._stream = stream
        self.farewell = b""
        """For members that come after the round has failed: the ABORT frame they have missed."""

    async def receive(self) -> Incoming:
        return await self._stream.receive()

    def drop_undelivered(self) -> None:
        """The round is over; nobody will look at these."""
        while True:
            try:
                late = self._stream.receive_nowait()
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                break
            assert isinstance(late.channel, _Held)
            late.channel.drop(self.farewell)
        self._stream.close()


class Carrier(Protocol):
    """The network of one round."""

    async def open(self, peer: PeerId) -> Channel:
        """A new stream to a member of the round. NetworkError when it cannot be had."""

    def incoming(self, spec: RoundSpec, tag: bytes) -> AbstractContextManager[Arrivals]:
        """While open, streams of this round's members are delivered; others are refused."""


@dataclass(slots=True, eq=False)
class _Round:
    members: Mapping[str, PeerId]
    deliver: MemoryObjectSendStream[Incoming]


@dataclass(frozen=True, slots=True)
class _Finished:
    members: frozenset[str]
    farewell: bytes


class _Held:
    """A delivered channel: tells the hub when the round is done with it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.released = anyio.Event()
        self.dropped = False
        self.farewell = b""

    def drop(self, farewell: bytes) -> None:
        """Refused, or not looked at before the round ended; accept() says goodbye."""
        self.dropped = True
        self.farewell = farewell
        self.released.set()

    async def send(self, data: bytes | memoryview) -> None:
        await self._channel.send(data)

    async def receive(self, max_bytes: int) -> bytes | bytearray | memoryview:
        return await self._channel.receive(max_bytes)

    async def aclose(self) -> None:
        try:
            await self._channel.aclose()
        finally:
            self.released.set()

    async def abort(self) -> None:
        try:
            await self._channel.abort()
        finally:
            self.released.set()


class IncomingHub:
    """Brings incoming streams and rounds together. `remote` is the carrier's own peer name."""

    def __init__(self, *, park_seconds: float = PARK_SECONDS) -> None:
        self._park_seconds = park_seconds
        self._rounds: dict[bytes, _Round] = {}
        self._finished: OrderedDict[bytes, _Finished] = OrderedDict()
        self._parked: dict[str, int] = {}
        self._changed = anyio.Event()
        self.refused = 0
        """Streams turned away, for the daemon's log."""

    async def accept(self, remote: str, channel: Channel) -> None:
        """Serve one incoming stream; returns when it is closed. Called by the carrier."""
        held = _Held(channel)
        try:
            await self._admit(remote, held)
            await held.released.wait()
            if held.farewell:
                await _say(held, held.farewell)
        finally:
            if held.dropped or not held.released.is_set():
                self.refused += 1
                with anyio.CancelScope(shield=True):
                    await held.abort()

    async def _admit(self, remote: str, held: _Held) -> None:
        """Deliver the stream to its round, or drop it."""
        waiting = self._parked.get(remote, 0)
        # Strangers can fill the waiting room, but not keep members of a known round out.
        full = not self._is_member(remote) and sum(self._parked.values()) >= MAX_PARKED
        if waiting >= MAX_PARKED_PER_REMOTE or full:
            held.drop(b"")
            return
        self._parked[remote] = waiting + 1
        try:
            with anyio.move_on_after(self._park_seconds) as patience:
                await self._wait_for_round(remote, held)
            if patience.cancelled_caught:
                held.drop(b"")
        finally:
            self._parked[remote] -= 1
            if not self._parked[remote]:
                del self._parked[remote]

    async def _wait_for_round(self, remote: str, held: _Held) -> None:
        while not self._is_member(remote):
            await self._changed.wait()
        hello = await _read_hello(held)
        if hello is None:
            held.drop(b"")
            return
        while (found := self._rounds.get(hello.tag)) is None:
            over = self._finished.get(hello.tag)
            if over is not None:
                held.drop(over.farewell if remote in over.members else b"")
                return
            await self._changed.wait()
        sender = found.members.get(remote)
        if sender is None:
            held.drop(b"")
            return
        try:
            found.deliver.send_nowait(Incoming(sender, hello, held))
        except (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            held.drop(b"")

    @contextmanager
    def round(self, tag: bytes, members: Mapping[str, PeerId]) -> Iterator[Arrivals]:
        """Announce a round: `members` maps the carrier's peer names to members."""
        if tag in self._rounds:
            raise ProtocolError("a round was started twice; each attempt needs its own name")
        # Room for one stream per member and one repeated by mistake; more is refused.
        deliver, stream = anyio.create_memory_object_stream[Incoming](2 * len(members))
        arrivals = Arrivals(stream)
        self._rounds[tag] = _Round(members, deliver)
        self._finished.pop(tag, None)
        self._notify()
        try:
            yield arrivals
        finally:
            del self._rounds[tag]
            # A member that comes too late is told at once.
            self._finished[tag] = _Finished(frozenset(members), arrivals.farewell)
            if len(self._finished) > _MAX_FINISHED:
                self._finished.popitem(last=False)
            self._notify()
            deliver.close()
            arrivals.drop_undelivered()

    def _is_member(self, remote: str) -> bool:
        return any(remote in known.members for known in self._rounds.values()) or any(
            remote in over.members for over in self._finished.values()
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


async def _say(channel: Channel, farewell: bytes) -> None:
    """Send it and wait until the remote has closed, which it does when it has read it."""
    with contextlib.suppress(NetworkError, ProtocolError), anyio.move_on_after(FAREWELL_SECONDS):
        await channel.send(farewell)
        while await channel.receive(HELLO_BYTES):
            pass


async def _read_hello(channel: Channel) -> Hello | None:
    data = bytearray()
    try:
        with anyio.fail_after(HELLO_SECONDS):
            while len(data) < HELLO_BYTES:
                chunk = await channel.receive(HELLO_BYTES - len(data))
                if not chunk:
                    return None
                data += chunk
        return Hello.decode(data)
    except (TimeoutError, NetworkError, ProtocolError):
        return None
