"""When a roster is sent, and what the log says of revocations."""

from __future__ import annotations

from kits.swarm_world.event_bench import joined
from swarm_coordinator.core.events import CertificateIssued, Note, PeersRevoked
from swarm_coordinator.core.rules.roster import ADDRESS_ROSTER_SECONDS
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import AddressUpdate, Reachability, Roster


def at(address: str) -> AddressUpdate:
    return AddressUpdate(
        addresses=(address,), carrier=None, reachability=Reachability.PUBLIC, offers_relay=False
    )


def test_a_change_that_can_wait_long_does_not_delay_one_that_can_wait_less() -> None:
    bench = joined("a0", "b0", "a1", "b1")
    bench.tick(5.0)
    assert bench.sent("b0", Roster, bench.send("a1", at("first")))
    assert not bench.sent("b0", Roster, bench.send("a1", at("second")))
    bench.event(CertificateIssued(PeerId("a0"), "newer"))
    [roster] = bench.sent("b0", Roster, bench.tick(ADDRESS_ROSTER_SECONDS))
    records = {str(record.peer): record for record in roster.peers}
    assert records["a1"].addresses == ("second",)
    assert records["a0"].certificate == "newer"


def test_the_log_names_a_revoked_peer_that_is_not_attached() -> None:
    bench = joined("a0", "a1")
    commands = bench.event(PeersRevoked((PeerId("gone"),), "banned", bench.now + 60.0))
    [note] = bench.commands(Note, commands)
    assert note.text == "…gone, not attached now, may no longer take part: banned"
