"""The carriers of a round in the averaging worker: p2pd's streams, and those of the daemon's host;
and the addresses at which other peers reach this p2pd, as they change.

p2pd authenticates the remote of every stream (Noise or TLS 1.3) and reports its peer ID before the
stream's first byte. That ID is p2pd's own; the daemon has checked the certificate that binds it to
the member's main key before sending it to this process (asyncio).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import anyio
from multiaddr import Multiaddr

from swarm_client.averaging.all_reduce.carrier import Channel, IncomingStreams
from swarm_client.averaging.all_reduce.errors import RouteAbsentError
from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.routes import Route, RouteFault
from swarm_client.averaging.all_reduce.stream_race import Opener, StreamRace
from swarm_client.averaging.protocol.addresses import (
    is_relayed,
    relayed_addresses,
    without_peer_id,
)
from swarm_client.averaging.protocol.messages import Member
from swarm_client.averaging.worker.hivemind_imports import Hivemind
from swarm_client.averaging.worker.host_streams import (
    HostStreams,
    SocketChannel,
    host_remote_name,
)
from swarm_shared.addresses.dial_order import CIRCUIT
from swarm_shared.base.errors import LinkTimeout, NetworkError
from swarm_shared.base.types import PeerId

PROTOCOL = "/swarmtrain/all-reduce/1"
OPEN_SECONDS = 15.0
DIAL_TURN_SECONDS = 0.4
"""Seconds that the other end has to dial where it is its turn: enough for its first packet over any
path. A longer wait would also wait for an end whose p2pd is being restarted."""
_LOOK_SECONDS = 0.05
CHECK_SECONDS = 5.0
FAST_CHECK_SECONDS = 0.5
"""Seconds between two checks while a relay has not been reached, which takes about a second."""
FAST_CHECKS = 20

logger = logging.getLogger(__name__)


class P2pdStreams:
    """Opens streams over one p2pd, and passes those of remotes to `hub`."""

    def __init__(self, hivemind: Hivemind, p2p: Any, hub: IncomingHub) -> None:
        self._hivemind = hivemind
        self._p2p = p2p
        self._hub = hub

    async def serve(self) -> None:
        await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)

    async def _accept(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            channel = SocketChannel(reader, writer, _route(info))
            await self._hub.accept(info.peer_id.to_base58(), channel)
        except Exception:  # a supervisor: asyncio would only print it
            logger.exception("a stream from %s failed", info.peer_id)

    async def connect(self, p2pd_peer_id: str, addresses: Sequence[str]) -> None:
        """Connect p2pd to another one unless it is connected. NetworkError on failure."""
        try:
            peer = self._hivemind.PeerID.from_base58(p2pd_peer_id)
            targets = [dial_target(without_peer_id(text, p2pd_peer_id)) for text in addresses]
        except ValueError as error:
            raise NetworkError(f"{p2pd_peer_id} has an address that is none: {error}") from error
        name = f"p2pd {p2pd_peer_id}"
        with self._errors(f"{name} did not answer", f"{name} cannot be reached"):
            await self._p2p._client.connect(peer, targets)

    async def listen_addresses(self) -> list[str]:
        """Return the addresses that p2pd reports, without its peer ID. NetworkError if it has
        ended."""
        with self._errors("p2pd does not answer", "p2pd does not report its addresses"):
            _, addresses = await self._p2p._client.identify()
        return [str(address) for address in addresses]

    async def connected(self) -> dict[str, list[str]]:
        """The peer IDs to which p2pd is connected, with the remote addresses of the connections."""
        addresses_by_peer: dict[str, list[str]] = {}
        with self._errors("p2pd does not answer", "p2pd does not answer"):
            for info in await self._p2p._client.list_peers():
                addresses_by_peer.setdefault(info.peer_id.to_base58(), []).extend(
                    map(str, info.addrs)
                )
        return addresses_by_peer

    async def open(
        self, p2pd_peer_id: str, addresses: Iterable[str], *, relayed: bool
    ) -> SocketChannel:
        """Open a stream: over a relay only, or without any relay."""
        usable = [address for address in addresses if is_relayed(address) == relayed]
        if not usable and not await self._is_connected(p2pd_peer_id, relayed=relayed):
            # The other end may be behind a router and still dial this one.
            raise RouteAbsentError("p2pd has no address that leads there, and no connection")
        if usable and (relayed or not await self._was_dialled(p2pd_peer_id)):
            await self.connect(p2pd_peer_id, usable)
        peer = self._hivemind.PeerID.from_base58(p2pd_peer_id)
        failed = f"p2pd {p2pd_peer_id} opened no stream"
        with self._errors(f"{failed} in time", failed):
            stream = await self._p2p.call_binary_stream_handler(peer, PROTOCOL)
        info, reader, writer = stream
        channel = SocketChannel(reader, writer, _route(info))
        if channel.route is Route.P2PD_RELAYED and not relayed:
            await channel.abort()
            raise RouteAbsentError("p2pd is connected through a relay, and keeps to that")
        return channel

    @contextmanager
    def _errors(self, silent: str, failed: str) -> Iterator[None]:
        """Raise LinkTimeout or NetworkError for what p2pd's client raises."""
        try:
            with anyio.fail_after(OPEN_SECONDS):
                yield
        except TimeoutError as error:
            raise LinkTimeout(silent) from error
        except self._hivemind.daemon_errors as error:
            raise NetworkError(f"{failed}: {error}") from error

    async def _was_dialled(self, p2pd_peer_id: str) -> bool:
        """Whether a direct connection exists, once the other end has had its turn to make one.

        Members of a round dial each other at the same moment. When both dial from the port that
        they listen on, these are two halves of one TCP connection: each end takes itself for the
        dialler, and their handshakes fail ("noise: message is too short"). Therefore one of the
        two, by order of their IDs, waits for the other; on a loopback dials are never that
        simultaneous.
        """
        if await self._is_connected(p2pd_peer_id, relayed=False):
            return True
        if self._p2p.peer_id.to_base58() < p2pd_peer_id:
            return False
        with anyio.move_on_after(DIAL_TURN_SECONDS):
            while not await self._is_connected(p2pd_peer_id, relayed=False):
                await anyio.sleep(_LOOK_SECONDS)
            return True
        return False

    async def _is_connected(self, p2pd_peer_id: str, *, relayed: bool) -> bool:
        connections = (await self.connected()).get(p2pd_peer_id, [])
        return any(is_relayed(address) == relayed for address in connections)


async def current_addresses(streams: P2pdStreams, relays: Sequence[str]) -> tuple[str, ...]:
    """The addresses without p2pd's peer ID, direct ones first. NetworkError if p2pd has ended.

    p2pd announces a relay only if it takes the relay's address for a public one, which it does not
    on a local network; therefore the relays to which p2pd is connected are counted here.
    """
    own_addresses = await streams.listen_addresses()
    connected = await streams.connected() if relays else {}
    reached = [relay for relay in relays if relay.rpartition("/p2p/")[2] in connected]
    return (*(text for text in own_addresses if not is_relayed(text)), *relayed_addresses(reached))


async def watch_addresses(
    streams: P2pdStreams,
    relays: Sequence[str],
    addresses: tuple[str, ...],
    moved: Callable[[tuple[str, ...]], None],
) -> None:
    """Call `moved` whenever the addresses differ from those reported last, at first from
    `addresses`."""
    checks = 0
    while True:
        waits_for_relay = len(addresses) == 0 or sum(map(is_relayed, addresses)) < len(relays)
        early = waits_for_relay and checks < FAST_CHECKS
        await anyio.sleep(FAST_CHECK_SECONDS if early else CHECK_SECONDS)
        checks += 1
        try:
            current = await current_addresses(streams, relays)
        except NetworkError as error:
            logger.info("%s", error)
            continue
        if current != addresses:
            addresses = current
            moved(current)


class GroupCarrier:
    """The network of one round: each stream takes the best route of its pair."""

    def __init__(
        self, members: Sequence[Member], p2pd: P2pdStreams, host: HostStreams, hub: IncomingHub
    ) -> None:
        self._members = {member.peer_id: member for member in members}
        self._p2pd = p2pd
        self._host = host
        self._hub = hub
        self.faults: list[RouteFault] = []
        """Routes that failed."""

    async def open(self, peer: PeerId) -> Channel:
        member = self._members[peer]
        openers = [(route, self._opener(member, route)) for route in member.routes]
        return await StreamRace(peer, self.faults.append).open(openers)

    def _opener(self, member: Member, route: Route) -> Opener:
        if not route.over_p2pd:
            relayed = route is Route.HOST_RELAYED
            return partial(self._host.open, member.peer_id, relayed=relayed)
        relayed = route is Route.P2PD_RELAYED
        return partial(self._p2pd.open, member.p2pd_peer_id, member.p2pd_addresses, relayed=relayed)

    def incoming(self, spec: RoundSpec) -> AbstractContextManager[IncomingStreams]:
        names: dict[str, PeerId] = {}
        for peer in spec.members:
            names[host_remote_name(peer)] = peer
            if self._members[peer].p2pd_peer_id:
                names[self._members[peer].p2pd_peer_id] = peer
        return self._hub.round(spec.tag, names)


def dial_target(address: str) -> Multiaddr:
    """An address for p2pd's client, which needs only `to_bytes`. ValueError if it is invalid.

    Not hivemind's own class: that writes an Ed25519 peer ID inside an address as a CID, which p2pd
    does not read ("length greater than remaining number of bytes in buffer").
    """
    if address.partition(CIRCUIT)[2]:
        raise ValueError(f"{address!r} names a peer behind the relay's other end")
    return Multiaddr(address)


def _route(info: Any) -> Route:
    return Route.P2PD_RELAYED if is_relayed(str(info.addr)) else Route.P2PD
