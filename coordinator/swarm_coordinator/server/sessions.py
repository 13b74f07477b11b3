"""Sessions of attached clients: an outbox and a writer for each, and the order of messages.

Owns the table of sessions, and disconnecting a client that does not read. Received messages become
events in `server.control_protocol`; what is sent is the core's decision.

A new session becomes the target of `send` only when the core has processed its attachment, so no
message for the previous session reaches the new one before its Welcome.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from swarm_coordinator.core.events import SessionNumber
from swarm_coordinator.status.pacing import batched
from swarm_shared.addresses.announced import NOWHERE, PeerPlace
from swarm_shared.base.errors import LinkClosed, NetworkError
from swarm_shared.base.types import MAX_SENTENCE_CHARACTERS, Instance, PeerId
from swarm_shared.network import FramedStream
from swarm_shared.protocol import (
    Close,
    CoordinatorMessage,
    PeerRecord,
    Reduction,
    Refused,
    Roster,
    encode,
)

log = logging.getLogger(__name__)

MAX_OUTBOX_MESSAGES = 4096
MAX_OUTBOX_BYTES = 64 * 2**20
"""Bytes queued for one client: about six rosters of ten thousand peers. A client so far behind does
not read."""

WRITERS_PER_TURN = 20
"""Writers woken before other tasks run: about a millisecond of work."""

RECORDS_PER_TURN = 500
"""Roster records encoded before other tasks run: one to three milliseconds of work."""

SEND_SECONDS = 30.0
"""Seconds without progress of a send after which a client is disconnected; it can attach again."""

DISPLACED = (
    "another program has joined with the same identity since, and works in place of this one; if "
    "this machine's home folder is a copy of another machine's, remove identity.key from the copy, "
    "and join again"
)
"""The reason with which the older of two programs with one key is refused."""


@dataclass(slots=True)
class ClientSession:
    """One attachment of a client."""

    number: SessionNumber
    peer: PeerId
    stream: FramedStream
    encoder: MessageEncoder
    certified_at: float
    """When its certificate was issued, in Unix seconds."""
    instance: Instance
    """Identifies the program that opened the session."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    disconnect_reason: str | None = None
    place: PeerPlace = NOWHERE
    """Where the connection comes from; this decides which of the announced addresses count."""
    written: trio.Event = field(default_factory=trio.Event)
    """Set when the writer has ended: everything was sent, or the session is lost."""
    _outbox: deque[bytes | CoordinatorMessage] = field(default_factory=deque)
    _outbox_bytes: int = 0
    _finishing: bool = False
    _wake: trio.Event = field(default_factory=trio.Event)

    def send(self, message: bytes | CoordinatorMessage, *, wake: bool = True) -> None:
        """Queue a message without blocking. A full outbox ends the session.

        A message for this client only is encoded by the writer, which keeps the core's turn short.
        """
        if self._finishing or self.disconnect_reason is not None:
            return
        full = len(self._outbox) >= MAX_OUTBOX_MESSAGES
        size = len(message) if isinstance(message, bytes) else 0
        if full or (self._outbox and self._outbox_bytes + size > MAX_OUTBOX_BYTES):
            self.disconnect("it does not read what it is sent")
            return
        self._outbox.append(message)
        self._outbox_bytes += size
        if wake:
            self._wake.set()

    def wake(self) -> None:
        """Wake the writer for messages that were queued with `wake=False`."""
        self._wake.set()

    def finish(self) -> None:
        """End the session once the outbox has been sent."""
        self._finishing = True
        self._wake.set()

    def refuse(self, reason: str) -> None:
        """End the session, and what the client does in this run, with a reason."""
        self.send(encode(Refused(code="admission", reason=reason[:MAX_SENTENCE_CHARACTERS])))
        self.finish()

    def disconnect(self, reason: str) -> None:
        """End the session now."""
        if self.disconnect_reason is None:
            self.disconnect_reason = reason
            log.info("session %d with %s is cut off: %s", self.number, self.peer, reason)
        self.scope.cancel()

    async def write_all(self) -> None:
        """Send the outbox to the client until the session ends. Network errors end the session."""
        try:
            while self._outbox or not self._finishing:
                if not self._outbox:
                    self._wake = trio.Event()
                    await self._wake.wait()
                    continue
                message = self._outbox.popleft()
                if isinstance(message, bytes):
                    self._outbox_bytes -= len(message)
                else:
                    message = await self.encoder.encode_cooperatively(message)
                await self.stream.send(message, timeout_seconds=SEND_SECONDS)
            await self.stream.close()
        except LinkClosed as error:
            log.debug("session %d with %s: %s", self.number, self.peer, error)
        except NetworkError as error:
            self.disconnect(str(error))
        finally:
            self.written.set()
        self.scope.cancel()


class ClientSessions:
    """All open sessions, and the current one of each peer."""

    def __init__(self) -> None:
        self._current: dict[PeerId, ClientSession] = {}
        self._open: dict[SessionNumber, ClientSession] = {}
        self._counter = 0
        self._unwoken: deque[ClientSession] = deque()
        """Sessions with a message that their writers have not been woken for."""
        self._some_unwoken = trio.Event()
        self._encoder = MessageEncoder()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def attached(self) -> int:
        """Peers with a current session."""
        return len(self._current)

    def current(self) -> list[ClientSession]:
        """The current session of every attached peer."""
        return list(self._current.values())

    def open(
        self, peer: PeerId, stream: FramedStream, certified_at: float = 0.0,
        instance: Instance = "",
    ) -> ClientSession:  # fmt: skip
        """Register a session. Messages to the peer still go to its previous session."""
        self._counter += 1
        session = ClientSession(
            SessionNumber(self._counter), peer, stream, self._encoder, certified_at, instance
        )
        self._open[session.number] = session
        return session

    def make_current(self, number: SessionNumber, peer: PeerId) -> None:
        """Make this session its peer's current one. An older one is closed; if it is another
        program's, that one is refused, as the two would otherwise displace each other for ever."""
        older = self._current.pop(peer, None)
        session = self._open.get(number)
        if older is not None:
            if session is not None and session.instance != older.instance:
                log.warning("%s has joined from another program as well", peer)
                older.refuse(DISPLACED)
            else:
                older.disconnect("the client attached anew")
        if session is not None:
            self._current[peer] = session

    def refuse(self, number: SessionNumber, reason: str) -> None:
        """Refuse a session whose peer was revoked before the core processed the attachment."""
        session = self._open.get(number)
        if session is not None:
            session.refuse(reason)

    def ended(self, session: ClientSession) -> None:
        """Remove a session that has ended."""
        self._open.pop(session.number, None)
        if self._current.get(session.peer) is session:
            del self._current[session.peer]

    def send(self, peer: PeerId, message: CoordinatorMessage) -> None:
        """Queue a message in the peer's current session; dropped when it has none."""
        session = self._current.get(peer)
        if session is not None:
            session.send(message, wake=False)
            self._unwoken.append(session)
            self._some_unwoken.set()

    def broadcast(self, peers: Iterable[PeerId], message: CoordinatorMessage) -> None:
        """Queue one message, encoded once, in many sessions."""
        encoded = self._encoder.encode(message)
        for peer in peers:
            session = self._current.get(peer)
            if session is not None:
                session.send(encoded, wake=False)
                self._unwoken.append(session)
        self._some_unwoken.set()

    async def wake_writers(self) -> None:
        """Wake writers, a few at a time, until cancelled. A step close goes to every member; ten
        thousand writers woken at once would delay all other tasks until the last has run."""
        while True:
            await self._some_unwoken.wait()
            self._some_unwoken = trio.Event()
            while self._unwoken:
                for _ in range(min(WRITERS_PER_TURN, len(self._unwoken))):
                    self._unwoken.popleft().wake()
                await trio.lowlevel.checkpoint()

    def finish(self, peer: PeerId) -> None:
        """End the peer's current session once its outbox is sent."""
        session = self._current.pop(peer, None)
        if session is not None:
            session.finish()

    async def finish_all(self, timeout_seconds: float) -> None:
        """End every session once its outbox is sent, within the time given."""
        waiting = list(self._open.values())
        for session in waiting:
            session.finish()
        with trio.move_on_after(timeout_seconds):
            for session in waiting:
                await session.written.wait()


class MessageEncoder:
    """Encodes like `protocol.encode`, and once what is the same for thousands of clients.

    A roster of a large run has megabytes, and the next one repeats nearly all of it, so encoded
    records are kept. A close names hundreds of members of a stage, the same for each of them.
    """

    def __init__(self) -> None:
        self._last_roster: tuple[Roster, bytes] | None = None
        """The last roster that was encoded cooperatively, with its encoding."""
        self._encoding = trio.Lock()
        self._records: dict[PeerId, tuple[PeerRecord, bytes]] = {}
        self._attempt = -1
        self._tails: dict[int, tuple[tuple[Reduction, ...], bytes]] = {}

    def encode(self, message: CoordinatorMessage) -> bytes:
        """Encode a message for many clients."""
        if isinstance(message, Roster):
            return self._roster(message, self._look_up(message.peers))
        return encode(message)

    async def encode_cooperatively(self, message: CoordinatorMessage) -> bytes:
        """Encode a message for one client, letting other tasks run: ten thousand records take a
        tenth of a second. Joining peers that get the same roster share the work."""
        if isinstance(message, Close):
            return self.encode_close(message)
        if not isinstance(message, Roster):
            return encode(message)
        async with self._encoding:
            if self._last_roster is None or self._last_roster[0] is not message:
                records: dict[PeerId, tuple[PeerRecord, bytes]] = {}
                for batch in batched(message.peers, RECORDS_PER_TURN):
                    records |= self._look_up(batch)
                    await trio.lowlevel.checkpoint()
                self._last_roster = message, self._roster(message, records)
            return self._last_roster[1]

    def _look_up(self, peers: Iterable[PeerRecord]) -> dict[PeerId, tuple[PeerRecord, bytes]]:
        records = {}
        for record in peers:
            entry = self._records.get(record.peer)
            if entry is None or entry[0] is not record:
                entry = record, encode(record)
            records[record.peer] = entry
        return records

    def _roster(self, roster: Roster, records: dict[PeerId, tuple[PeerRecord, bytes]]) -> bytes:
        self._records = records
        peers = b",".join(encoded for _, encoded in records.values())
        revoked = json.dumps(roster.revoked, separators=(",", ":")).encode()
        return b'{"kind":"roster","serial":%d,"peers":[%b],"revoked":%b}' % (
            roster.serial, peers, revoked,
        )  # fmt: skip

    def encode_close(self, message: Close) -> bytes:
        """Encode a close, at the cost of what is specific to the member."""
        if message.moving:
            return encode(message)
        if message.attempt != self._attempt:
            self._attempt = message.attempt
            self._tails.clear()
        entry = self._tails.get(id(message.reductions))
        if entry is None:
            encoded = encode(message)
            tail = encoded[encoded.index(b',"reductions"') :]
            entry = self._tails[id(message.reductions)] = message.reductions, tail
        committed = b",".join(b"%d" % microbatch for microbatch in message.committed)
        return b'{"kind":"close","step":%d,"attempt":%d,"committed":[%b]%b' % (
            message.step, message.attempt, committed, entry[1],
        )  # fmt: skip
