"""The relay: slots for peers that cannot be dialled, and circuits to them (circuit v2 hop).

Owns admission to slots and circuits, and every limit. The traffic is encrypted between the ends of
a circuit (Noise inside Noise): the relay sees which peers communicate, and how much.

Limits are checked before anything is stored: slots in all and per network address, circuits in all,
per peer, per pair of peers and per network address, bytes and seconds per circuit, and bytes per
second of each network address.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    HopMessage,
    Limit,
    Reservation,
    Status,
    StopMessage,
)
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError
from multiaddr import Multiaddr

from swarm_shared.base.endpoint import address_group
from swarm_shared.base.errors import FrameError, NetworkError
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.host import take_one
from swarm_shared.network.libp2p.yamux import YamuxConnection, YamuxStream
from swarm_shared.network.links import Links
from swarm_shared.network.nat.circuit import (
    MESSAGE_SECONDS,
    STOP_PROTOCOL,
    read_message,
    status_name,
    write_message,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """The resources this node gives to relaying. The defaults suit a machine that was set up to
    serve."""

    max_reservations: int = 4096
    max_reservations_per_address: int = 64
    """Slots for a household, a dormitory or a company behind one public address."""
    reservation_seconds: float = 3600.0
    max_circuits: int = 1024
    max_circuits_per_peer: int = 64
    max_circuits_per_pair: int = 4
    """Circuits in one direction. A peer that opens all it may to another one must not be able to
    use up all circuits of that peer."""
    max_circuits_per_address: int = 256
    """Circuits opened from one address: one machine can have any number of peer IDs."""
    circuit_seconds: float = 24 * 3600.0
    circuit_bytes: int = 2**40
    """Bytes in both directions together; a circuit that is used up is opened anew."""
    address_burst_bytes: int = 64 * 2**20
    address_bytes_per_second: int = 4 * 2**20
    """Rate of all circuits opened from one address, both directions together: more than a home
    uplink has, and little enough that relaying leaves the machine its core."""
    recheck_seconds: float = 60.0
    """Seconds between two checks whether the ends of a circuit may still use the relay. A circuit
    ends at the second refusal in a row: a member that is attaching again is absent for a moment."""


HALF_CLOSED_SECONDS: Final = 10.0
"""Longest life of a half-closed circuit. The end of one direction is the end of a connection, and
the other end then closes its direction; one that does not would hold the circuit indefinitely."""


class RelayServer:
    """Answers hop streams. `allow` decides whether a peer may use this relay, at either end."""

    def __init__(
        self,
        limits: RelayLimits,
        allow: Callable[[PeerId], bool],
        addresses: Callable[[], tuple[str, ...]],
        links: Links,
    ) -> None:
        self._limits = limits
        self._allow = allow
        self._addresses = addresses
        self._links = links
        self._reserved_until: dict[PeerId, tuple[float, str]] = {}
        self._circuits: Counter[PeerId] = Counter()
        self._circuits_of_pair: Counter[tuple[PeerId, PeerId]] = Counter()
        self._circuits_from: Counter[str] = Counter()
        self._rate = RateLimit(
            limits.address_burst_bytes, limits.address_bytes_per_second, clock=trio.current_time
        )
        self.open_circuits = 0
        self.forwarded_bytes = 0
        """Bytes over all circuits since the start, both directions together."""

    @property
    def reservations(self) -> int:
        return len(self._reserved_until)

    async def handle(self, stream: YamuxStream) -> None:
        """Handle one hop stream: a reservation, or a circuit for as long as it lasts."""
        connection = stream.connection
        remote = connection.remote
        with trio.fail_after(MESSAGE_SECONDS):
            request = await read_message(stream, HopMessage)
        if request.type == HopMessage.RESERVE:
            await write_message(stream, self._reserve(remote, connection))
            await stream.close()
        elif request.type == HopMessage.CONNECT:
            await self._connect(stream, remote, request)
        else:
            await write_message(stream, _status(Status.UNEXPECTED_MESSAGE))
            await stream.close()

    def forget(self, peer: PeerId) -> None:
        """Drop the slot of a peer whose last connection is lost."""
        self._reserved_until.pop(peer, None)

    # ------------------------------------------------------------------ reservations

    def _reserve(self, remote: PeerId, connection: YamuxConnection) -> HopMessage:
        if connection.relay is not None or not self._allow(remote):
            # A slot over a circuit would chain relays, whose limits would then multiply.
            return _status(Status.PERMISSION_DENIED)
        now = time.monotonic()
        self._reserved_until = {p: e for p, e in self._reserved_until.items() if e[0] > now}
        host = _place_of(connection)
        if remote not in self._reserved_until and (
            len(self._reserved_until) >= self._limits.max_reservations
            or sum(h == host for _, h in self._reserved_until.values())
            >= self._limits.max_reservations_per_address
        ):
            return _status(Status.RESERVATION_REFUSED)
        seconds = self._limits.reservation_seconds
        self._reserved_until[remote] = (now + seconds, host)
        answer = _status(Status.OK)
        answer.reservation.CopyFrom(
            Reservation(
                expire=int(time.time() + seconds),
                addrs=[Multiaddr(text).to_bytes() for text in self._addresses()],
            )
        )
        answer.limit.CopyFrom(
            Limit(
                duration=int(min(self._limits.circuit_seconds, 2**31)),
                data=self._limits.circuit_bytes,
            )
        )
        return answer

    # ------------------------------------------------------------------ circuits

    async def _connect(self, stream: YamuxStream, source: PeerId, request: HopMessage) -> None:
        try:
            target = PeerId(ID(request.peer.id).to_base58())
        except ValueError:
            await self._refuse(stream, Status.MALFORMED_MESSAGE)
            return
        place = _place_of(stream.connection)
        refusal = self._refusal(stream.connection, source, target, place)
        if refusal is not None:
            await self._refuse(stream, refusal)
            return
        ends = (source, target)
        self._circuits.update(ends)
        self._circuits_of_pair[ends] += 1
        self._circuits_from[place] += 1
        self.open_circuits += 1
        try:
            far = await self._reach(stream, source, target)
            if far is not None:
                await self._splice(stream, far, ends, place)
        finally:
            self.open_circuits -= 1
            for peer in ends:
                take_one(self._circuits, peer)
            take_one(self._circuits_of_pair, ends)
            take_one(self._circuits_from, place)

    def _refusal(
        self, connection: YamuxConnection, source: PeerId, target: PeerId, place: str
    ) -> int | None:
        limits = self._limits
        if connection.relay is not None or not self._allow(source) or not self._allow(target):
            return int(Status.PERMISSION_DENIED)
        if source == target:
            return int(Status.PERMISSION_DENIED)
        expiry, _ = self._reserved_until.get(target, (0.0, ""))
        if expiry <= time.monotonic():
            return int(Status.NO_RESERVATION)
        if (
            self.open_circuits >= limits.max_circuits
            or self._circuits_of_pair[source, target] >= limits.max_circuits_per_pair
            or self._circuits_from[place] >= limits.max_circuits_per_address
            or any(
                self._circuits[peer] >= limits.max_circuits_per_peer for peer in (source, target)
            )
        ):
            return int(Status.RESOURCE_LIMIT_EXCEEDED)
        return None

    async def _reach(
        self, stream: YamuxStream, source: PeerId, target: PeerId
    ) -> YamuxStream | None:
        """Open the target's end of a new circuit and inform both ends. None: the source was
        refused."""
        far: YamuxStream | None = None
        try:
            with trio.fail_after(MESSAGE_SECONDS):
                far = await self._links.open(target, STOP_PROTOCOL)
                if far.connection.relay is not None:
                    # Its own connection is gone since it reserved: no circuit over a circuit.
                    raise NetworkError(f"{target} is itself connected over a relay")
                await write_message(
                    far,
                    StopMessage(
                        type=StopMessage.CONNECT,
                        peer=PeerMessage(id=ID.from_base58(source).to_bytes()),
                    ),
                )
                answer = await read_message(far, StopMessage)
                if answer.status != Status.OK:
                    raise NetworkError(f"{target} answered {status_name(answer.status)}")
                await write_message(stream, _status(Status.OK))
        except (NetworkError, FrameError, MuxedStreamError, trio.TooSlowError) as error:
            logger.debug("no circuit from %s to %s: %s", source, target, error)
            if far is not None:
                await far.reset()
            await self._refuse(stream, Status.CONNECTION_FAILED)
            return None
        return far

    async def _refuse(self, stream: YamuxStream, status: int) -> None:
        await write_message(stream, _status(status))
        await stream.close()

    async def _splice(
        self, near: YamuxStream, far: YamuxStream, ends: tuple[PeerId, PeerId], place: str
    ) -> None:
        """Carry bytes both ways until both directions have ended or a limit is reached."""
        budget = _Budget(self._limits.circuit_bytes, place)
        broken = True
        try:
            with trio.move_on_after(self._limits.circuit_seconds):
                async with trio.open_nursery() as watching:
                    async with trio.open_nursery() as pumps:
                        watching.start_soon(self._watch, ends, pumps.cancel_scope)
                        pumps.start_soon(self._pump, near, far, budget, pumps.cancel_scope)
                        await self._pump(far, near, budget, pumps.cancel_scope)
                    broken = pumps.cancel_scope.cancelled_caught
                    watching.cancel_scope.cancel()
        finally:
            if broken:
                await near.reset()
                await far.reset()

    async def _watch(self, ends: tuple[PeerId, PeerId], scope: trio.CancelScope) -> None:
        """End a circuit whose ends may not use the relay any more."""
        refusals = 0
        while refusals < 2:
            await trio.sleep(self._limits.recheck_seconds)
            refusals = 0 if all(map(self._allow, ends)) else refusals + 1
        scope.cancel()

    async def _pump(
        self, source: YamuxStream, target: YamuxStream, budget: _Budget, scope: trio.CancelScope
    ) -> None:
        try:
            while budget.left > 0:
                chunk = await source.read_chunk()
                budget.left -= len(chunk)
                self.forwarded_bytes += len(chunk)
                while seconds := self._rate.take(budget.place, len(chunk)):
                    await trio.sleep(seconds)
                await target.write(chunk)
        except MuxedStreamEOF:
            await target.close()
            scope.deadline = min(scope.deadline, trio.current_time() + HALF_CLOSED_SECONDS)
            return
        except MuxedStreamError as error:
            logger.debug("a circuit ended: %s", error)
        scope.cancel()


@dataclass(slots=True)
class _Budget:
    """The bytes a circuit may still carry, over both directions, and the address they count for."""

    left: int
    place: str


def _place_of(connection: YamuxConnection) -> str:
    """Return what counts as one network address."""
    address = connection.get_remote_address()
    return "" if address is None else address_group(address[0])


def _status(status: int) -> HopMessage:
    message = HopMessage(type=HopMessage.STATUS)
    message.status = status  # type: ignore[assignment]
    return message
