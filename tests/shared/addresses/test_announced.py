"""Which announced addresses members receive, and for which of them."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.addresses.announced import Announced, PeerPlace, is_tcp
from swarm_shared.addresses.dial_order import Interfaces, ip_of
from swarm_shared.base.endpoint import Endpoint
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity

KEY = bytes(16)
RELAY = Identity.from_seed(b"r" * 32).peer_id
STRANGER = Identity.from_seed(b"s" * 32).peer_id
AT_RELAY = "/ip4/203.0.113.9/tcp/4001"

COORDINATOR = Interfaces(
    hosts=frozenset(map(ipaddress.ip_address, ("198.51.100.1", "192.168.1.2", "127.0.0.1")))
)


def place(observed: str | None, *dialled_back: str) -> PeerPlace:
    ips = frozenset(map(ipaddress.ip_address, dialled_back))
    return PeerPlace(observed and ipaddress.ip_address(observed), COORDINATOR, ips)  # type: ignore[arg-type]


def relays(peer: PeerId) -> tuple[str, ...]:
    return (f"{AT_RELAY}/p2p/{RELAY}", "/ip4/192.168.1.9/tcp/4001") if peer == RELAY else ()


def sort(where: PeerPlace, *addresses: str) -> Announced:
    return where.sort(addresses, relays)


def test_only_the_address_that_the_session_comes_from_is_passed_on():
    own, foreign = "/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.6/tcp/22"
    found = sort(place("203.0.113.5"), own, foreign)
    assert found == Announced((own,), (), (Endpoint(ipaddress.ip_address("203.0.113.6"), 22),))


def test_an_address_at_which_the_peer_was_dialled_back_counts():
    six = "/ip6/2001:db8::5/tcp/4001"
    assert sort(place("203.0.113.5"), six).addresses == ()
    assert sort(place("203.0.113.5", "2001:db8::5"), six) == Announced((six,))


@pytest.mark.parametrize(
    "address",
    [
        "/dns4/router.lan/tcp/80", "/dns/localhost/tcp/80", "/dns6/a/tcp/80",
        "/ip4/203.0.113.5/udp/4001/quic-v1", "/ip4/203.0.113.5/udp/53",
        "/ip4/203.0.113.5/tcp/4001/ws", "/ip4/203.0.113.5/tcp/0", "/unix/tmp/socket", "", "/",
        "/ip4/203.0.113.5/tcp/4001/p2p/x/p2p-circuit", "/p2p-circuit",
        f"/ip4/203.0.113.6/tcp/22/p2p/{RELAY}/p2p-circuit",
        f"{AT_RELAY}/p2p/{STRANGER}/p2p-circuit",
        f"{AT_RELAY}/p2p/{RELAY}/p2p-circuit/p2p/x/p2p-circuit",
        f"/dns4/router.lan/tcp/80/p2p/{RELAY}/p2p-circuit",
        "/ip4/203.0.113.5/tcp/4001/p2p/" + 200 * "x",
        f"{AT_RELAY}/p2p/{RELAY}/p2p-circuit/p2p/" + 100 * "x",
    ],
)  # fmt: skip
def test_names_other_transports_and_unknown_relays_are_never_passed_on(address: str):
    assert sort(place("203.0.113.5"), address) == Announced()


def test_a_circuit_counts_where_its_relay_is_known_to_be():
    circuit = f"{AT_RELAY}/p2p/{RELAY}/p2p-circuit"
    near = f"/ip4/192.168.1.9/tcp/4001/p2p/{RELAY}/p2p-circuit"
    named = f"{circuit}/p2p/{STRANGER}"  # as a node announces it
    found = sort(place("203.0.113.5"), circuit, named, near)
    assert found == Announced((circuit, named), (near,))


def test_two_volunteers_behind_one_router_still_find_each_other_and_no_one_else_dials_there():
    home = "/ip4/192.168.1.7/tcp/4001"
    here = place("203.0.113.5")
    assert sort(here, home, "/ip4/127.0.0.1/tcp/4001") == Announced((), (home,))
    assert here.site(KEY) == place("203.0.113.5").site(KEY)
    assert here.site(KEY) != place("203.0.113.6").site(KEY)


def test_in_the_coordinator_s_own_network_only_what_it_sees_counts():
    """There a private address is not hidden by a router, so it can be compared."""
    own, router = "/ip4/192.168.1.7/tcp/4001", "/ip4/192.168.1.1/tcp/80"
    inside = place("192.168.1.7")
    assert sort(inside, own, router) == Announced((), (own,))
    assert inside.site(KEY) == place("192.168.1.8").site(KEY) == place("127.0.0.1").site(KEY)
    assert inside.site(KEY) != place("203.0.113.5").site(KEY)


def test_a_peer_on_the_coordinator_s_machine_is_at_all_of_its_addresses():
    mine = [f"/ip4/{host}/tcp/4001" for host in ("198.51.100.1", "192.168.1.2", "127.0.0.1")]
    found = sort(place("127.0.0.1"), *mine, "/ip4/127.0.0.2/tcp/22", "/ip4/192.168.1.1/tcp/80")
    assert found == Announced((mine[0],), (mine[1], mine[2]))


def test_a_session_over_a_relay_proves_nothing_and_has_no_site():
    found = sort(place(None), "/ip4/203.0.113.5/tcp/4001")
    assert (found.addresses, found.local) == ((), ())
    assert place(None).site(KEY) == ""


@given(
    observed=st.ip_addresses(),
    announced=st.lists(st.tuples(st.ip_addresses(), st.integers(1, 65_535)), max_size=8),
)
def test_whatever_is_announced_others_are_sent_to_the_peer_s_own_ip(
    observed: ipaddress.IPv4Address, announced: list[tuple[ipaddress.IPv4Address, int]]
):
    where = PeerPlace(observed, COORDINATOR)
    found = where.sort([f"/ip{ip.version}/{ip}/tcp/{port}" for ip, port in announced], relays)
    proved = {observed, *COORDINATOR.hosts} if observed in COORDINATOR.hosts else {observed}
    assert {ip_of(address) for address in found.addresses} <= proved


@pytest.mark.parametrize(
    ("address", "taken"),
    [
        ("/ip4/203.0.113.5/tcp/1", True), ("/ip6/2001:db8::1/tcp/1/p2p/12D3KooWx", True),
        (f"{AT_RELAY}/p2p/{RELAY}/p2p-circuit", True), ("/dns4/localhost/tcp/22", False),
        ("/ip4/203.0.113.5/udp/4001/quic-v1", False), (f"{AT_RELAY}/p2p-circuit", False),
        (f"/dns4/a/tcp/1/p2p/{RELAY}/p2p-circuit", False),
    ],
)  # fmt: skip
def test_p2pd_is_given_ip_addresses_with_tcp_ports(address: str, taken: bool):
    assert is_tcp(address) == taken
