"""The control link of one session with the coordinator: hello, outbox, heartbeats, end.

Owns the stream. What messages mean is the volunteer's part (`swarm_client.volunteer.volunteer`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from swarm_shared.base.error_groups import leaves
from swarm_shared.base.errors import (
    AdmissionError,
    CapacityError,
    LinkClosed,
    ProtocolError,
    SwarmError,
    VersionError,
)
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.identity.invite import Invite
from swarm_shared.network import FramedStream, FrameLimits, Node
from swarm_shared.protocol import (
    CONTROL_PROTOCOL,
    CoordinatorMessage,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
    coordinator_messages,
    encode,
    parse,
)
from swarm_shared.protocol.versions import version_refusal

CONTROL_LIMITS = FrameLimits(max_header_bytes=32 * 2**20, max_payload_bytes=0)
"""Frame limits of the control stream; a roster of ten thousand peers has about ten megabytes."""

WELCOME_SECONDS = 20.0
"""Timeout of the hello and of its answer."""
SEND_SECONDS = 30.0
"""Seconds without progress of a send after which the coordinator counts as lost, whatever the state
of its connection."""

MAX_OUTBOX_BYTES = 64 * 2**20
"""Bound on what waits for the coordinator, two of the longest messages: it could ask for answers
and take none."""

REFUSALS = {
    "admission": AdmissionError,
    "version": VersionError,
    "capacity": CapacityError,
    "protocol": ProtocolError,
}


class CoordinatorSession:
    """One session with the coordinator. Made by `attach`."""

    def __init__(self, stream: FramedStream, welcome: Welcome) -> None:
        self.welcome = welcome
        self._stream = stream
        self._put, self._outbox = trio.open_memory_channel[bytes](math.inf)
        self._waiting_bytes = 0
        """Bytes in the outbox."""

    def send(self, message: FrozenModel) -> None:
        """Queue a message; never waits. A message lost with the session is covered by the next
        hello. The session ends where the coordinator takes too little of what it is sent."""
        header = encode(message)
        try:
            self._put.send_nowait(header)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        self._waiting_bytes += len(header)
        if self._waiting_bytes > MAX_OUTBOX_BYTES:
            self._put.close()

    async def write_all(self) -> None:
        """Send the outbox to the coordinator until the session ends."""
        async for header in self._outbox:
            await self._stream.send(header, timeout_seconds=SEND_SECONDS)
            self._waiting_bytes -= len(header)
        raise LinkClosed("the coordinator takes too little of what this volunteer sends")

    async def receive(self) -> CoordinatorMessage:
        """Return the next message. Raises the error of a refusal, and LinkClosed at the end."""
        frame = await self._stream.receive()
        message = parse(coordinator_messages, frame.header)
        if isinstance(message, Refused):
            raise refusal_error(message)
        return message

    async def send_heartbeats(
        self, interval_seconds: float, heartbeat: Callable[[], Heartbeat]
    ) -> None:
        """Queue a heartbeat every `interval_seconds`."""
        while True:
            self.send(heartbeat())
            await trio.sleep(interval_seconds)


@asynccontextmanager
async def attach(node: Node, invite: Invite, hello: Hello) -> AsyncIterator[CoordinatorSession]:
    """Open a session. AdmissionError, VersionError or CapacityError when the coordinator
    refuses."""
    # Dial from the listening port: the coordinator then sees how the router maps that port.
    await node.connect(invite.coordinator, invite.addresses, from_listening_port=True)
    stream = await node.open_stream(
        invite.coordinator, CONTROL_PROTOCOL, CONTROL_LIMITS, invite.addresses
    )
    try:
        await stream.send(encode(hello), timeout_seconds=WELCOME_SECONDS)
        frame = await stream.receive(timeout_seconds=WELCOME_SECONDS)
        answer = _parse_answer(frame.header)
        if isinstance(answer, Refused):
            raise refusal_error(answer)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the coordinator answered {answer.kind!r} to the hello")
        yield CoordinatorSession(stream, answer)
    finally:
        await stream.close()


def _parse_answer(header: bytes) -> CoordinatorMessage:
    """The answer to a hello; VersionError also where another version's refusal is all that is
    understood."""
    try:
        return parse(coordinator_messages, header)
    except ProtocolError:
        refusal = version_refusal(header)
        if refusal is None:
            raise
    raise refusal


class RefusedForNow(ProtocolError):
    """The coordinator refuses this client for some time; with `self_test` at most until its machine
    has passed one."""

    def __init__(self, reason: str, retry_seconds: float, *, self_test: bool) -> None:
        super().__init__(f"the run refuses this volunteer: {reason}")
        self.retry_seconds = retry_seconds
        self.self_test = self_test


def refusal_error(message: Refused) -> Exception:
    """Return the error that a refusal of the coordinator becomes here."""
    if message.code == "protocol" and message.retry_seconds is not None:
        return RefusedForNow(
            message.reason, message.retry_seconds, self_test=message.self_test
        )  # fmt: skip
    return REFUSALS[message.code](message.reason)


def root_error(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    """The error that explains a group: a closed link is usually the consequence of another."""
    errors = [leaf for leaf in leaves(group) if isinstance(leaf, SwarmError)]
    return next((error for error in errors if not isinstance(error, LinkClosed)), errors[0])
