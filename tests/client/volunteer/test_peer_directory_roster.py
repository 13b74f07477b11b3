"""The roster view, from full rosters and from changes."""

from __future__ import annotations

import pytest

from kits.members import peer_record
from swarm_client.membership.roster import RosterView
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import CarrierAddress, PeerRecord, Roster, RosterChange


def record(peer: str, stage: int = 0, rate: float = 1.0) -> PeerRecord:
    return peer_record(peer, stage, microbatches_per_second=rate)


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


def located(peer: str, *addresses: str, p2pd: tuple[str, ...] = (), **fields: object) -> PeerRecord:
    carrier = CarrierAddress(peer=f"p2pd of {peer}", addresses=p2pd, binding="")
    known = record(peer).model_copy(update={"addresses": addresses, "carrier": carrier})
    return known.model_copy(update=fields)


NEAR = {"local": ("/ip4/192.168.1.7/tcp/1",), "site": "home"}


@pytest.mark.parametrize(
    ("site", "found"),
    [
        ("home", ("/ip4/203.0.113.5/tcp/1", "/ip4/192.168.1.7/tcp/1")),
        ("elsewhere", ("/ip4/203.0.113.5/tcp/1",)),
        ("", ("/ip4/203.0.113.5/tcp/1",)),
    ],
)
def test_private_addresses_are_those_of_members_of_the_same_site(
    site: str, found: tuple[str, ...]
) -> None:
    known = RosterView()
    known.site = site
    known.replace(Roster(serial=1, peers=(located("a", "/ip4/203.0.113.5/tcp/1", **NEAR),)))
    known.change(
        RosterChange(
            serial=2, since=1, changed=(located("b", "/ip4/203.0.113.5/tcp/1", **NEAR),), removed=()
        )
    )
    for peer in "ab":
        member = known.get(PeerId(peer))
        assert member is not None
        assert (member.addresses, member.local) == (found, ())


def test_a_peer_without_a_site_is_near_to_no_other_one() -> None:
    known = RosterView()
    known.replace(
        Roster(serial=1, peers=(located("a", local=("/ip4/192.168.1.7/tcp/1",), site=""),))
    )
    member = known.get(PeerId("a"))
    assert member is not None
    assert member.addresses == ()


def test_a_directory_record_changes_ports_and_relays_and_leads_to_no_other_machine() -> None:
    """The member signs it, and while the coordinator is absent nothing else vouches for it."""
    relay, other = "/ip4/203.0.113.9/tcp/1/p2p/R/p2p-circuit", "/ip4/198.51.100.1/tcp/22"
    known = RosterView()
    known.replace(
        Roster(
            serial=1,
            peers=(
                located("a", "/ip4/203.0.113.5/tcp/1", p2pd=("/ip4/203.0.113.5/tcp/2",)),
                located("b", "/ip4/203.0.113.9/tcp/1"),
            ),
        )
    )
    moved = "/ip4/203.0.113.5/tcp/4001"
    lies = (
        other,
        "/dns4/router/tcp/80",
        "/ip4/203.0.113.5/udp/1/quic-v1",
        f"{other}/p2p/R/p2p-circuit",
    )
    known.refresh(located("a", moved, relay, *lies, p2pd=("/ip4/203.0.113.5/tcp/9", *lies)))
    member = known.get(PeerId("a"))
    assert member is not None
    assert member.addresses == (moved, relay)
    assert member.carrier is not None
    assert member.carrier.addresses == ("/ip4/203.0.113.5/tcp/9",)
    known.refresh(located("a", *lies))
    assert known.get(PeerId("a")) is not None
    assert known.get(PeerId("a")).addresses == (moved, relay)  # type: ignore[union-attr]
