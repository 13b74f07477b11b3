"""Admission in the core: a revoked peer is removed, and members are notified at once."""

from __future__ import annotations

from kits.swarm_world.event_bench import Bench, joined
from kits.swarm_world.facts import COORDINATOR
from swarm_coordinator.core.events import (
    CertificateIssued,
    CloseSession,
    Command,
    Note,
    PeersReinstated,
    PeersRevoked,
    Restored,
)
from swarm_coordinator.core.rules.roster import (
    ADDRESS_ROSTER_SECONDS,
    MAXIMUM_REVOKED,
    RENEWED_ROSTER_SECONDS,
)
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.transition import begin
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Version
from swarm_shared.protocol import (
    AbortRound,
    AddressUpdate,
    CarrierAddress,
    CertificateRenewed,
    Close,
    PeerRecord,
    Reachability,
    Refused,
    Roster,
)

DAY = 86_400.0
A0, A1, B0 = (PeerId(name) for name in ("a0", "a1", "b0"))


def staffed(**options: object) -> Bench:
    """Two peers at each of two stages, and the first step in progress."""
    bench = joined("a0", "b0", "a1", "b1", **options)
    assert bench.run.phase is RunPhase.COLLECT
    return bench


def revoke(
    bench: Bench, *peers: str, reason: str = "banned", seconds: float = DAY
) -> list[Command]:
    named = tuple(PeerId(peer) for peer in peers)
    return bench.event(PeersRevoked(named, reason, bench.now + seconds))


def rosters(bench: Bench, peer: str) -> list[Roster]:
    return bench.sent(peer, Roster)


def peers_of(roster: Roster) -> set[str]:
    return {record.peer for record in roster.peers}


def where(address: str = "new", **changes: object) -> AddressUpdate:
    values = {
        "addresses": (address,), "carrier": None, "reachability": Reachability.PUBLIC,
        "offers_relay": True,
    }  # fmt: skip
    return AddressUpdate.model_validate({**values, **changes})


# ---------------------------------------------------------------- revoked


def test_a_revoked_peer_receives_the_reason_and_all_others_are_notified_at_once() -> None:
    bench = staffed()
    revoke(bench, "a1", reason="the organiser has banned this peer from the run: it cheats")
    [refused] = bench.sent("a1", Refused)
    assert (refused.code, refused.reason) == (
        "admission", "the organiser has banned this peer from the run: it cheats",
    )  # fmt: skip
    assert [c.peer for c in bench.commands(CloseSession)] == ["a1"]
    assert bench.sent("a1", Roster) == []
    assert A1 not in bench.run.peers
    assert any("it cheats" in note.text for note in bench.commands(Note))
    for peer in ("a0", "b0", "b1"):
        [roster] = rosters(bench, peer)
        assert roster.revoked == ("a1",)
        assert peers_of(roster) == {"a0", "b0", "b1"}


def test_what_a_revoked_peer_had_counted_is_leased_again_to_others() -> None:
    bench = staffed()
    bench.report("a1", 0, 1)
    bench.report("b0", 0, 1)
    bench.resolve_all()
    assert len(bench.step().table) == 4
    revoke(bench, "a1")
    assert {cell.peer for cell in bench.step().table.values()} == {"b0"}
    commands = bench.tick(3.0)
    leased = {item.microbatch: item.accumulate for _, item in bench.leased(commands)}
    # Only the stage that lost the cells counts them again.
    assert leased == {MicrobatchIndex(0): (StageIndex(1),), MicrobatchIndex(1): (StageIndex(1),)}


def test_a_receipt_of_a_revoked_peer_in_another_report_does_not_count() -> None:
    bench = staffed()
    receipt = bench.receipt("a1", 0)
    revoke(bench, "a1")
    lease = bench.step().leases[MicrobatchIndex(0)]
    bench.resolve(lease.trainer if lease.trainer != A1 else A0, 0, lease.lease, receipts=(receipt,))
    assert bench.step().table == {}


def test_a_revocation_in_the_middle_of_a_close_aborts_the_attempt() -> None:
    bench = staffed()
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    revoke(bench, "a1")
    assert [m.reason for m in bench.sent("b1", AbortRound)] == ["…a1 is gone"]
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(3.0)
    bench.fill()
    bench.tick(1.0)
    assert bench.close_of("b1").reductions[0].members == ("b1",)
    assert not bench.sent("a1", Close)


def test_a_revocation_while_a_step_is_applied_reaches_every_member_before_its_end() -> None:
    bench = staffed()
    bench.fill()
    bench.average_all()
    assert bench.run.phase is RunPhase.APPLYING
    bench.apply("a0")
    revoke(bench, "b1")
    for peer in ("a0", "a1", "b0"):
        [roster] = rosters(bench, peer)
        assert roster.revoked == ("b1",)
        # Members that have not applied yet are at another version, and still in the roster.
        assert peers_of(roster) == {"a0", "a1", "b0"}
    for peer in ("a1", "b0"):
        bench.apply(peer)
    assert bench.run.phase is RunPhase.COLLECT
    assert peers_of(rosters(bench, "a0")[-1]) == {"a0", "a1", "b0"}


def test_a_peer_that_attaches_while_a_step_is_applied_receives_the_revocations_at_once() -> None:
    bench = staffed()
    bench.fill()
    bench.average_all()
    revoke(bench, "b1")
    bench.apply("a0")
    bench.lose("a0")
    bench.attach("a0", stage=0, version=1)
    [roster] = rosters(bench, "a0")
    assert roster.revoked == ("b1",)


def test_many_are_revoked_with_one_roster() -> None:
    bench = staffed()
    revoke(bench, "a1", "b1", "gone")
    [roster] = rosters(bench, "a0")
    assert (roster.revoked, peers_of(roster)) == (("a1", "b1", "gone"), {"a0", "b0"})


def test_many_that_are_not_attached_are_one_line_in_the_log() -> None:
    bench = staffed()
    revoke(bench, *(f"x{number}" for number in range(1000)))
    assert [note.text for note in bench.commands(Note)] == [
        "1000 peers, not attached now, may no longer take part: banned"
    ]


def test_the_revoked_are_forgotten_when_their_certificates_have_expired() -> None:
    bench = staffed()
    revoke(bench, "a1", seconds=10.0)
    bench.tick(9.0)
    bench.lose("b1")
    assert rosters(bench, "a0")[0].revoked == ("a1",)
    bench.tick(2.0)
    bench.join("b2", 1)
    assert rosters(bench, "a0")[-1].revoked == ()


def test_a_reinstated_peer_may_be_served_again_and_comes_back() -> None:
    bench = staffed()
    revoke(bench, "a1")
    bench.event(PeersReinstated((A1,)))
    assert rosters(bench, "a0")[0].revoked == ()
    bench.join("a1", 1)
    assert A1 in peers_of(rosters(bench, "a0")[-1])


def test_reinstating_a_peer_that_was_not_revoked_sends_nothing() -> None:
    bench = staffed()
    assert bench.event(PeersReinstated((A1,))) == []


def test_a_peer_that_the_shell_lets_in_again_is_not_revoked_any_more() -> None:
    bench = staffed()
    revoke(bench, "a1")
    bench.join("a1", 1)
    assert rosters(bench, "a0")[-1].revoked == ()


def test_a_restarted_coordinator_still_publishes_revocations() -> None:
    bench = Bench()
    run = begin(
        bench.manifest, "manifest", COORDINATOR, Restored(2, Version(0), None, None, False, None),
        bench.now, {PeerId("a1"): bench.now + 50.0},
    )  # fmt: skip
    bench.run = run
    bench.join_all("a0", "b0")
    assert rosters(bench, "a0")[-1].revoked == ("a1",)


def test_a_roster_carries_the_newest_of_more_revoked_peers_than_it_can_hold() -> None:
    bench = staffed()
    revoke(bench, *(f"x{number}" for number in range(MAXIMUM_REVOKED)))
    revoke(bench, "newest")
    roster = rosters(bench, "a0")[0]
    assert len(roster.revoked) == MAXIMUM_REVOKED
    assert roster.revoked[-1] == "newest"
    assert "x0" not in roster.revoked


# ---------------------------------------------------------------- certificates


def test_a_renewed_certificate_reaches_its_peer_at_once_and_the_roster_later() -> None:
    bench = staffed()
    bench.tick(2 * RENEWED_ROSTER_SECONDS)
    bench.event(CertificateIssued(A1, "newer"))
    assert [m.certificate for m in bench.sent("a1", CertificateRenewed)] == ["newer"]
    certificates = {r.peer: r.certificate for r in rosters(bench, "a0")[0].peers}
    assert certificates == {"a0": "cert", "a1": "newer", "b0": "cert", "b1": "cert"}
    # The next certificate must not cause another roster so soon.
    bench.event(CertificateIssued(A0, "newer"))
    assert [m.certificate for m in bench.sent("a0", CertificateRenewed)] == ["newer"]
    assert rosters(bench, "b0") == []
    commands = bench.tick(RENEWED_ROSTER_SECONDS + 1)
    [roster] = bench.sent("b0", Roster, commands)
    assert {r.peer: r.certificate for r in roster.peers}["a0"] == "newer"


def test_a_certificate_for_a_peer_that_has_left_is_ignored() -> None:
    bench = staffed()
    bench.lose("a1")
    assert bench.event(CertificateIssued(A1, "newer")) == []


def test_the_coordinators_own_certificate_is_renewed_where_it_is_named_as_a_holder() -> None:
    bench = staffed()
    bench.event(CertificateIssued(COORDINATOR.peer, "newer"))
    assert bench.run.start.record == COORDINATOR.model_copy(update={"certificate": "newer"})


# ---------------------------------------------------------------- addresses


def test_the_roster_carries_the_reachability_of_a_hello() -> None:
    bench = Bench()
    bench.join("a0", 0, reachability=Reachability.MAPPED, offers_relay=True, addresses=("x",))
    bench.join("b0", 1)
    records = {r.peer: r for r in rosters(bench, "a0")[-1].peers}
    assert (records[A0].reachability, records[A0].offers_relay) == (Reachability.MAPPED, True)
    assert (records[B0].reachability, records[B0].offers_relay) == (Reachability.UNKNOWN, False)


def test_a_peer_s_new_address_reaches_all_members() -> None:
    bench = staffed()
    bench.tick(5.0)
    carrier = CarrierAddress(peer="p2pd-2", addresses=("c",), binding="b")
    bench.send("a1", where("new", carrier=carrier))
    for peer in ("a0", "a1", "b0", "b1"):
        [roster] = rosters(bench, peer)
        record = next(r for r in roster.peers if r.peer == A1)
        assert record == PeerRecord(
            peer=A1, stage=StageIndex(1), addresses=("new",), certificate="cert",
            microbatches_per_second=1.0, carrier=carrier, reachability=Reachability.PUBLIC,
            offers_relay=True,
        )  # fmt: skip


def test_an_unchanged_address_update_causes_no_roster() -> None:
    bench = staffed()
    bench.tick(5.0)
    bench.send("a1", where())
    assert rosters(bench, "a0")
    bench.tick(5.0)
    bench.send("a1", where())
    assert rosters(bench, "a0") == []


def test_a_peer_whose_addresses_flicker_costs_one_roster_a_second_at_most() -> None:
    bench = staffed()
    bench.tick(5.0)
    serials: list[int] = []
    for number in range(100):  # over five seconds
        bench.now += 0.05
        bench.send("a1", where(f"address-{number}"))
        serials += [roster.serial for roster in rosters(bench, "a0")]
    assert 4 <= len(serials) <= 6
    assert serials == list(range(serials[0], serials[0] + len(serials)))
    commands = bench.tick(ADDRESS_ROSTER_SECONDS)
    newest = (bench.sent("a0", Roster, commands) or rosters(bench, "a0"))[-1]
    assert {r.peer: r.addresses for r in newest.peers}[A1] == ("address-99",)


def test_a_new_address_of_a_peer_without_a_stage_is_not_published() -> None:
    bench = staffed()
    bench.tick(5.0)
    bench.attach("c")
    bench.send("c", where())
    assert rosters(bench, "a0") == []
    assert bench.peer("c").contact.addresses == ("new",)


def test_a_new_address_during_an_apply_is_published_after_it() -> None:
    bench = staffed()
    bench.fill()
    bench.average_all()
    bench.send("a1", where())
    assert rosters(bench, "a0") == []
    for peer in ("a0", "a1", "b0", "b1"):
        bench.apply(peer)
    records = {r.peer: r for r in rosters(bench, "a0")[-1].peers}
    assert records[A1].addresses == ("new",)
