"""Routes between this peer and the members that it averages with: their p2pd and host addresses,
and which routes have failed recently.

The order in which routes are tried is `swarm_client.averaging.all_reduce.routes`'.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from swarm_client.averaging.all_reduce.routes import Route, RouteMemory, possible_routes
from swarm_client.averaging.protocol.addresses import is_relayed
from swarm_client.averaging.protocol.messages import Member
from swarm_client.membership.roster import RosterView
from swarm_shared.addresses.announced import is_tcp
from swarm_shared.addresses.dial_order import Interfaces, direct_addresses, is_global
from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import FrameError, SignatureError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.identity.credentials import (
    CarrierBinding,
    open_carrier_binding,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import decode_envelope, encode_envelope
from swarm_shared.network import Node
from swarm_shared.protocol import CarrierAddress, PathKind, PeerRecord
from swarm_shared.run.manifest import Manifest

log = logging.getLogger(__name__)

BINDING_LIFETIME_SECONDS = 7 * 24 * 3600.0
"""Validity of this peer's carrier binding. It is signed again at every start and after half of this
time."""
MAX_ADDRESSES = 32
"""Maximum number of p2pd addresses that are announced; the bound of the message."""
_MAX_BINDINGS = 4096
"""Maximum number of verified bindings in the cache."""


class AveragingRoutes:
    """A view on the roster: only its members are averaged with."""

    def __init__(self, node: Node, roster: RosterView, clock: Clock) -> None:
        """`clock`: Unix seconds of the run's time, in which bindings expire."""
        self._node = node
        self._clock = clock
        self._roster = roster
        self._tied_stages: frozenset[StageIndex] = frozenset()
        self._memory = RouteMemory(trio.current_time)
        self._bindings: dict[tuple[PeerId, str], tuple[str, float]] = {}
        """Verified bindings by (peer, envelope): p2pd's peer ID, and the Unix time at which the
        binding expires."""
        self._own_binding: tuple[str, float, str] | None = None
        """This peer's binding: p2pd's peer ID, the Unix time at which it is signed again, the
        envelope."""
        node.on_path_change.append(lambda peer: self._memory.worked(peer, Route.HOST))

    def use_manifest(self, manifest: Manifest) -> None:
        first, last = StageIndex(0), StageIndex(manifest.stage_count - 1)
        self._tied_stages = frozenset((first, last) if manifest.model.trains_tied_table else ())

    def may_average(self, peer: PeerId) -> bool:
        """Whether the coordinator can name both peers in one group: they hold the same stage, or
        two tied ones."""
        own_record, other_record = self._roster.get(self._node.peer_id), self._roster.get(peer)
        if own_record is None or other_record is None:
            return False
        return (
            own_record.stage == other_record.stage
            or {own_record.stage, other_record.stage} <= self._tied_stages
        )

    def admitted_p2pds(self) -> tuple[str, ...]:
        """p2pd peer IDs of all members that this peer may average with."""
        other_peers = [
            record.peer for record in self._roster.all() if record.peer != self._node.peer_id
        ]
        return tuple(sorted(self.p2pds([peer for peer in other_peers if self.may_average(peer)])))

    def p2pds(self, peers: Sequence[PeerId]) -> tuple[str, ...]:
        """p2pd peer IDs of those `peers` that have a p2pd and a valid binding for it."""
        records = [self._roster.get(peer) for peer in peers]
        return tuple(name for record in records if record and (name := self._p2pd_of(record)))

    def _p2pd_of(self, record: PeerRecord) -> str:
        """The p2pd peer ID of a member; empty without p2pd, or when its binding is not valid."""
        if record.carrier is None:
            return ""
        key, now = (record.peer, record.carrier.binding), self._clock()
        verified = self._bindings.get(key)
        if verified is None or verified[1] < now:
            try:
                description = f"the carrier binding of {record.peer}"
                envelope = decode_envelope(record.carrier.binding, description)
                bound = open_carrier_binding(envelope, record.peer, now)
            except (FrameError, SignatureError) as error:
                log.warning("%s; its p2pd is not used", error)
                return ""
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
            verified = self._bindings[key] = (bound.carrier_peer_id, bound.expires)
        return verified[0] if verified[0] == record.carrier.peer else ""

    def host_addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses of a peer's libp2p host, from the roster."""
        record = self._roster.get(peer)
        return record.addresses if record is not None else ()

    def members(self, peers: Sequence[PeerId]) -> tuple[Member, ...]:
        """The members of a round, with the routes over which streams to them are opened."""
        interfaces = Interfaces.of_this_machine()
        return tuple(self._member(peer, interfaces) for peer in peers)

    def _member(self, peer: PeerId, interfaces: Interfaces) -> Member:
        record = self._roster.get(peer)
        p2pd = self._p2pd_of(record) if record is not None else ""
        announced = record.carrier.addresses if record and record.carrier and p2pd else ()
        # p2pd dials whatever it is given: names, which it resolves itself, and QUIC as well.
        usable = tuple(filter(is_tcp, announced))
        relayed = [address for address in usable if is_relayed(address)]
        path = self._node.path(peer)
        routes = possible_routes(
            both_have_p2pd=bool(p2pd),
            p2pd_relays=bool(relayed),
            host_is_relayed=path is not None and path.kind is PathKind.RELAYED,
        )
        return Member(
            peer_id=peer,
            p2pd_peer_id=p2pd,
            p2pd_addresses=(*direct_addresses(usable, interfaces), *relayed),
            routes=self._memory.order(peer, routes, announced),
        )

    def own_address(
        self, identity: Identity, p2pd_peer_id: str, addresses: Sequence[str]
    ) -> CarrierAddress:
        """The addresses of this peer's p2pd with a signed binding; unchanged until an input
        changes."""
        now = self._clock()
        if (
            self._own_binding is None
            or self._own_binding[0] != p2pd_peer_id
            or self._own_binding[1] < now
        ):
            binding = CarrierBinding(
                peer=identity.peer_id,
                carrier_peer_id=p2pd_peer_id,
                expires=now + BINDING_LIFETIME_SECONDS,
            )
            envelope = encode_envelope(binding.sign(identity))
            self._own_binding = (p2pd_peer_id, now + BINDING_LIFETIME_SECONDS / 2, envelope)
        return CarrierAddress(
            peer=p2pd_peer_id,
            addresses=tuple(sorted(addresses, key=_address_rank)[:MAX_ADDRESSES]),
            binding=self._own_binding[2],
        )

    def worked(self, peer: PeerId, route: Route) -> None:
        """Forget the failures of a route to a peer."""
        self._memory.worked(peer, route)

    def failed(self, peer: PeerId, route: Route) -> None:
        """Back off from a route to a peer, as long as its p2pd keeps its addresses."""
        record = self._roster.get(peer)
        carrier = record.carrier if record is not None else None
        self._memory.failed(peer, route, carrier.addresses if carrier is not None else ())


def _address_rank(address: str) -> int:
    """Sort key that puts globally reachable addresses first: some readers use only the
    first ones."""
    if is_relayed(address):
        return 1
    return 0 if is_global(address) else 2
