"""The addresses that p2pd is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kits.members import peer_record
from swarm_client.membership.roster import RosterView
from swarm_client.volunteer.averaging_routes import AveragingRoutes
from swarm_shared.base.clock import wall
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import Roster

MEMBER, P2PD, RELAY = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))


def routes_of(node: Any, view: RosterView) -> AveragingRoutes:
    return AveragingRoutes(node, view, wall)


async def test_p2pd_gets_ip_addresses_with_tcp_ports_only() -> None:
    """It resolves names itself, past every check here, and speaks QUIC to whatever is there."""
    node = SimpleNamespace(peer_id="me", on_path_change=[], path=lambda peer: None)
    view = RosterView()
    routes = routes_of(node, view)
    circuit = f"/ip4/203.0.113.9/tcp/1/p2p/{RELAY.peer_id}/p2p-circuit"
    carrier = routes.own_address(
        MEMBER, P2PD.peer_id,
        (
            "/ip4/203.0.113.5/tcp/1", "/dns4/router.lan/tcp/80", "/dns6/localhost/tcp/80",
            "/ip4/203.0.113.5/udp/1/quic-v1", "/ip4/10.99.98.97/tcp/80", circuit,
            f"/dns4/router.lan/tcp/80/p2p/{RELAY.peer_id}/p2p-circuit",
        ),
    )  # fmt: skip
    record = peer_record(MEMBER.peer_id, carrier=carrier)
    view.replace(Roster(serial=1, peers=(record,)))
    (member,) = routes.members([MEMBER.peer_id])
    assert member.p2pd_peer_id == P2PD.peer_id
    assert set(member.p2pd_addresses) == {"/ip4/203.0.113.5/tcp/1", circuit}
