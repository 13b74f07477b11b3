"""Matches the streams that remotes open with the rounds that expect them.

A stream may arrive before the local side knows its round. It then waits; it is read only once its
remote belongs to a current or recent group, and waiting streams are bounded in number and time. A
stream that comes after its round has failed gets the reason.

Remotes that are not admitted (`admits`: the members that may average with this one) are refused.
Nothing of such a remote is ever read. Its stream is held briefly, because its admission may not
have arrived yet; only a few may be held at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from swarm_client.averaging.all_reduce.carrier import Channel, IncomingStream, IncomingStreams
from swarm_client.averaging.all_reduce.frames import HELLO_BYTES, StreamHello
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.types import PeerId

logger = logging.getLogger(__name__)

MAX_PARKED = 256
"""Waiting streams of all remotes together; streams of a current round's members are not limited by
it."""
MAX_PARKED_PER_REMOTE = 8
"""Waiting streams per remote. A member opens one stream per round and reducer; attempts, and routes
tried in parallel, may overlap a little. The window that its carrier grants bounds the unread bytes
of a stream."""
PARK_SECONDS = 30.0
"""Seconds that a stream may wait for its round; longer than any member waits for another to
join."""
MAX_UNADMITTED = 8
"""Remotes that may be held at a time before they are admitted, each with one stream."""
UNADMITTED_SECONDS = 5.0
"""Seconds for which such a stream is held; rosters reach all members within about that time."""
HELLO_SECONDS = 5.0
"""Seconds in which a stream must send its hello once it is read."""
LATE_ABORT_SECONDS = 1.0
"""Seconds in which a late member must read why its round failed."""
_MAX_FINISHED = 64
"""Rounds whose end is remembered, so that their late streams are answered at once."""


@dataclass(slots=True, eq=False)
class _ActiveRound:
    members: Mapping[str, PeerId]
    deliver: MemoryObjectSendStream[IncomingStream]
    delivered: set[str] = field(default_factory=set)
    """Remotes whose stream the round has. A second one is refused here, so that a remote that
    repeats its stream takes no room from other members."""


@dataclass(frozen=True, slots=True)
class _FinishedRound:
    members: frozenset[str]
    late_abort_frame: bytes


class _HeldChannel:
    """A channel delivered to a round; reports to the hub when the round has finished with it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.released = anyio.Event()
        self.dropped = False
        self.reason = "no round takes it any more"
        self.late_abort_frame = b""

    @property
    def route(self) -> Route:
        return self._channel.route

    def drop(self, reason: str, late_abort_frame: bytes = b"") -> None:
        """Refuse the stream, or drop one that its round did not take; accept() sends the ABORT
        frame."""
        self.dropped = True
        self.reason = reason
        self.late_abort_frame = late_abort_frame
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
    """Accepts streams from carriers and delivers them to rounds.

    `remote` is the carrier's name of a peer; `admits` decides by that name whether the peer may
    wait for a round. Call `notify` when its answers change.
    """

    def __init__(
        self,
        *,
        admits: Callable[[str], bool] = lambda remote: True,
        park_seconds: float = PARK_SECONDS,
    ) -> None:
        self.admits = admits
        self._park_seconds = park_seconds
        self._rounds: dict[bytes, _ActiveRound] = {}
        self._finished: OrderedDict[bytes, _FinishedRound] = OrderedDict()
        self._parked: Counter[str] = Counter()
        self._unadmitted: set[str] = set()
        self._changed = anyio.Event()
        self.refused = 0
        """Number of streams refused."""

    async def accept(self, remote: str, channel: Channel) -> None:
        """Serve one incoming stream; returns when it is closed. Called by the carrier."""
        held = _HeldChannel(channel)
        try:
            await self._admit(remote, held)
            await held.released.wait()
            if held.late_abort_frame:
                await _send_late_abort(held, held.late_abort_frame)
        finally:
            if held.dropped or not held.released.is_set():
                self.refused += 1
                logger.info("a stream of %s was turned away: %s", remote, held.reason)
                with anyio.CancelScope(shield=True):
                    await held.abort()

    async def _admit(self, remote: str, held: _HeldChannel) -> None:
        """Deliver the stream to its round, or drop it."""
        if not self._is_known(remote) and not await self._wait_until_known(remote):
            held.drop("it is not admitted here")
            return
        # Waiting streams never keep out members of a known round.
        full = not self._is_member(remote) and self._parked.total() >= MAX_PARKED
        if full or self._parked[remote] >= MAX_PARKED_PER_REMOTE:
            held.drop("too many wait already")
            return
        self._parked[remote] += 1
        try:
            with anyio.move_on_after(self._park_seconds) as patience:
                await self._wait_for_round(remote, held)
            if patience.cancelled_caught:
                held.drop(f"its round did not begin within {self._park_seconds:g} s")
        finally:
            self._parked[remote] -= 1
            if not self._parked[remote]:
                del self._parked[remote]

    async def _wait_until_known(self, remote: str) -> bool:
        """Wait until the remote becomes known, at most UNADMITTED_SECONDS; return whether it did.
        Members receive rosters at slightly different times."""
        if len(self._unadmitted) >= MAX_UNADMITTED or remote in self._unadmitted:
            return False
        self._unadmitted.add(remote)
        try:
            with anyio.move_on_after(UNADMITTED_SECONDS):
                while not self._is_known(remote):
                    await self._changed.wait()
            return self._is_known(remote)
        finally:
            self._unadmitted.discard(remote)

    async def _wait_for_round(self, remote: str, held: _HeldChannel) -> None:
        while not self._in_recent_round(remote):
            await self._changed.wait()
            if not self._is_known(remote):
                held.drop("it is not admitted any more")
                return
        hello = await _read_hello(held)
        if hello is None:
            held.drop("it does not begin with a greeting")
            return
        while (active_round := self._rounds.get(hello.tag)) is None:
            over = self._finished.get(hello.tag)
            if over is not None:
                held.drop(
                    "its round is over", over.late_abort_frame if remote in over.members else b""
                )
                return
            await self._changed.wait()
            if not self._is_known(remote):
                held.drop("it is not admitted any more")
                return
        sender = active_round.members.get(remote)
        if sender is None:
            held.drop("it is no member of that round")
            return
        if remote in active_round.delivered:
            held.drop("it has a stream in that round already")
            return
        active_round.delivered.add(remote)
        try:
            active_round.deliver.send_nowait(IncomingStream(sender, hello, held))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            held.drop("its round takes no more streams")

    @contextmanager
    def round(self, tag: bytes, members: Mapping[str, PeerId]) -> Iterator[IncomingStreams]:
        """Register a round; `members` maps the carriers' peer names to members."""
        if tag in self._rounds:
            raise ProtocolError("a round was started twice; each attempt needs its own name")
        deliver, stream = anyio.create_memory_object_stream[IncomingStream](len(members))
        arrivals = IncomingStreams(stream)
        self._rounds[tag] = _ActiveRound(members, deliver)
        self._finished.pop(tag, None)
        self.notify()
        try:
            yield arrivals
        finally:
            del self._rounds[tag]
            # A member that comes too late is answered at once.
            self.finish(tag, members, arrivals.late_abort_frame)
            deliver.close()
            for late in arrivals.undelivered():
                assert isinstance(late.channel, _HeldChannel)
                late.channel.drop("its round is over", arrivals.late_abort_frame)

    def finish(self, tag: bytes, members: Mapping[str, PeerId], late_abort_frame: bytes) -> None:
        """Refuse streams of this round from now on; its members get the ABORT frame
        `late_abort_frame`."""
        self._finished[tag] = _FinishedRound(frozenset(members), late_abort_frame)
        if len(self._finished) > _MAX_FINISHED:
            self._finished.popitem(last=False)
        self.notify()

    def _is_known(self, remote: str) -> bool:
        return self.admits(remote) or self._is_member(remote)

    def _is_member(self, remote: str) -> bool:
        """Whether the remote belongs to a current round: the coordinator has named it."""
        return any(remote in current.members for current in self._rounds.values())

    def _in_recent_round(self, remote: str) -> bool:
        """Whether the remote belongs to a current or recent round."""
        return self._is_member(remote) or any(
            remote in over.members for over in self._finished.values()
        )

    def notify(self) -> None:
        """Look again at the streams that wait."""
        self._changed.set()
        self._changed = anyio.Event()


async def _send_late_abort(channel: Channel, late_abort_frame: bytes) -> None:
    """Send the frame and wait until the remote has closed, which it does after reading it."""
    with contextlib.suppress(NetworkError, ProtocolError), anyio.move_on_after(LATE_ABORT_SECONDS):
        await channel.send(late_abort_frame)
        while await channel.receive(HELLO_BYTES):
            pass


async def _read_hello(channel: Channel) -> StreamHello | None:
    data = bytearray()
    try:
        with anyio.fail_after(HELLO_SECONDS):
            while len(data) < HELLO_BYTES:
                chunk = await channel.receive(HELLO_BYTES - len(data))
                if not chunk:
                    return None
                data += chunk
        return StreamHello.decode(data)
    except (TimeoutError, NetworkError, ProtocolError):
        return None
