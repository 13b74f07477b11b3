"""Addresses as values: one spelling each, nothing else taken for one."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.endpoint import Endpoint


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_an_endpoint_survives_its_multiaddr(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    endpoint = Endpoint(ip, port)
    expected = endpoint if mapped is None else Endpoint(mapped, port)
    assert Endpoint.parse(endpoint.multiaddr) == expected


def test_a_peer_at_the_end_does_not_matter() -> None:
    assert Endpoint.parse("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW") == Endpoint(
        ipaddress.IPv4Address("192.0.2.1"), 4001
    )


def test_an_ipv4_address_in_ipv6_clothes_is_the_ipv4_address() -> None:
    plain = Endpoint.parse("/ip4/127.0.0.1/tcp/80")
    assert Endpoint.parse("/ip6/::ffff:127.0.0.1/tcp/80") == plain


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "/ip4/192.0.2.1/tcp/0", "/ip4/192.0.2.1/tcp/65536", "/ip4/192.0.2.1/udp/4001",
        "/ip4/192.0.2.256/tcp/1", "/ip6/192.0.2.1/tcp/1", "/ip4/::1/tcp/1", "/dns4/a.b/tcp/1",
        "/ip4/192.0.2.1/tcp/4001/ws", "/ip4/192.0.2.1/tcp/4001/p2p/12D/p2p-circuit",
        "/ip6/fe80::1%eth0/tcp/1", "/ip4/192.0.2.1/tcp/4001\n", "ip4/192.0.2.1/tcp/4001",
        "/ip4/192.0.2.1/tcp/٤٠٠١", "/ip4/0192.0.2.1/tcp/1",
    ],
)  # fmt: skip
def test_everything_else_is_no_endpoint(text: str) -> None:
    assert Endpoint.parse(text) is None


@given(st.text(max_size=60))
def test_any_text_is_an_endpoint_or_none(text: str) -> None:
    for spelling in (text, f"/ip4/{text}/tcp/1", f"/ip4/1.2.3.4/tcp/{text}"):
        endpoint = Endpoint.parse(spelling)
        assert endpoint is None or 0 < endpoint.port < 65_536
