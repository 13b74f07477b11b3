"""Which addresses are worth dialling: tables of the ranges, and properties over any text."""

from __future__ import annotations

import ipaddress
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.addresses.dial_order import (
    Circuit,
    Interfaces,
    circuit_addresses,
    circuits,
    direct_addresses,
    ip_of,
    is_global,
)
from swarm_shared.identity.keys import Identity

HOME = Interfaces(
    networks=(
        ip_network("127.0.0.0/8"), ip_network("192.168.1.0/24"),
        ip_network("::1/128"), ip_network("fd00:1::/64"), ip_network("2001:db8:5::/64"),
    ),
    hosts=frozenset(
        map(ip_address, ("127.0.0.1", "192.168.1.2", "::1", "fd00:1::2", "2001:db8:5::2"))
    ),
)  # fmt: skip
"""A laptop behind a household's router, with IPv6."""

RELAY, OTHER_RELAY = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))

ips = st.ip_addresses()
ports = st.integers(1, 65_535)


def tcp(ip: object, port: int = 4001) -> str:
    version = 6 if ":" in str(ip) else 4
    return f"/ip{version}/{ip}/tcp/{port}"


direct = st.builds(tcp, ips, ports)


@pytest.mark.parametrize(
    ("ip", "expected"),
    [
        ("8.8.8.8", True),
        ("172.15.255.255", True),
        ("172.32.0.0", True),
        ("100.63.255.255", True),
        ("100.128.0.0", True),
        # Reserved for documentation, benchmarks and the like: nobody's, so nobody's private.
        ("203.0.113.7", True),
        ("198.51.100.1", True),
        ("192.0.2.1", True),
        ("2001:db8::1", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("172.31.255.255", False),
        ("192.168.1.2", False),
        ("100.64.0.1", False),
        ("100.127.255.255", False),
        ("127.0.0.1", False),
        ("127.255.255.255", False),
        ("169.254.1.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("fdff::1", False),
        ("ff02::1", False),
        # Another spelling of an IPv4 address.
        ("::ffff:8.8.8.8", True),
        ("::ffff:127.0.0.1", False),
        ("::ffff:192.168.1.2", False),
    ],
)
def test_an_address_means_the_same_to_everybody_or_not(ip: str, expected: bool) -> None:
    assert is_global(tcp(ip)) is expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/dns4/relay.example.org/tcp/4001", True),
        ("/dns6/relay.example.org/tcp/4001", True),
        ("/dns/relay.example.org/tcp/4001", True),
        ("/unix/tmp/socket", False),
        ("", False),
        ("/", False),
        ("/ip4", False),
        ("/ip4/not-an-address/tcp/1", False),
        ("/ip4/::1/tcp/1", False),
        ("/ip6/8.8.8.8/tcp/1", False),
        ("/ip6zone/eth0/ip6/fe80::1/tcp/1", False),
    ],
)
def test_names_mean_the_same_to_everybody_and_nonsense_to_nobody(
    address: str, expected: bool
) -> None:
    assert is_global(address) is expected


@given(ips, ports)
def test_the_address_part_is_found_in_any_address(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    mapped = getattr(ip, "ipv4_mapped", None)
    assert ip_of(tcp(ip, port)) == (mapped or ip)


# Which are dialled, in which order


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        # The own network first, then everything else that may lead there.
        (["203.0.113.7", "192.168.1.9"], ["192.168.1.9", "203.0.113.7"]),
        (["2001:db8:9::1", "fd00:1::9"], ["fd00:1::9", "2001:db8:9::1"]),
        # Somebody else's private network, carrier's network and loopback lead nowhere.
        (["10.0.0.9", "100.64.0.9", "192.168.2.9", "fd00:2::9", "203.0.113.7"], ["203.0.113.7"]),
        (["127.0.0.1", "203.0.113.7"], ["203.0.113.7"]),
        (["127.0.0.1", "192.168.1.9"], ["192.168.1.9"]),
        (["::1", "2001:db8:9::1"], ["2001:db8:9::1"]),
        # Loopback counts when all that is announced is on this machine.
        (["127.0.0.1"], ["127.0.0.1"]),
        (["127.0.0.1", "::1"], ["127.0.0.1", "::1"]),
        (["127.0.0.1", "192.168.1.2"], ["192.168.1.2", "127.0.0.1"]),
        (["127.0.0.1", "2001:db8:5::2"], ["2001:db8:5::2", "127.0.0.1"]),
        (["::ffff:127.0.0.1", "::ffff:10.0.0.9", "203.0.113.7"], ["203.0.113.7"]),
        # Never a wildcard, a link's own or a group's address.
        (["0.0.0.0", "169.254.1.1", "224.0.0.1", "fe80::1", "::"], []),
        ([], []),
    ],
)
def test_only_what_may_lead_there_is_dialled(announced: list[str], expected: list[str]) -> None:
    found = direct_addresses(map(tcp, announced), HOME)
    assert found == list(map(tcp, expected))


def test_names_are_dialled_and_circuits_are_not() -> None:
    name, circuit = "/dns4/example.org/tcp/1", f"{tcp('203.0.113.7')}/p2p/{RELAY}/p2p-circuit"
    assert direct_addresses([circuit, name], HOME) == [name]


@given(st.lists(direct, max_size=20))
def test_what_is_dialled_was_announced_once_each_and_kept_in_its_group(
    announced: list[str],
) -> None:
    found = direct_addresses(announced, HOME)
    assert set(found) <= set(announced)
    assert len(found) == sum(address in found for address in announced)
    public = [a for a in found if is_global(a)]
    assert public == [a for a in announced if is_global(a)]


def test_this_machine_knows_its_own_addresses() -> None:
    here = Interfaces.of_this_machine()
    assert ip_address("127.0.0.1") in here.hosts
    assert ip_network("127.0.0.0/8") in here.networks
    assert not any(host.is_link_local for host in here.hosts)
    assert here == Interfaces.of_this_machine()


# Circuits


@given(st.lists(direct, min_size=1, max_size=5, unique=True), st.integers(1, 5))
def test_a_circuit_address_leads_back_to_its_relay(addresses: list[str], most: int) -> None:
    public = [address for address in addresses if is_global(address)]
    made = circuit_addresses(RELAY, addresses, most)
    assert circuits(made) == [Circuit(RELAY, tuple((public or addresses)[:most]))]
    assert circuits(f"{address}/p2p/{OTHER_RELAY}" for address in made) == circuits(made)
    assert direct_addresses(made, HOME) == []


def test_a_circuit_address_is_made_from_an_address_with_the_relays_own_name() -> None:
    made = circuit_addresses(RELAY, [f"{tcp('203.0.113.7')}/p2p/{RELAY}"], 3)
    assert made == (f"{tcp('203.0.113.7')}/p2p/{RELAY}/p2p-circuit",)


def test_a_relay_is_never_reached_over_a_relay() -> None:
    chain = f"{tcp('203.0.113.7')}/p2p/{OTHER_RELAY}/p2p-circuit/p2p/{RELAY}"
    assert circuit_addresses(RELAY, [chain], 3) == ()


def test_the_ways_to_one_relay_are_gathered_and_relays_keep_their_order() -> None:
    addresses = [
        f"{tcp(ip)}/p2p/{relay}/p2p-circuit/p2p/{RELAY}"
        for ip, relay in (
            ("203.0.113.1", OTHER_RELAY),
            ("203.0.113.2", RELAY),
            ("::1", OTHER_RELAY),
        )
    ]
    assert circuits(addresses) == [
        Circuit(OTHER_RELAY, (tcp("203.0.113.1"), tcp("::1"))),
        Circuit(RELAY, (tcp("203.0.113.2"),)),
    ]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/p2p-circuit",
        f"/p2p-circuit/p2p/{RELAY}",
        f"{tcp('203.0.113.1')}/p2p-circuit/p2p/{RELAY}",
        f"{tcp('203.0.113.1')}/p2p//p2p-circuit",
        f"{tcp('203.0.113.1')}/p2p/{RELAY}/more/p2p-circuit",
        f"{tcp('203.0.113.1')}/p2p/{RELAY}",
    ],
)
def test_what_names_no_relay_is_no_circuit(address: str) -> None:
    assert circuits([address]) == []
