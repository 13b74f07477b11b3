"""Identify: what a node says of itself and of the remote, and what it believes."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.identity.identify.pb.identify_pb2 import Identify
from multiaddr import Multiaddr

from kits.network.nodes import ANY_PORT, a_node, a_relay, ends, says_hello
from swarm_shared.addresses.binary import unpack_address, unpack_ip_address
from swarm_shared.identity.keys import PUBLIC_KEY_PREFIX, public_key_of
from swarm_shared.network.libp2p.yamux import YamuxStream
from swarm_shared.network.nat.circuit import HOP_PROTOCOL, read_message, write_message
from swarm_shared.network.nat.identify import IDENTIFY_PROTOCOL, remote_multiaddr


async def test_a_node_says_who_it_is_and_how_the_remote_looks_from_there() -> None:
    async with a_relay() as relay, a_node(None, ANY_PORT) as node:
        await node.connect(relay.peer_id, relay.addresses, from_listening_port=True)
        stream = await node._links.open(relay.peer_id, IDENTIFY_PROTOCOL)
        told = await read_message(stream, Identify)
        assert told.public_key == PUBLIC_KEY_PREFIX + public_key_of(relay.peer_id)
        assert HOP_PROTOCOL in told.protocols
        assert [str(Multiaddr(packed)) for packed in told.listen_addrs] == relay._own.listening()
        assert str(Multiaddr(told.observed_addr)) == node._own.listening()[0]
        assert await ends(stream)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00",
        b"\xff\xff\xff\xff",
        b"\xff\xff\x7f",
        b"\x03\xff\xff\xff",
        b"\x20cut short",
        b"\x0b\x22\x09\x04\x01\x02\x03\x04\x06k\x0f\xfd",  # py-multiaddr raises TypeError
        b"\x06\x22\x04\x04\x7f\x00\x00",
    ],
)
async def test_nonsense_about_ones_own_address_is_not_believed(answer: bytes) -> None:
    async def lie(stream: YamuxStream) -> None:
        await stream.write(answer)
        await stream.close()

    async with a_node(None, ANY_PORT) as liar, a_node(None, ANY_PORT) as node:
        liar._inbound.serve_raw(IDENTIFY_PROTOCOL, lie, public=True)
        await node.connect(liar.peer_id, liar.addresses, from_listening_port=True)
        assert node.observed_address(liar.peer_id) is None
        assert await says_hello(node, liar)


async def test_an_observed_address_that_is_none_to_dial_is_not_kept() -> None:
    async def answer(stream: YamuxStream) -> None:
        message = Identify(observed_addr=Multiaddr("/ip4/1.2.3.4/udp/5/quic-v1").to_bytes())
        await write_message(stream, message)

    async with a_node(None, ANY_PORT) as other, a_node(None, ANY_PORT) as node:
        other._inbound.serve_raw(IDENTIFY_PROTOCOL, answer, public=True)
        await node.connect(other.peer_id, other.addresses, from_listening_port=True)
        assert node.observed_address(other.peer_id) is None


# Addresses in binary

ports = st.integers(0, 65_535)
names = st.from_regex(r"[a-z0-9]{1,20}(\.[a-z0-9]{1,20}){0,3}", fullmatch=True)


@given(st.ip_addresses(), ports)
def test_addresses_come_out_as_libp2p_packs_them(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    text = f"/ip{ip.version}/{ip}/tcp/{port}"
    packed = Multiaddr(text).to_bytes()
    assert unpack_address(packed) == unpack_ip_address(packed) == text


@given(st.sampled_from(["dns", "dns4", "dns6"]), names, ports)
def test_names_come_out_as_libp2p_packs_them(kind: str, name: str, port: int) -> None:
    text = f"/{kind}/{name}/tcp/{port}"
    packed = Multiaddr(text).to_bytes()
    assert unpack_address(packed) == text
    assert unpack_ip_address(packed) is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (None, None),
        (("127.0.0.1", 1), "/ip4/127.0.0.1/tcp/1"),
        (("::1", 1), "/ip6/::1/tcp/1"),
        (("::ffff:127.0.0.1", 1), "/ip4/127.0.0.1/tcp/1"),
        (("fe80::1%eth0", 1), "/ip6/fe80::1/tcp/1"),
    ],
)
def test_a_sockets_remote_end_is_a_multiaddr(
    address: tuple[str, int] | None, expected: str | None
) -> None:
    assert remote_multiaddr(address) == expected
