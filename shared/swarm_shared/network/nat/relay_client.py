"""The client's side of relays (circuit v2): slots held at relays, and connections through them.

Owns the slots that this node holds: at least two where there are two relays, renewed before they
expire, replaced when one is lost. The list of relays comes from outside (`offer`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.stream_muxer.exceptions import MuxedStreamError
from multiaddr import Multiaddr

from swarm_shared.addresses.binary import unpack_address
from swarm_shared.addresses.dial_order import CIRCUIT, Circuit, circuit_addresses
from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.errors import dial_errors, summary
from swarm_shared.network.libp2p.yamux import YamuxConnection, YamuxStream
from swarm_shared.network.links import Links
from swarm_shared.network.nat.circuit import (
    HOP_PROTOCOL,
    MESSAGE_SECONDS,
    CircuitTransport,
    read_message,
    status_name,
    write_message,
)

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0
SHORTEST_RENEWAL_SECONDS: Final = 30.0
RESERVE_SECONDS: Final = 10.0
"""Time for connecting to a relay and its answer; bounded because other candidates may be
waiting."""
ADDRESSES_PER_RELAY: Final = 3

Connect = Callable[[PeerId, Sequence[str]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A reservation at one relay. `renew_at` is a time of the event loop's clock."""

    relay: PeerId
    addresses: tuple[str, ...]
    """`/ip4/…/tcp/…/p2p/RELAY/p2p-circuit`: addresses at which peers dial this node through the
    relay."""
    renew_at: float


@dataclass(slots=True)
class _RelayCandidate:
    """A relay that may be asked for a slot."""

    addresses: tuple[str, ...]
    preferred: bool
    retry_at: float = 0.0
    failures: int = 0


class RelayClient:
    """`run` holds the slots; `dial` and `handle_stop` make relayed connections."""

    def __init__(self, links: Links, connect: Connect) -> None:
        self._links = links
        self._connect = connect
        self._candidates: dict[PeerId, _RelayCandidate] = {}
        self._slots: dict[PeerId, Slot] = {}
        self._wanted = 0
        self._wake = trio.Event()
        self.on_change: Callable[[], None] = lambda: None
        """Called when the slots held have changed."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """This node's addresses through its relays, the preferred relays first: a dialler takes the
        first that works."""
        slots = sorted(self._slots.values(), key=lambda slot: self._rank(slot.relay))
        return tuple(address for slot in slots for address in slot.addresses)

    @property
    def slots(self) -> tuple[PeerId, ...]:
        return tuple(self._slots)

    def want(self, count: int) -> None:
        """Set the number of slots to hold; 0 gives up all (this node can be dialled directly)."""
        if count != self._wanted:
            self._wanted = count
            if self._give_up_surplus():
                self.on_change()
            self._wake.set()

    def offer(self, relays: Mapping[PeerId, Sequence[str]], last: PeerId | None = None) -> None:
        """Set the available relays, each with addresses. `last` is used only when the others do not
        serve."""
        previous = self._candidates
        self._candidates = {}
        for relay, addresses in relays.items():
            if relay == self._links.own or not addresses:
                continue
            candidate = previous.get(relay)
            if candidate is None or candidate.addresses != tuple(addresses):
                candidate = _RelayCandidate(tuple(addresses), relay != last)
            self._candidates[relay] = candidate
        withdrawn = [relay for relay in self._slots if relay not in self._candidates]
        for relay in withdrawn:
            del self._slots[relay]
        if withdrawn:
            self.on_change()
        self._wake.set()

    def lost(self, peer: PeerId) -> None:
        """Handle the loss of the last connection to a peer, and with it of the slot there."""
        if self._slots.pop(peer, None) is not None:
            candidate = self._candidates.get(peer)
            if candidate is not None:
                # It is dead or unreachable now: other candidates come first.
                candidate.retry_at = trio.current_time() + FIRST_RETRY_SECONDS
            self.on_change()
            self._wake.set()

    async def run(self) -> None:
        """Hold as many slots as are wanted and available, until cancelled."""
        while True:
            self._wake = trio.Event()
            async with trio.open_nursery() as nursery:
                for relay in self._due(trio.current_time()):
                    nursery.start_soon(self._try, relay)
            with trio.move_on_after(self._pause(trio.current_time())):
                await self._wake.wait()

    def _due(self, now: float) -> list[PeerId]:
        """Return relays to ask now: slots to renew, candidates for missing ones, and better
        ones."""
        due = [slot.relay for slot in self._slots.values() if slot.renew_at <= now]
        free = sorted(
            (r for r in self._useful() if self._candidates[r].retry_at <= now), key=self._rank
        )
        better = [relay for relay in free if self._candidates[relay].preferred]
        chosen = better[: self._wanted - self._preferred_slots()]
        missing = self._wanted - len(self._slots) - len(chosen)
        return due + chosen + [relay for relay in free if relay not in better][: max(0, missing)]

    def _useful(self) -> list[PeerId]:
        """Return candidates where a slot is missing, or better than where one is held."""
        return [
            relay
            for relay, candidate in self._candidates.items()
            if relay not in self._slots
            and self._wanted
            > (self._preferred_slots() if candidate.preferred else len(self._slots))
        ]

    def _preferred_slots(self) -> int:
        return sum(self._candidates[relay].preferred for relay in self._slots)

    def _give_up_surplus(self) -> bool:
        """Keep the best slots, as many as are wanted; returns whether one was given up."""
        surplus = sorted(self._slots, key=self._rank)[self._wanted :]
        for relay in surplus:
            del self._slots[relay]
        return bool(surplus)

    def _rank(self, relay: PeerId) -> tuple[bool, bytes]:
        """Order the relays differently for each peer, so that peers spread over the relays."""
        text = f"{self._links.own} {relay}".encode()
        return not self._candidates[relay].preferred, hashlib.sha256(text).digest()

    def _pause(self, now: float) -> float:
        times = [slot.renew_at for slot in self._slots.values()]
        times += [self._candidates[relay].retry_at for relay in self._useful()]
        return max(0.05, min(times, default=now + LONGEST_RETRY_SECONDS) - now)

    async def _try(self, relay: PeerId) -> None:
        candidate = self._candidates.get(relay)
        if candidate is None:
            return
        try:
            slot = await self._reserve(relay, candidate.addresses)
        except (NetworkError, ProtocolError) as error:
            candidate.failures += 1
            pause_seconds = backoff_seconds(
                candidate.failures, FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS
            )
            candidate.retry_at = trio.current_time() + pause_seconds
            logger.info("no slot at relay %s: %s", relay, error)
            if self._slots.pop(relay, None) is not None:
                self.on_change()
            return
        candidate.failures = 0
        if self._candidates.get(relay) is candidate and self._wanted:
            previous = self.addresses
            self._slots[relay] = slot
            self._give_up_surplus()
            if self.addresses != previous:
                self.on_change()

    async def _reserve(self, relay: PeerId, addresses: Sequence[str]) -> Slot:
        """Request a slot. NetworkError when the relay refuses or does not answer."""
        with dial_errors(f"asking relay {relay}"), trio.fail_after(RESERVE_SECONDS):
            await self._connect(relay, addresses)
            stream, answer = await self._ask(relay, HopMessage(type=HopMessage.RESERVE))
            await stream.hang_up()
        # The addresses already known come first: a relay may announce different ones.
        announced = map(unpack_address, answer.reservation.addrs[:ADDRESSES_PER_RELAY])
        ways = dict.fromkeys(
            (*addresses, *(address for address in announced if address is not None))
        )
        seconds = max(SHORTEST_RENEWAL_SECONDS, 0.75 * (answer.reservation.expire - time.time()))
        return Slot(
            relay,
            circuit_addresses(relay, tuple(ways), ADDRESSES_PER_RELAY),
            trio.current_time() + min(seconds, 24 * 3600.0),
        )

    async def _ask(self, relay: PeerId, request: HopMessage) -> tuple[YamuxStream, HopMessage]:
        """Send one request to a relay; return the stream, which the caller ends, and the answer."""
        with dial_errors(f"asking relay {relay}"), trio.fail_after(2 * MESSAGE_SECONDS):
            stream = await self._links.open(relay, HOP_PROTOCOL)
            try:
                await write_message(stream, request)
                answer = await read_message(stream, HopMessage)
                if answer.type != HopMessage.STATUS or answer.status != Status.OK:
                    raise NetworkError(f"relay {relay} refuses: {status_name(answer.status)}")
            except BaseException:
                await stream.hang_up()
                raise
        return stream, answer

    # ------------------------------------------------------------------ connections

    async def dial(self, peer: PeerId, circuit: Circuit) -> None:
        """Connect to `peer` through a relay. NetworkError when that does not lead to it."""
        await self._connect(circuit.relay, circuit.relay_addresses)
        request = HopMessage(
            type=HopMessage.CONNECT, peer=PeerMessage(id=ID.from_base58(peer).to_bytes())
        )
        stream, _ = await self._ask(circuit.relay, request)
        raw = _raw_connection(stream, circuit.relay, initiator=True)
        try:
            with dial_errors(f"connecting to {peer} through {circuit.relay}"):
                await self._links.swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(peer))
        except BaseException:
            # py-libp2p leaves it open when it is cancelled in the handshake, and the relay holds
            # the circuit for as long as this end does.
            await raw.close()
            raise

    async def handle_stop(self, stream: YamuxStream) -> None:
        """Handle a connection that arrives through a relay; returns when it has ended."""
        relay = stream.connection.remote
        with trio.fail_after(MESSAGE_SECONDS):
            request = await read_message(stream, StopMessage)
        if relay not in self._slots or request.type != StopMessage.CONNECT:
            answer = StopMessage(type=StopMessage.STATUS, status=Status.PERMISSION_DENIED)
            await write_message(stream, answer)
            await stream.close()
            return
        await write_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
        raw = _raw_connection(stream, relay, initiator=False)
        try:
            # The handshake proves the peer's identity; the relay's claim is not needed.
            muxer = await self._links.swarm.upgrade_inbound_raw_conn(raw, Multiaddr(CIRCUIT))
        except MuxedStreamError:
            return
        except Exception as error:  # noqa: BLE001 (an unknown peer's bytes make it raise anything)
            logger.debug("a connection through %s was refused: %s", relay, summary(error))
            await raw.close()
            return
        assert isinstance(muxer, YamuxConnection)
        await muxer.event_closed.wait()


def _raw_connection(stream: YamuxStream, relay: PeerId, *, initiator: bool) -> RawConnection:
    return RawConnection(
        CircuitTransport(stream, relay), initiator, ConnectionType.RELAYED, [Multiaddr(CIRCUIT)]
    )
