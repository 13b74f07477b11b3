"""How this volunteer can be reached: relays while needed, addresses as they change.

Owns which relays are used and what the coordinator is sent about this peer's addresses. The
mechanisms are the node's (`swarm_shared.network`); this is the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from swarm_client.connectivity.reachability import ReachabilityFinding
from swarm_client.membership.coordinator_link import CoordinatorLink
from swarm_client.membership.roster import RosterView
from swarm_shared.base.types import PeerId
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node, RelayLimits
from swarm_shared.protocol import AddressUpdate, CarrierAddress, PathKind, Reachability

log = logging.getLogger(__name__)

WANTED_RELAY_SLOTS: Final = 2
"""Relay slots held while other peers cannot dial in."""
SETTLE_SECONDS: Final = 0.2
"""Pause after a change; a network change takes relays and addresses with it."""

VOLUNTEER_RELAY_LIMITS: Final = RelayLimits(
    max_reservations=256, max_circuits=64, max_circuits_per_peer=8
)
"""Limits of a volunteer's relay for members of its run; most of its uplink stays its own."""

MAX_ANNOUNCED_ADDRESSES: Final = 32
"""Maximum number of addresses that a message may carry."""


REACHABILITY_TEXT: Final = {
    Reachability.UNKNOWN: "it is not known whether other peers can reach this one",
    Reachability.PUBLIC: "other peers can reach this one directly",
    Reachability.MAPPED: "other peers can reach this one through a port that the router forwards",
    Reachability.BEHIND_NAT: "other peers reach this one through relays or hole punching",
}


class P2pd(Protocol):
    """This peer's p2pd, if it has one."""

    def carrier_address(self) -> CarrierAddress | None: ...

    def use_relays(self, addresses: Sequence[str]) -> None:
        """Be reachable through these relays."""


@dataclass(slots=True, eq=False)
class RelayPolicy:
    """`run` keeps relays and the coordinator up to date."""

    node: Node
    invite: Invite
    roster: RosterView
    p2pd: P2pd
    coordinator: CoordinatorLink
    report: Callable[[str], None]
    may_relay: bool = True
    reachability: Reachability = field(default=Reachability.UNKNOWN, init=False)
    _relaying_disabled: bool = field(default=False, init=False)
    _changed: trio.Event = field(default_factory=trio.Event, init=False)
    _is_admitted: bool = field(default=False, init=False)
    _announced: AddressUpdate | None = field(default=None, init=False)
    _known_addresses: dict[PeerId, tuple[str, ...]] = field(default_factory=dict, init=False)
    _p2pd_held: list[PeerId] = field(default_factory=list, init=False)
    _path_kinds: dict[PeerId, PathKind] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.node.on_addresses.append(self.wake)
        self.node.on_path_change.append(self._path_changed)

    def announcement(self) -> AddressUpdate:
        """Return the announcement for the next hello, and record it as announced."""
        self._announced = announced = self._current_announcement()
        return announced

    def reachability_changed(self, finding: ReachabilityFinding) -> None:
        """Apply the finding of the newest check."""
        self.node.announce(finding.addresses)
        if finding.reachability is not self.reachability:
            self.reachability = finding.reachability
            self.report(
                REACHABILITY_TEXT[finding.reachability]
                + (f" ({finding.note})" if finding.note else "")
            )
        self.wake()

    def admitted(self) -> None:
        """Relays serve members only: from now on slots are available."""
        self._is_admitted = True
        self.wake()

    def wake(self) -> None:
        """An input of the announcement may have changed: addresses, roster, carrier."""
        self._changed.set()

    def roster_changed(self) -> None:
        """Check connections to peers whose addresses have changed: old ones may only look alive."""
        addresses = {record.peer: record.addresses for record in self.roster.all()}
        for peer, known_addresses in self._known_addresses.items():
            if peer in addresses and addresses[peer] != known_addresses:
                self.node.check(peer)
        self._known_addresses = addresses
        self.wake()

    def set_relaying_disabled(self, held_back: bool) -> None:
        """Relay nothing for other peers, whatever else allows it: their bytes count against this
        machine's limits."""
        if held_back != self._relaying_disabled:
            self._relaying_disabled = held_back
            self.wake()

    async def run(self) -> None:
        while True:
            self._changed = trio.Event()
            self._use_relays()
            self._serve_as_relay()
            self._announce()
            await self._changed.wait()
            await trio.sleep(SETTLE_SECONDS)

    def _current_announcement(self) -> AddressUpdate:
        return AddressUpdate(
            addresses=self.node.addresses[:MAX_ANNOUNCED_ADDRESSES],
            carrier=self.p2pd.carrier_address(),
            reachability=self.reachability,
            offers_relay=self._offers_relay,
        )

    @property
    def _is_public(self) -> bool:
        return self.reachability in (Reachability.PUBLIC, Reachability.MAPPED)

    @property
    def _offers_relay(self) -> bool:
        return self.may_relay and self._is_public and not self._relaying_disabled

    def _use_relays(self) -> None:
        """Hold relay slots until it is certain that other peers can dial in; the coordinator's is
        the last resort."""
        relays: dict[PeerId, tuple[str, ...]] = {
            record.peer: record.addresses
            for record in self.roster.all()
            if record.offers_relay and record.peer != self.node.peer_id
        }
        relays[self.invite.coordinator] = self.invite.addresses
        slots = WANTED_RELAY_SLOTS if self._is_admitted and not self._is_public else 0
        self.node.use_relays(relays, slots, last=self.invite.coordinator)
        if self.reachability is not Reachability.UNKNOWN:
            # p2pd has a port of its own, which no router forwards.
            needs_relay = self.reachability is not Reachability.PUBLIC
            self.p2pd.use_relays(self._p2pd_relays(relays) if needs_relay else ())

    def _p2pd_relays(self, relays: Mapping[PeerId, Sequence[str]]) -> tuple[str, ...]:
        """The relays at which this peer has slots, in p2pd's form. A change restarts p2pd, so
        relays already in use are kept."""
        host_slots = self.node.relay_slots
        kept = [relay for relay in self._p2pd_held if relay in host_slots]
        self._p2pd_held = (kept + [relay for relay in host_slots if relay not in kept])[
            :WANTED_RELAY_SLOTS
        ]
        return tuple(
            f"{address.split('/p2p/')[0]}/p2p/{relay}"
            for relay in self._p2pd_held
            for address in relays.get(relay, ())[:1]
        )

    def _serve_as_relay(self) -> None:
        if self._offers_relay and self.node.relay is None:
            self.node.serve_relay(VOLUNTEER_RELAY_LIMITS, self.roster.knows)
            self.report("this peer serves as a relay, because it can be reached from outside")
        elif not self._offers_relay and self.node.relay is not None:
            self.node.stop_relay()

    def _announce(self) -> None:
        now = self._current_announcement()
        if self._announced is not None and _matters(now) == _matters(self._announced):
            return
        if self.coordinator.send(now):
            self._announced = now

    def _path_changed(self, peer: PeerId) -> None:
        path = self.node.path(peer)
        if path is None or not self.roster.knows(peer):
            return
        if self._path_kinds.get(peer) is not path.kind:
            self._path_kinds[peer] = path.kind
            self.report(f"link to …{peer[-8:]} is {path.kind.value} now")


def _matters(announced: AddressUpdate) -> AddressUpdate:
    """Return the part of an announcement that matters to its receiver: a newer binding of the same
    carrier does not."""
    if announced.carrier is None:
        return announced
    unbound = announced.carrier.model_copy(update={"binding": ""})
    return announced.model_copy(update={"carrier": unbound})
