"""Attachments of clients: one outbox each, one writer, and the order that the core relies on.

Owns the table of sessions and what happens to a client that does not read. What clients say is
turned into events by `control`; what they are told is the pure core's decision.

A new attachment becomes the target of `send` only when the core has been told of it, so that no
word meant for the older attachment reaches the newer one before its Welcome.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio

from swarm_coordinator.core.events import SessionNumber
from swarm_shared.base.errors import LinkClosed, NetworkError
from swarm_shared.base.types import PeerId
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
"""A roster of ten thousand peers has about ten megabytes; a reader that is six behind is none."""

WRITERS_PER_TURN = 20
"""Woken between two turns of everybody else: about a millisecond of work."""

RECORDS_PER_TURN = 500
"""Of a roster, between two turns of everybody else: one to three milliseconds of work."""

SEND_SECONDS = 30.0
"""A client that takes nothing for so long is cut off; it says Hello again when it can."""


@dataclass(slots=True)
class ClientSession:
    """One attachment of one client."""

    number: SessionNumber
    peer: PeerId
    stream: FramedStream
    certified_at: float = 0.0
    """When its certificate was made, in Unix seconds."""
    encoders: Encoders = field(default_factory=lambda: Encoders())
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    disconnect_reason: str | None = None
    written: trio.Event = field(default_factory=trio.Event)
    """The writer has ended: everything was sent, or the session is lost."""
    _outbox: deque[bytes | CoordinatorMessage] = field(default_factory=deque)
    _outbox_bytes: int = 0
    _finishing: bool = False
    _wake: trio.Event = field(default_factory=trio.Event)

    def send(self, message: bytes | CoordinatorMessage, *, wake: bool = True) -> None:
        """Queue a message; never blocks. Too many waiting end the session.

        What only this client gets is encoded when it is written: the core's turn is short then.
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
        """Let the writer look at what was queued without waking it."""
        self._wake.set()

    def finish(self) -> None:
        """End the session after what is in the outbox has been sent."""
        self._finishing = True
        self._wake.set()

    def disconnect(self, reason: str) -> None:
        """End the session now."""
        if self.disconnect_reason is None:
            self.disconnect_reason = reason
            log.info("session %d with %s is cut off: %s", self.number, self.peer, reason)
        self.scope.cancel()

    async def write_all(self) -> None:
        """Carry the outbox to the client until the session ends. Raises nothing of its own."""
        try:
            while self._outbox or not self._finishing:
                if not self._outbox:
                    self._wake = trio.Event()
                    await self._wake.wait()
                    continue
                message = self._outbox.popleft()
                if isinstance(message, bytes):
                    self._outbox_bytes -= len(message)
                elif isinstance(message, Roster):
                    message = await self.encoders.rosters.encode_cooperatively(message)
                else:
                    message = self.encoders.closes.encode(message)
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
    """All attachments, and which one speaks for its peer."""

    def __init__(self) -> None:
        self._current: dict[PeerId, ClientSession] = {}
        self._open: dict[SessionNumber, ClientSession] = {}
        self._counter = 0
        self._unwoken: deque[ClientSession] = deque()
        """They have a message that their writers have not been woken for."""
        self._some_unwoken = trio.Event()
        self._encoders = Encoders()
        self._last: tuple[CoordinatorMessage, bytes] | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def attached(self) -> int:
        """Peers that somebody speaks for."""
        return len(self._current)

    def current(self) -> list[ClientSession]:
        """The attachments that speak for their peers."""
        return list(self._current.values())

    def open(self, peer: PeerId, stream: FramedStream, certified_at: float = 0.0) -> ClientSession:
        """A new attachment; nobody's target yet."""
        self._counter += 1
        session = ClientSession(
            SessionNumber(self._counter), peer, stream, certified_at, self._encoders
        )
        self._open[session.number] = session
        return session

    def make_current(self, number: SessionNumber, peer: PeerId) -> None:
        """From now on this attachment speaks for its peer; an older one is closed."""
        older = self._current.pop(peer, None)
        if older is not None:
            older.disconnect("the client attached anew")
        session = self._open.get(number)
        if session is not None:
            self._current[peer] = session

    def refuse(self, number: SessionNumber, reason: str) -> None:
        """An attachment whose peer was kept out while it was on its way to the core."""
        session = self._open.get(number)
        if session is not None:
            session.send(encode(Refused(code="admission", reason=reason[:500])))
            session.finish()

    def ended(self, session: ClientSession) -> None:
        self._open.pop(session.number, None)
        if self._current.get(session.peer) is session:
            del self._current[session.peer]

    def send(self, peer: PeerId, message: CoordinatorMessage) -> None:
        """Into the outbox of the peer's attachment; dropped when it has none."""
        session = self._current.get(peer)
        if session is not None:
            # A large one is a newcomer's alone: the others hear what has changed.
            shared = isinstance(message, Roster) and len(message.peers) <= RECORDS_PER_TURN
            session.send(self._encoded(message) if shared else message, wake=False)
            self._unwoken.append(session)
            self._some_unwoken.set()

    def broadcast(self, peers: Iterable[PeerId], message: CoordinatorMessage) -> None:
        """The same into many outboxes."""
        encoded = self._encoded(message)
        for peer in peers:
            session = self._current.get(peer)
            if session is not None:
                session.send(encoded, wake=False)
                self._unwoken.append(session)
        self._some_unwoken.set()

    async def wake_writers(self) -> None:
        """Until cancelled. A close is a word to every member, and ten thousand writers woken at
        once keep everybody waiting for as long as all of them take together: others get their turn
        between every few."""
        while True:
            await self._some_unwoken.wait()
            self._some_unwoken = trio.Event()
            while self._unwoken:
                for _ in range(min(WRITERS_PER_TURN, len(self._unwoken))):
                    self._unwoken.popleft().wake()
                await trio.lowlevel.checkpoint()

    def finish(self, peer: PeerId) -> None:
        session = self._current.pop(peer, None)
        if session is not None:
            session.finish()

    async def finish_all(self, timeout_seconds: float) -> None:
        """End every session after what is in its outbox, within the time given."""
        waiting = list(self._open.values())
        for session in waiting:
            session.finish()
        with trio.move_on_after(timeout_seconds):
            for session in waiting:
                await session.written.wait()

    def _encoded(self, message: CoordinatorMessage) -> bytes:
        # The same roster goes to everybody, one peer after the other: encode it once.
        if self._last is None or self._last[0] is not message:
            encoded = (
                self._encoders.rosters.encode(message) if isinstance(message, Roster) else None
            )
            self._last = (message, encoded or encode(message))
        return self._last[1]


class RosterEncoder:
    """Rosters of large runs have megabytes, and nearly all of one is in the next one again."""

    def __init__(self) -> None:
        self._records: dict[PeerId, tuple[PeerRecord, bytes]] = {}
        self._last: tuple[Roster, bytes] | None = None
        self._encoding = trio.Lock()

    async def encode_cooperatively(self, roster: Roster) -> bytes:
        """The same as `encode`: ten thousand records take a tenth of a second, and others get
        their turn between some of them. Newcomers that get the same one share the work."""
        async with self._encoding:
            if self._last is None or self._last[0] is not roster:
                records: dict[PeerId, tuple[PeerRecord, bytes]] = {}
                for begin in range(0, len(roster.peers), RECORDS_PER_TURN):
                    self._look_up(roster.peers[begin : begin + RECORDS_PER_TURN], records)
                    await trio.lowlevel.checkpoint()
                self._last = roster, self._assemble(roster, records)
            return self._last[1]

    def encode(self, roster: Roster) -> bytes:
        """What `encode` gives, for the price of the records that are new."""
        records: dict[PeerId, tuple[PeerRecord, bytes]] = {}
        self._look_up(roster.peers, records)
        return self._assemble(roster, records)

    def _look_up(
        self, peers: Sequence[PeerRecord], into: dict[PeerId, tuple[PeerRecord, bytes]]
    ) -> None:
        before = self._records
        for record in peers:
            known = before.get(record.peer)
            if known is None or known[0] is not record:
                known = record, encode(record)
            into[record.peer] = known

    def _assemble(self, roster: Roster, records: dict[PeerId, tuple[PeerRecord, bytes]]) -> bytes:
        self._records = records
        peers = b",".join(encoded for _, encoded in records.values())
        revoked = json.dumps(roster.revoked, separators=(",", ":")).encode()
        return b'{"kind":"roster","serial":%d,"peers":[%b],"revoked":%b}' % (
            roster.serial, peers, revoked,
        )  # fmt: skip


class CloseEncoder:
    """In a large run a close names hundreds of members of the stage, to each of them the same."""

    def __init__(self) -> None:
        self._attempt = -1
        self._tails: dict[int, tuple[tuple[Reduction, ...], bytes]] = {}

    def encode(self, message: CoordinatorMessage) -> bytes:
        """What `encode` gives; of a close, for the price of what is one member's own."""
        if not isinstance(message, Close) or message.moving:
            return encode(message)
        if message.attempt != self._attempt:
            self._attempt = message.attempt
            self._tails.clear()
        known = self._tails.get(id(message.reductions))
        if known is None:
            whole = encode(message)
            tail = whole[whole.index(b',"reductions"') :]
            known = self._tails[id(message.reductions)] = message.reductions, tail
        committed = b",".join(b"%d" % microbatch for microbatch in message.committed)
        return b'{"kind":"close","step":%d,"attempt":%d,"committed":[%b]%b' % (
            message.step, message.attempt, committed, known[1],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Encoders:
    """Of what goes to thousands and is nearly the same for all of them."""

    rosters: RosterEncoder = field(default_factory=RosterEncoder)
    closes: CloseEncoder = field(default_factory=CloseEncoder)
