"""Connecting to a peer by the best path available.

Direct addresses first, each a little after the one before (happy eyeballs, RFC 8305); relays when
none of them answers soon; then hole punching through both routers, so that the relay is not needed
any more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarm_shared.addresses.dial_order import Circuit, circuits, direct_addresses
from swarm_shared.base.errors import LinkTimeout, NetworkError, ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.errors import dial_errors
from swarm_shared.network.links import Links
from swarm_shared.network.nat.hole_punch import HolePuncher
from swarm_shared.network.nat.relay_client import RelayClient
from swarm_shared.network.own_addresses import OwnAddresses

logger = logging.getLogger(__name__)

DIAL_STAGGER_SECONDS: Final = 0.25
"""Head start of each address over the next."""
RELAY_HEAD_START_SECONDS: Final = 1.0
"""Head start of the direct addresses over relays: about three transoceanic round trips."""
MAX_ADDRESSES_DIALLED: Final = 16
MAX_CIRCUITS_DIALLED: Final = 4
MAX_ATTEMPTS: Final = 256
"""Addresses dialled at once, of all peers together; further ones wait. A roster can name any number
of hosts."""


class Dialer:
    """Dials peers."""

    def __init__(
        self, links: Links, own: OwnAddresses, relays: RelayClient, puncher: HolePuncher
    ) -> None:
        self._links = links
        self._own = own
        self._relays = relays
        self._puncher = puncher
        self._locks: dict[PeerId, trio.Lock] = {}
        self._attempts = trio.Semaphore(MAX_ATTEMPTS)

    async def connect(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        timeout_seconds: float,
        *,
        from_listening_port: bool = False,
    ) -> None:
        """Connect to `peer`; returns at once when connected. NetworkError or LinkTimeout
        otherwise."""
        lock = self._locks.setdefault(peer, trio.Lock())
        try:
            async with lock:
                if self._links.best(peer) is not None:
                    return
                direct = self._targets(peer, addresses)
                ways = circuits(addresses)[:MAX_CIRCUITS_DIALLED]
                if not direct and not ways:
                    listed = ", ".join(addresses) or "none are known"
                    raise NetworkError(f"{peer} has no address that leads there: {listed}")
                await self._dial_first(peer, direct, ways, timeout_seconds, from_listening_port)
                if not self._links.has_direct(peer):
                    await self._puncher.wait(peer)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._locks.pop(peer, None)

    def _targets(self, peer: PeerId, addresses: Sequence[str]) -> list[Multiaddr]:
        """Return the dialable addresses, without the peer ID at their end."""
        suffix = f"/p2p/{peer}"
        plain = [address.removesuffix(suffix) for address in addresses]
        targets: list[Multiaddr] = []
        for address in direct_addresses(dict.fromkeys(plain), self._links.interfaces()):
            try:
                target = Multiaddr(address)
            except ValueError:
                logger.debug("skipping %r, an address of %s", address, peer)
                continue
            names = {protocol.name for protocol in target.protocols()}
            if "tcp" in names and not names & {"p2p", "ws", "wss"}:
                targets.append(target)
        return targets[:MAX_ADDRESSES_DIALLED]

    async def _dial_first(
        self,
        peer: PeerId,
        direct: list[Multiaddr],
        ways: list[Circuit],
        timeout_seconds: float,
        from_listening_port: bool,
    ) -> None:
        """Dial all paths, each a little after the one before; the first success cancels the
        others."""
        failures: list[tuple[str, str]] = []  # address or relay, and the reason
        running = len(direct)
        direct_failed = trio.Event()
        if not direct:
            direct_failed.set()

        async def dial(target: Multiaddr, failed: trio.Event) -> None:
            nonlocal running
            try:
                async with self._attempts:
                    await self._dial_direct(peer, target, from_listening_port)
            except NetworkError as error:
                failures.append((str(target), _reason(error, str(target))))
                failed.set()
                running -= 1
                if not running:
                    direct_failed.set()
                return
            nursery.cancel_scope.cancel()

        async def dial_relayed() -> None:
            with trio.move_on_after(RELAY_HEAD_START_SECONDS):
                await direct_failed.wait()
            for way in ways:
                relay = f"relay {way.relay}"
                try:
                    with dial_errors(relay):
                        await self._relays.dial(peer, way)
                except (NetworkError, ProtocolError) as error:
                    failures.append((relay, _reason(error, relay)))
                else:
                    nursery.cancel_scope.cancel()

        with trio.move_on_after(timeout_seconds) as scope:
            async with trio.open_nursery() as nursery:
                if ways:
                    nursery.start_soon(dial_relayed)
                for target in direct:
                    failed = trio.Event()
                    nursery.start_soon(dial, target, failed)
                    with trio.move_on_after(DIAL_STAGGER_SECONDS):
                        await failed.wait()
        if self._links.best(peer) is not None:
            return
        if scope.cancelled_caught:
            tried = [str(target) for target in direct] + [f"relay {way.relay}" for way in ways]
            raise LinkTimeout(
                f"{peer} did not answer within {timeout_seconds:g} s at {', '.join(tried)}"
            )
        raise _not_reached(peer, failures)

    async def _dial_direct(
        self, peer: PeerId, target: Multiaddr, from_listening_port: bool
    ) -> None:
        peer_id = ID.from_base58(peer)
        names = {protocol.name for protocol in target.protocols()}
        version = 6 if "ip6" in names else 4
        source = self._own.source(version) if from_listening_port else None
        if source is not None:
            try:
                with dial_errors(str(target)):
                    await self._links.swarm.dial_addr(target, peer_id, source)
            except NetworkError as error:
                # An old connection between the same two ports may linger: use any port then.
                logger.debug("dialling from port %d: %s", source[1], error)
            else:
                return
        with dial_errors(str(target)):
            await self._links.swarm.dial_addr(target, peer_id)


def _reason(error: Exception, where: str) -> str:
    return str(error).removeprefix(f"{where}: ")


def _not_reached(peer: PeerId, failures: Sequence[tuple[str, str]]) -> NetworkError:
    """Each reason once, with the address or relay, or with their number if there are several; all
    of them are in the log."""
    places: dict[str, list[str]] = {}
    for where, reason in failures:
        logger.info("%s cannot be reached at %s: %s", peer, where, reason)
        places.setdefault(reason, []).append(where)
    reasons = "; ".join(
        f"{reason} at {where[0] if len(where) == 1 else f'{len(where)} addresses'}"
        for reason, where in places.items()
    )
    return NetworkError(f"{peer} cannot be reached: {reasons}")
