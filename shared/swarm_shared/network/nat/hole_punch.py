"""Hole punching over TCP (DCUtR): from a relayed connection to a direct one.

Both ends dial each other at the same moment from the port they listen on, so that each router takes
the other's packets for answers (github.com/libp2p/specs/blob/master/relay/DCUtR.md; Ford, Srisuresh
and Kegel, USENIX 2005, for why it works). The end that opens the stream is the responder of the
Noise handshake, the other one its initiator, whichever dial succeeds.

Behind routers that choose a new port for each remote this cannot work: the attempt is cut short,
and repeated ever more rarely, or when the network changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.stream_muxer.exceptions import MuxedStreamError
from multiaddr import Multiaddr

from swarm_shared.addresses.binary import unpack_ip_address
from swarm_shared.addresses.dial_order import direct_addresses, ip_of
from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.errors import FrameError, NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.errors import dial_errors
from swarm_shared.network.libp2p.yamux import YamuxStream
from swarm_shared.network.links import Links
from swarm_shared.network.nat.circuit import MESSAGE_SECONDS, read_message, write_message
from swarm_shared.network.own_addresses import OwnAddresses

logger = logging.getLogger(__name__)

DCUTR_PROTOCOL: Final = "/libp2p/dcutr"
PUNCH_SECONDS: Final = 4.0
"""Duration of the dials: the kernel repeats a lost first packet after one and three seconds."""
RETRY_SECONDS: Final = 0.2
"""Pause after a router has refused a packet that came too early."""
PUNCH_WAIT_SECONDS: Final = 2.0
"""Longest wait of the dialler of a relayed connection for a direct one before it uses the relayed
one; streams move over when the hole is punched later."""
FIRST_PAUSE_SECONDS: Final = 30.0
LONGEST_PAUSE_SECONDS: Final = 600.0
"""Longest pause between attempts with a peer: routers forget mappings and machines move."""
RECENT_SECONDS: Final = 10.0
"""Time after an attempt in which further connections belong to it: both ends dial, and more than
one connection may result."""
MAX_ADDRESSES: Final = 8
MAX_ADDRESSES_DIALLED: Final = 4
"""Addresses of a remote that are dialled: a public one of each IP version, and two in its own
network. Nothing proves that they are the remote's."""
MAX_DIALS: Final = 8
"""Dials of one address in an attempt: 1.6 s in which both ends' dials must meet. An address that
goes on refusing may be that of a machine with no part in the run."""
REMOTE_ATTEMPT_PAUSE_SECONDS: Final = 5.0
"""Pause after the first failed attempt that a remote has begun; doubled with each further one: the
remote decides which addresses this node dials, and must not cause a flood."""
LONGEST_REMOTE_PAUSE_SECONDS: Final = 120.0
MAX_REMOTE_ATTEMPTS: Final = 8
"""Attempts begun by remotes at once; a refused remote tries again."""
PLAIN_DIAL_DELAY_SECONDS: Final = 0.3
"""Delay of a plain dial after the start: when the remote needs no hole, it is reachable from any
port."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One exchange with one peer, whichever end began it."""

    begun: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    inviting: trio.CancelScope | None = None
    """Set while this end's invitation is being exchanged."""


class HolePuncher:
    """Punches holes."""

    def __init__(self, links: Links, own: OwnAddresses) -> None:
        self._links = links
        self._own = own
        self._attempts: dict[PeerId, _Attempt] = {}
        self._invited = 0
        self._failures: dict[PeerId, int] = {}
        self._failed_until: dict[PeerId, float] = {}
        self._ended: dict[PeerId, float] = {}
        self.failed = 0

    def is_active(self, peer: PeerId) -> bool:
        """Whether a new connection to the peer results from an attempt."""
        if self._is_running(peer):
            return True
        return trio.current_time() - self._ended.get(peer, -RECENT_SECONDS) < RECENT_SECONDS

    def _is_running(self, peer: PeerId) -> bool:
        attempt = self._attempts.get(peer)
        return attempt is not None and attempt.begun.is_set()

    def network_changed(self) -> None:
        """Forget failures: what failed before may work from the new network."""
        self._failures.clear()
        self._failed_until.clear()

    def connected(self, peer: PeerId) -> None:
        """Record a direct connection, which ends the waiting for one."""
        if peer in self._attempts:
            self._attempts[peer].done.set()

    def worth_trying(self, peer: PeerId) -> bool:
        """Whether the pause after the last failure with this peer has ended."""
        return self._failed_until.get(peer, 0.0) <= trio.current_time()

    async def wait(self, peer: PeerId) -> None:
        """Wait, as the dialler of a relayed connection, until a punch has succeeded or failed."""
        if self._links.has_direct(peer) or not self.worth_trying(peer):
            return
        attempt = self._attempts.setdefault(peer, _Attempt())
        with trio.move_on_after(PUNCH_WAIT_SECONDS):
            await attempt.done.wait()
        if not attempt.begun.is_set() and self._attempts.get(peer) is attempt:
            del self._attempts[peer]

    async def punch(self, peer: PeerId) -> bool:
        """Begin an attempt with a peer that is connected over a relay. False: it stays relayed."""
        if self._links.has_direct(peer):
            return True
        if self._is_running(peer) or not self.worth_trying(peer):
            return False
        with self._attempt(peer) as attempt:
            addresses: list[str] | None = None
            try:
                with dial_errors(f"punching a hole to {peer}"), trio.CancelScope() as scope:
                    attempt.inviting = scope
                    addresses = await self._invite(peer)
            except (NetworkError, FrameError) as error:
                logger.debug("no hole punched to %s: %s", peer, error)
                return self._links.has_direct(peer)
            finally:
                attempt.inviting = None
            if addresses is not None and not scope.cancel_called:
                return await self._dial(peer, addresses, as_initiator=False)
            # The remote's invitation arrived in between, and `handle` has accepted it.
            await attempt.done.wait()
            return self._links.has_direct(peer)

    async def _invite(self, peer: PeerId) -> list[str]:
        stream = await self._links.open(peer, DCUTR_PROTOCOL)
        try:
            with trio.fail_after(MESSAGE_SECONDS):
                began = trio.current_time()
                await write_message(stream, self._own_message())
                answer = await read_message(stream, HolePunch)
                round_trip_seconds = trio.current_time() - began
                await write_message(stream, HolePunch(type=HolePunch.SYNC))
                await stream.close()
            # The other end dials when this reaches it, half a round trip from now.
            await trio.sleep(round_trip_seconds / 2)
        except BaseException:
            await stream.reset()
            raise
        return self._candidates(answer)

    async def handle(self, stream: YamuxStream) -> None:
        """Handle an attempt that the remote has begun."""
        peer = stream.connection.remote
        if stream.connection.relay is None or not self._takes_invitation(peer):
            await stream.reset()
            return
        self._invited += 1
        try:
            await self._take_invitation(peer, stream)
        finally:
            self._invited -= 1

    def _takes_invitation(self, peer: PeerId) -> bool:
        attempt = self._attempts.get(peer)
        if attempt is not None and attempt.begun.is_set():
            if attempt.inviting is None or self._links.own < peer:
                return False
            # Both ends have begun: the end with the lower peer ID continues.
            attempt.inviting.cancel()
            return True
        if self._invited >= MAX_REMOTE_ATTEMPTS:
            return False
        ended = self._ended.get(peer)
        pause_seconds = backoff_seconds(
            self._failures.get(peer, 1) - 1, REMOTE_ATTEMPT_PAUSE_SECONDS,
            LONGEST_REMOTE_PAUSE_SECONDS,
        )  # fmt: skip
        return ended is None or trio.current_time() - ended >= pause_seconds

    async def _take_invitation(self, peer: PeerId, stream: YamuxStream) -> None:
        with self._attempt(peer):
            try:
                with trio.fail_after(MESSAGE_SECONDS):
                    invitation = await read_message(stream, HolePunch)
                    await write_message(stream, self._own_message())
                    await read_message(stream, HolePunch)
            except (FrameError, MuxedStreamError, trio.TooSlowError) as error:
                logger.debug("%s abandoned punching a hole: %s", peer, error)
                return
            finally:
                await stream.close()
            await self._dial(peer, self._candidates(invitation), as_initiator=True)

    @contextmanager
    def _attempt(self, peer: PeerId) -> Iterator[_Attempt]:
        """Flag an attempt as begun, and as done at the end of the block."""
        attempt = self._attempts.setdefault(peer, _Attempt())
        attempt.begun.set()
        try:
            yield attempt
        finally:
            attempt.done.set()
            if self._attempts.get(peer) is attempt:
                del self._attempts[peer]

    def _own_message(self) -> HolePunch:
        return HolePunch(
            type=HolePunch.CONNECT,
            ObsAddrs=[Multiaddr(a).to_bytes() for a in self._own.punchable()[:MAX_ADDRESSES]],
        )

    def _candidates(self, message: HolePunch) -> list[str]:
        """Return the remote's addresses that are worth dialling from here."""
        unpacked = [unpack_ip_address(packed) for packed in message.ObsAddrs[:MAX_ADDRESSES]]
        addresses = dict.fromkeys(address for address in unpacked if address is not None)
        return direct_addresses(addresses, self._links.interfaces())[:MAX_ADDRESSES_DIALLED]

    async def _dial(self, peer: PeerId, addresses: list[str], *, as_initiator: bool) -> bool:
        """Dial all of the addresses repeatedly until one connects or the time is over."""
        peer_id = ID.from_base58(peer)
        places = {(str(ip_of(a)), int(a.split("/tcp/")[1])) for a in addresses}
        expected = self._links.swarm.expected_as_initiator
        if as_initiator:
            # An endpoint named by another peer stays with it: else any peer could take it over.
            places -= expected.keys()
            expected.update(dict.fromkeys(places, peer_id))
        done = self._attempts[peer].done
        try:
            with trio.move_on_after(PUNCH_SECONDS):
                async with trio.open_nursery() as nursery:
                    for address in addresses:
                        nursery.start_soon(self._dial_one, peer, peer_id, address, as_initiator)
                        if not as_initiator:
                            nursery.start_soon(self._dial_plainly, peer, peer_id, address)
                    await done.wait()
                    nursery.cancel_scope.cancel()
        finally:
            if as_initiator:
                for place in places:
                    expected.pop(place, None)
        now = trio.current_time()
        self._ended = {
            p: t for p, t in self._ended.items() if now - t < LONGEST_REMOTE_PAUSE_SECONDS
        }
        self._ended[peer] = now
        if self._links.has_direct(peer):
            self._failures.pop(peer, None)
            return True
        self.failed += 1
        earlier = self._failures.get(peer, 0)
        self._failures[peer] = earlier + 1
        pause_seconds = backoff_seconds(earlier, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._failed_until[peer] = now + pause_seconds
        return False

    async def _dial_one(self, peer: PeerId, peer_id: ID, address: str, as_initiator: bool) -> None:
        target = Multiaddr(address)
        swarm = self._links.swarm
        dial = swarm.dial_addr if as_initiator else swarm.dial_addr_as_responder
        for _ in range(MAX_DIALS):
            if self._links.has_direct(peer):
                return
            try:
                with dial_errors(address):
                    await dial(target, peer_id, self._own.source(6 if "/ip6/" in address else 4))
            except NetworkError as error:
                logger.debug("punching to %s: %s", peer, error)
                await trio.sleep(RETRY_SECONDS)
            else:
                return

    async def _dial_plainly(self, peer: PeerId, peer_id: ID, address: str) -> None:
        """Dial once from any port, as for a public address: this end's router may choose another
        port than the remote expects, which then takes the dial for an unrelated one."""
        await trio.sleep(PLAIN_DIAL_DELAY_SECONDS)
        try:
            with dial_errors(address):
                await self._links.swarm.dial_addr(Multiaddr(address), peer_id)
        except NetworkError as error:
            logger.debug("dialling %s: %s", peer, error)
