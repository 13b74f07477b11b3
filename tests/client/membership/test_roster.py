"""The roster of members that a volunteer keeps."""

from __future__ import annotations

import pytest

from kits.members import peer_record
from kits.peer_names import named
from swarm_client.membership.roster import MAX_ROSTER_BYTES, RECORD_BYTES, RosterView
from swarm_shared.base.errors import ProtocolError
from swarm_shared.protocol import PeerRecord, Roster, RosterChange

LONGEST = 8_192


def records(first: int, count: int) -> tuple[PeerRecord, ...]:
    peers = range(first, first + count)
    return tuple(peer_record(named(f"peer {n}"), certificate="c" * LONGEST) for n in peers)


def test_changes_cannot_add_any_number_of_members() -> None:
    view, most = RosterView(), MAX_ROSTER_BYTES // (LONGEST + RECORD_BYTES)
    view.replace(Roster(serial=0, peers=records(0, most)))
    more = RosterChange(serial=1, since=0, changed=records(most, 1), removed=())
    with pytest.raises(ProtocolError, match="takes more than 64 MiB"):
        view.change(more)


def test_members_that_are_replaced_or_gone_do_not_count() -> None:
    view, count = RosterView(), MAX_ROSTER_BYTES // (2 * LONGEST)
    some, others = records(0, count), records(count, count)
    for serial in range(0, 8, 4):
        view.replace(Roster(serial=serial, peers=some))
        gone = tuple(record.peer for record in some)
        view.change(RosterChange(serial=serial + 1, since=serial, changed=some, removed=()))
        view.change(RosterChange(serial=serial + 2, since=serial + 1, changed=others, removed=gone))
    assert len(view) == count
