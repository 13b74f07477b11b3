"""How this volunteer is reached: relays while it must be, addresses as they change.

Owns which relays are used and what the coordinator is told about this peer's whereabouts. The
mechanisms are the node's (`swarm_shared.network`); here is the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from swarm_client.connectivity.reachability import Finding
from swarm_client.membership.roster import RosterView
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import PeerId
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node, RelayLimits
from swarm_shared.protocol import CarrierAddress, PathKind, Reachability, Whereabouts

log = logging.getLogger(__name__)

SLOTS_WANTED: Final = 2
SETTLE_SECONDS: Final = 0.2
"""Changes come in groups: a network that changes takes relays and addresses with it."""

VOLUNTEER_RELAY_LIMITS: Final = RelayLimits(
    max_reservations=256, max_circuits=64, max_circuits_per_peer=8
)
"""A volunteer lends its line to members of its run, and keeps most of it."""

ANNOUNCED: Final = 32
"""Most addresses that a message may carry."""


WORDS: Final = {
    Reachability.UNKNOWN: "whether others can reach this peer is not known",
    Reachability.PUBLIC: "others can reach this peer directly",
    Reachability.MAPPED: "others can reach this peer through a port that the router forwards",
    Reachability.BEHIND_NAT: "others reach this peer through relays or punched holes",
}


@dataclass(frozen=True, slots=True)
class Position:
    """What others are told."""

    addresses: tuple[str, ...]
    carrier: CarrierAddress | None
    reachability: Reachability
    offers_relay: bool

    def is_same_place(self, other: Position) -> bool:
        """Whether nobody who knows the other one needs to be told. A binding alone may be newer."""
        return self._place() == other._place()

    def _place(self) -> tuple[object, ...]:
        carrier = None if self.carrier is None else (self.carrier.peer, self.carrier.addresses)
        return self.addresses, carrier, self.reachability, self.offers_relay


class Traversal:
    """`run` keeps relays and the coordinator up to date."""

    def __init__(
        self,
        node: Node,
        invite: Invite,
        roster: RosterView,
        carrier: Callable[[], CarrierAddress | None],
        use_p2pd_relays: Callable[[Sequence[str]], None],
        send: Callable[[FrozenModel], bool],
        report: Callable[[str], None],
        *,
        may_relay: bool = True,
    ) -> None:
        self._node = node
        self._invite = invite
        self._roster = roster
        self._carrier = carrier
        self._use_p2pd_relays = use_p2pd_relays
        self._send = send
        self._report = report
        self._may_relay = may_relay
        self._relaying_held_back = False
        self._reachability = Reachability.UNKNOWN
        self._changed = trio.Event()
        self._admitted = trio.Event()
        self._told: Position | None = None
        self._known_addresses: dict[PeerId, tuple[str, ...]] = {}
        self._p2pd_held: list[PeerId] = []
        self._path_kinds: dict[PeerId, PathKind] = {}
        node.on_addresses(self.wake)
        node.on_path_change(self._path_changed)

    @property
    def reachability(self) -> Reachability:
        return self._reachability

    def position(self) -> Position:
        """For the next Hello; counts as told."""
        self._told = self._now()
        return self._told

    def found(self, finding: Finding) -> None:
        """What the newest probe says."""
        self._node.announce(finding.addresses)
        if finding.reachability is not self._reachability:
            self._reachability = finding.reachability
            self._report(
                f"{WORDS[finding.reachability]}{f' ({finding.note})' if finding.note else ''}"
            )
        self.wake()

    def admitted(self) -> None:
        """Relays serve members only: from now on slots can be had."""
        self._admitted.set()
        self.wake()

    async def wait_admitted(self) -> None:
        await self._admitted.wait()

    def wake(self) -> None:
        """Something that others are told may have changed: addresses, roster, carrier."""
        self._changed.set()

    def roster_changed(self) -> None:
        """Who is found elsewhere now may have left connections behind that only look alive."""
        addresses = {record.peer: record.addresses for record in self._roster.all()}
        for peer, known in self._known_addresses.items():
            if peer in addresses and addresses[peer] != known:
                self._node.check(peer)
        self._known_addresses = addresses
        self.wake()

    def hold_relaying_back(self, held_back: bool) -> None:
        """Carry nothing for others for now, whatever else allows it: their bytes count here."""
        if held_back != self._relaying_held_back:
            self._relaying_held_back = held_back
            self.wake()

    async def run(self) -> None:
        while True:
            self._changed = trio.Event()
            self._use_relays()
            self._serve_as_relay()
            self._tell()
            await self._changed.wait()
            await trio.sleep(SETTLE_SECONDS)

    def _now(self) -> Position:
        return Position(
            self._node.addresses[:ANNOUNCED],
            self._carrier(),
            self._reachability,
            self._offers_relay,
        )

    @property
    def _is_public(self) -> bool:
        return self._reachability in (Reachability.PUBLIC, Reachability.MAPPED)

    @property
    def _offers_relay(self) -> bool:
        return self._may_relay and self._is_public and not self._relaying_held_back

    def _use_relays(self) -> None:
        """Slots until it is certain that others can dial in; the coordinator's is the last."""
        relays: dict[PeerId, tuple[str, ...]] = {
            record.peer: record.addresses
            for record in self._roster.all()
            if record.offers_relay and record.peer != self._node.peer_id
        }
        relays[self._invite.coordinator] = self._invite.addresses
        wanted = SLOTS_WANTED if self._admitted.is_set() and not self._is_public else 0
        self._node.use_relays(relays, wanted, last=self._invite.coordinator)
        if self._reachability is not Reachability.UNKNOWN:
            # hivemind's daemon has a port of its own, which no router forwards.
            needs_relay = self._reachability is not Reachability.PUBLIC
            self._use_p2pd_relays(self._p2pd_relays(relays) if needs_relay else ())

    def _p2pd_relays(self, relays: Mapping[PeerId, Sequence[str]]) -> tuple[str, ...]:
        """The relays at which this peer has slots, as p2pd wants them. A change restarts p2pd, so
        that those which serve already are kept."""
        held = self._node.relay_slots
        kept = [relay for relay in self._p2pd_held if relay in held]
        self._p2pd_held = (kept + [relay for relay in held if relay not in kept])[:SLOTS_WANTED]
        return tuple(
            f"{address.split('/p2p/')[0]}/p2p/{relay}"
            for relay in self._p2pd_held
            for address in relays.get(relay, ())[:1]
        )

    def _serve_as_relay(self) -> None:
        if self._offers_relay and self._node.relay is None:
            self._node.serve_relay(VOLUNTEER_RELAY_LIMITS, self._roster.knows)
            self._report("others may use this peer as a relay: it can be reached from outside")
        elif not self._offers_relay and self._node.relay is not None:
            self._node.stop_relay()

    def _tell(self) -> None:
        now = self._now()
        if self._told is not None and now.is_same_place(self._told):
            return
        told = self._send(
            Whereabouts(
                addresses=now.addresses,
                carrier=now.carrier,
                reachability=now.reachability,
                offers_relay=now.offers_relay,
            )
        )
        if told:
            self._told = now

    def _path_changed(self, peer: PeerId) -> None:
        path = self._node.path(peer)
        if path is None or not self._roster.knows(peer):
            return
        if self._path_kinds.get(peer) is not path.kind:
            self._path_kinds[peer] = path.kind
            self._report(f"link to …{peer[-8:]} is {path.kind.value} now")
