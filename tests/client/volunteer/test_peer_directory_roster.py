"""The roster view, from full rosters and from changes."""

from __future__ import annotations

import pytest

from swarm_client.membership.roster import RosterView
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import PeerRecord, Roster, RosterChange


def record(peer: str, stage: int = 0, rate: float = 1.0) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(peer), stage=StageIndex(stage), addresses=(), certificate="",
        microbatches_per_second=rate,
    )  # fmt: skip


def view(*peers: str, revoked: tuple[str, ...] = ()) -> RosterView:
    made = RosterView()
    made.replace(Roster(serial=7, peers=tuple(map(record, peers)), revoked=revoked))
    return made


def change(since: int = 7, **fields: object) -> RosterChange:
    values = {"serial": since + 1, "since": since, "changed": (), "removed": ()}
    return RosterChange.model_validate({**values, **fields})


def test_a_change_adds_replaces_and_takes_out() -> None:
    known = view("a", "b", "c")
    known.change(change(changed=(record("d"), record("b", 1, 2.0)), removed=("a",)))
    assert {(r.peer, r.stage) for r in known.all()} == {("b", 1), ("c", 0), ("d", 0)}
    known.change(change(since=8, removed=("b",)))
    assert set(known.of_stage(StageIndex(1))) == set()


def test_a_change_to_another_roster_than_the_last_is_refused() -> None:
    with pytest.raises(ProtocolError, match="changed roster 6; this peer has 7"):
        view("a").change(change(since=6))


def test_revoked_peers_stay_revoked_until_a_change_lifts_it() -> None:
    known = view("a", "b", revoked=("x",))
    assert known.change(change()) == frozenset()
    assert known.is_revoked(PeerId("x"))
    assert known.change(change(since=8, revoked=("a",))) == {"a"}
    assert not known.knows(PeerId("a"))
    assert not known.is_revoked(PeerId("x"))
