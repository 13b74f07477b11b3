"""The newest roster that the coordinator has sent, and a wake-up for tasks that wait for a
change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import trio

from swarm_shared.addresses.announced import is_tcp
from swarm_shared.addresses.dial_order import CIRCUIT, ip_of
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import PeerRecord, Roster, RosterChange

MAX_ROSTER_BYTES = 64 * 2**20
"""Bound on the texts of all records together: twice what one message can carry."""

RECORD_BYTES = 512
"""What a record counts beside its texts; those of a full roster are half of the bound."""


class RosterView:
    """The newest roster. Kept while the coordinator is absent: the members are still there."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, PeerRecord] = {}
        self._bytes = 0
        """Bytes that all records count."""
        self._serial = 0
        self._carriers: frozenset[str] = frozenset()
        self._revoked: frozenset[PeerId] = frozenset()
        self._changed = trio.lowlevel.ParkingLot()
        self.site = ""
        """This peer's, from its welcome; the records of a roster are of the same coordinator."""

    def replace(self, roster: Roster) -> frozenset[PeerId]:
        """Apply a full roster; return peers revoked since the last one, whose links must be
        closed."""
        self._peers, self._bytes = {}, 0
        self._put(roster.peers)
        return self._take(roster.serial, roster.revoked)

    def change(self, change: RosterChange) -> frozenset[PeerId]:
        """Apply a roster change; return peers revoked since the last one."""
        if change.since != self._serial:
            raise ProtocolError(
                f"the coordinator changed roster {change.since}; this peer has {self._serial}"
            )
        for removed in change.removed:
            self._remove(removed)
        self._put(change.changed)
        revoked = self._revoked if change.revoked is None else change.revoked
        return self._take(change.serial, revoked)

    def _take(self, serial: int, revoked: Iterable[PeerId]) -> frozenset[PeerId]:
        before, self._revoked = self._revoked, frozenset(revoked)
        for peer in self._revoked:
            self._remove(peer)
        self._serial = serial
        self._index_carriers()
        self.wake()
        return self._revoked - before

    def _put(self, records: Iterable[PeerRecord]) -> None:
        """Add records. ProtocolError when all together are too long: changes could add any
        number."""
        for record in records:
            self._remove(record.peer)
            self._peers[record.peer] = self.dialable(record)
            self._bytes += _size_bytes(self._peers[record.peer])
        if self._bytes > MAX_ROSTER_BYTES:
            raise ProtocolError(
                f"the coordinator's roster of {len(self._peers)} members takes more than "
                f"{MAX_ROSTER_BYTES >> 20} MiB; this volunteer attaches again"
            )

    def _remove(self, peer: PeerId) -> None:
        record = self._peers.pop(peer, None)
        if record is not None:
            self._bytes -= _size_bytes(record)

    @property
    def revoked(self) -> frozenset[PeerId]:
        return self._revoked

    def is_revoked(self, peer: PeerId) -> bool:
        """Whether the peer's certificate is revoked though it has not expired.

        Kept while the coordinator is absent, like the members.
        """
        return peer in self._revoked

    def dialable(self, record: PeerRecord) -> PeerRecord:
        """Return the record with the addresses that this peer may dial: the private ones only of
        members of its own site."""
        is_near = bool(self.site) and record.site == self.site
        carrier = record.carrier
        if carrier is not None:
            addresses = (*carrier.addresses, *(carrier.local if is_near else ()))
            carrier = carrier.model_copy(update={"addresses": addresses, "local": ()})
        addresses = (*record.addresses, *(record.local if is_near else ()))
        return record.model_copy(update={"addresses": addresses, "local": (), "carrier": carrier})

    def refresh(self, record: PeerRecord) -> None:
        """Apply newer addresses of a member from the directory. Members come from rosters alone.

        The member signs its record and nothing proves its addresses, so only new ports and relays
        at IPs that the coordinator has proved count.
        """
        current = self._peers.get(record.peer)
        if current is None or current.stage != record.stage:
            return
        carriers = current.carrier.addresses if current.carrier is not None else ()
        direct = [text for text in (*current.addresses, *carriers) if CIRCUIT not in text]
        proved = {ip_of(address) for address in direct}
        relays = {ip_of(text) for peer in self._peers.values() for text in peer.addresses}

        def count(announced: Iterable[str]) -> tuple[str, ...]:
            return tuple(
                address
                for address in announced
                if is_tcp(address) and ip_of(address) in (relays if CIRCUIT in address else proved)
            )

        carrier = record.carrier
        if carrier is not None:
            carrier = carrier.model_copy(update={"addresses": count(carrier.addresses)})
        self._remove(record.peer)
        newer = current.model_copy(
            update={"addresses": count(record.addresses) or current.addresses, "carrier": carrier}
        )
        self._peers[record.peer] = newer
        self._bytes += _size_bytes(newer)
        self._index_carriers()

    def wake(self) -> None:
        """Wake all tasks in `wait_changed`."""
        self._changed.unpark_all()

    async def wait_changed(self) -> None:
        await self._changed.park()

    def get(self, peer: PeerId) -> PeerRecord | None:
        return self._peers.get(peer)

    def all(self) -> tuple[PeerRecord, ...]:
        return tuple(self._peers.values())

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer ID is that of a member, or of a member's p2pd."""
        return peer in self._peers or peer in self._carriers

    def _index_carriers(self) -> None:
        # An index: unadmitted peers' streams are looked up here at any rate they choose.
        records = self._peers.values()
        self._carriers = frozenset(r.carrier.peer for r in records if r.carrier is not None)

    def of_stage(self, stage: StageIndex) -> Mapping[PeerId, PeerRecord]:
        """Members of a stage that accept new microbatches."""
        return {p: r for p, r in self._peers.items() if r.stage == stage and r.accepts_work}

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers


def _size_bytes(record: PeerRecord) -> int:
    carrier = record.carrier
    texts = (record.certificate, *record.addresses)
    if carrier is not None:
        texts = (*texts, carrier.binding, *carrier.addresses)
    return RECORD_BYTES + sum(map(len, texts))
