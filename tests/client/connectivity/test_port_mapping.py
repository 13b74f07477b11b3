"""Port mapping: the bytes of NAT-PMP and SSDP, and a mapping's life with a router of our own.

The router is a small NAT-PMP server on a real UDP socket. Debian's miniupnpd is asked in
tests/kits/network_lab.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kits.waiting import until
from swarm_client.connectivity.port_mapping import (
    Gateway,
    Mapping,
    PortMapper,
    gateway,
    nat_pmp,
    upnp,
)
from swarm_shared.base.errors import LinkTimeout, NetworkError

LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
HOME = ipaddress.IPv4Address("192.168.1.1")
OUTSIDE = "192.175.48.7"


# ---------------------------------------------------------------- who the router is

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t0000FEA9\t00000000\t0001\t0\t0\t1000\t0000FFFF\t0\t0\t0
wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
"""


def test_the_default_route_with_the_lowest_metric_names_the_gateway() -> None:
    assert gateway.parse_linux_routes(ROUTES) == ipaddress.IPv4Address("192.168.2.1")


def test_without_a_default_route_there_is_no_gateway() -> None:
    assert gateway.parse_linux_routes("\n".join(ROUTES.splitlines()[:2])) is None
    assert gateway.parse_linux_routes("") is None
    assert gateway.parse_linux_routes("x\n" + "word " * 11) is None


def test_what_route_prints_on_macos_names_the_gateway() -> None:
    text = "   route to: default\ndestination: default\n    gateway: 192.168.1.254\n  flags: <UP>\n"
    assert gateway.parse_route_tool(text) == ipaddress.IPv4Address("192.168.1.254")
    assert gateway.parse_route_tool("    gateway: fe80::1%en0\n") is None
    assert gateway.parse_route_tool("    gateway: 999.1.1.1\n") is None


@pytest.mark.parametrize(
    ("text", "outer"),
    [
        ("8.8.8.8", True), (OUTSIDE, True), ("10.0.0.1", False), ("172.16.9.1", False),
        ("192.168.0.1", False), ("100.64.3.2", False), ("0.0.0.0", False), ("127.0.0.1", False),
        ("169.254.1.1", False), ("192.0.0.2", False), ("224.0.0.1", False),
        ("255.255.255.255", False), ("198.18.0.1", False),
    ],
)  # fmt: skip
def test_only_addresses_of_the_internet_are_outer_ones(text: str, outer: bool) -> None:
    assert gateway.is_outer_address(ipaddress.IPv4Address(text)) is outer


# ---------------------------------------------------------------- the bytes of NAT-PMP


def test_requests_have_the_bytes_of_the_rfc() -> None:
    assert nat_pmp.external_address_request() == bytes(2)
    assert nat_pmp.map_request(4001, 4002, 7200).hex() == "000200000fa10fa200001c20"


def test_answers_that_miniupnpd_gave_are_understood() -> None:
    """Recorded from version 2.3.1."""
    address = bytes.fromhex("008000000000302c34000001")
    found = nat_pmp.parse_answer(address, nat_pmp.Operation.EXTERNAL_ADDRESS)
    assert found == ipaddress.IPv4Address("52.0.0.1").packed
    mapped = bytes.fromhex("008200000000302c0fa10fa100001c20")
    found = nat_pmp.parse_answer(mapped, nat_pmp.Operation.MAP_TCP)
    assert struct.unpack(">HHI", found) == (4001, 4001, 7200)


@given(
    st.integers(1, 65_535), st.integers(0, 65_535), st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_mapping_comes_back_as_it_was_sent(
    internal: int, external: int, lifetime: int, epoch: int
) -> None:
    datagram = struct.pack(">BBHIHHI", 0, 130, 0, epoch, internal, external, lifetime)
    found = nat_pmp.parse_answer(datagram, nat_pmp.Operation.MAP_TCP)
    assert struct.unpack(">HHI", found) == (internal, external, lifetime)


@given(st.integers(1, 65_535))
def test_every_result_but_zero_is_a_refusal_with_a_reason(code: int) -> None:
    datagram = struct.pack(">BBHI", 0, 128, code, 0)
    with pytest.raises(nat_pmp.RefusedError, match="the router refuses: "):
        nat_pmp.parse_answer(datagram, nat_pmp.Operation.EXTERNAL_ADDRESS)


# ---------------------------------------------------------------- the bytes of SSDP


def answer(location: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nST: x\r\nLocation:{location}\r\nEXT:\r\n\r\n".encode()


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.1.2:5000/rootDesc.xml", "http://192.168.1.1@203.0.113.9/x",
        "http://192.168.1.1:80@203.0.113.9/x", "https://192.168.1.1/x", "http://192.168.1.10/x",
        "http://192.168.1.1.example.org/x", "http://[::1]/x", "ftp://192.168.1.1/x", "",
        "http://192.168.1.1:123456/x", "http://192.168.1.1/a b", "http://192x168.1.1/x",
    ],
)  # fmt: skip
def test_a_description_that_lies_elsewhere_is_not_believed(url: str) -> None:
    assert upnp.description_url(answer(url), HOME) is None


def test_the_gateways_own_description_is_found() -> None:
    for url in ("http://192.168.1.1:44257/rootDesc.xml", "http://192.168.1.1/"):
        assert upnp.description_url(answer(f" {url} "), HOME) == url
    assert upnp.description_url(answer("http://192.168.1.1/").replace(b"200", b"404"), HOME) is None
    assert upnp.description_url(b"HTTP/1.1 200 OK\r\n\r\n", HOME) is None


# ---------------------------------------------------------------- a mapping's life


@dataclass
class Router:
    """A NAT-PMP server. Its fields decide what it answers, at any moment."""

    external: str = OUTSIDE
    lifetime_seconds: int | None = None
    external_port: int | None = None
    result: int = 0
    silent: bool = False
    prefix: tuple[bytes, ...] = ()
    """Datagrams sent before each answer."""
    mapped: dict[int, int] = field(default_factory=dict)
    lifetimes: list[int] = field(default_factory=list)
    port: int = 0
    heard: trio.Condition = field(default_factory=trio.Condition)
    requests: int = 0

    async def serve(self, udp: trio.socket.SocketType) -> None:
        while True:
            request, sender = await udp.recvfrom(100)
            async with self.heard:
                self.requests += 1
                reply = None if self.silent else self._answer(request)
                self.heard.notify_all()
            if reply is not None:
                for datagram in (*self.prefix, reply):
                    await udp.sendto(datagram, sender)

    def _answer(self, request: bytes) -> bytes:
        head = struct.pack(">BBHI", 0, request[1] | 128, self.result, 77)
        if self.result:
            return head
        if len(request) == 2:
            return head + ipaddress.IPv4Address(self.external).packed
        internal, wanted, lifetime = struct.unpack(">HHI", request[4:])
        self.lifetimes.append(lifetime)
        if not lifetime:
            self.mapped.pop(internal, None)
            return head + struct.pack(">HHI", internal, 0, 0)
        self.mapped[internal] = wanted if self.external_port is None else self.external_port
        granted = lifetime if self.lifetime_seconds is None else self.lifetime_seconds
        return head + struct.pack(">HHI", internal, self.mapped[internal], granted)

    async def wait_for_requests(self, count: int) -> None:
        async with self.heard:
            while self.requests < count:
                await self.heard.wait()


@asynccontextmanager
async def running(router: Router) -> AsyncIterator[PortMapper]:
    """The router answers, and the mapper knows no other."""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
        await udp.bind(("127.0.0.1", 0))
        router.port = udp.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.serve, udp)
            yield mapper_for(router)
            nursery.cancel_scope.cancel()


def mapper_for(
    router: Router, on_change: Callable[[Mapping | None], None] = lambda mapping: None
) -> PortMapper:
    return PortMapper(on_change, lambda: Gateway(LOOPBACK, LOOPBACK), router.port)


@asynccontextmanager
async def keeping(
    router: Router, on_change: Callable[[Mapping | None], None] = lambda mapping: None
) -> AsyncIterator[PortMapper]:
    """The router answers, and a mapper keeps a mapping of port 4001 until the end."""
    async with running(router):
        mapper = mapper_for(router, on_change)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mapper.run)
            await mapper.map(4001)
            yield mapper
            nursery.cancel_scope.cancel()


async def test_a_router_maps_the_port_that_was_asked_for() -> None:
    router = Router()
    async with running(router) as mapper:
        mapping = await mapper.map(4001)
    assert mapping == Mapping(OUTSIDE, 4001, 4001, "nat-pmp")
    assert mapping.multiaddr == f"/ip4/{OUTSIDE}/tcp/4001"
    assert mapper.problem == ""


async def test_a_router_may_choose_another_port_and_a_shorter_life() -> None:
    router = Router(external_port=50_123, lifetime_seconds=60)
    async with running(router) as mapper:
        mapping = await mapper.map(4001)
    assert mapping == Mapping(OUTSIDE, 50_123, 4001, "nat-pmp")


@pytest.mark.parametrize("external", ["192.168.0.17", "100.64.1.1", "10.1.1.1", "0.0.0.0"])
async def test_an_outer_address_that_is_private_is_double_nat_and_nothing_is_mapped(
    external: str,
) -> None:
    router = Router(external=external)
    async with running(router) as mapper:
        assert await mapper.map(4001) is None
    assert mapper.double_nat
    assert external in mapper.problem
    assert "double NAT" in mapper.problem
    assert router.lifetimes == []


@pytest.mark.parametrize(
    "router", [Router(external_port=0), Router(lifetime_seconds=0)], ids=["port", "lifetime"]
)
async def test_a_mapping_that_makes_no_sense_is_not_used(router: Router) -> None:
    async with running(router) as mapper:
        assert await mapper.map(4001) is None
    assert "claims to forward" in mapper.problem


async def test_a_router_that_refuses_is_quoted() -> None:
    async with running(Router(result=2)) as mapper:
        assert await mapper.map(4001) is None
    assert "not to open ports" in mapper.problem


async def test_datagrams_that_are_no_answer_are_passed_over() -> None:
    late = struct.pack(">BBHIHHI", 0, 130, 0, 77, 9999, 9999, 7200)
    router = Router(prefix=(b"", b"\0", bytes(16), late))
    async with running(router) as mapper:
        mapping = await mapper.map(4001)
    assert mapping is not None
    assert mapping.external_port == 4001


async def test_a_silent_router_is_given_up_within_three_seconds() -> None:
    router = Router(silent=True)
    async with running(router) as mapper:
        start = trio.current_time()
        assert await mapper.map(4001) is None
        assert trio.current_time() - start < 3.0
    assert "does not answer" in mapper.problem
    assert router.requests == len(nat_pmp.RETRY_SECONDS)


async def test_a_router_without_nat_pmp_reports_it_at_once() -> None:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as unused:
        await unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(NetworkError, match="does not support NAT-PMP") as caught:
        await nat_pmp.ask(LOOPBACK, nat_pmp.external_address_request(), port)
    # Not after the time that is given to a silent one.
    assert not isinstance(caught.value, LinkTimeout)


async def test_a_machine_without_a_home_router_asks_no_host() -> None:
    mapper = PortMapper(find_gateway=lambda: None)
    assert await mapper.map(4001) is None
    assert "no home router" in mapper.problem


async def test_a_mapping_is_renewed_before_it_lapses_and_given_back_at_the_end() -> None:
    router = Router(lifetime_seconds=2)
    changes: list[Mapping | None] = []
    start = trio.current_time()
    async with keeping(router, changes.append) as mapper:
        mapping = mapper.mapping
        await router.wait_for_requests(6)
        assert trio.current_time() - start < 2 * 2
        assert mapper.mapping == mapping
    assert router.mapped == {}
    assert router.lifetimes[-1] == 0
    assert set(router.lifetimes[:-1]) == {7200}
    assert changes == [mapping, None]


async def test_a_router_that_goes_silent_costs_the_mapping_only_when_it_lapses() -> None:
    router = Router(lifetime_seconds=4)
    lost = trio.Event()
    async with keeping(router, lambda mapping: lost.set() if mapping is None else None) as mapper:
        start = trio.current_time()
        router.silent = True
        await lost.wait()
        assert 4.0 <= trio.current_time() - start < 9.0
    assert mapper.mapping is None
    assert "does not answer" in mapper.problem


async def test_a_new_outer_address_is_reported_at_the_next_renewal() -> None:
    router = Router(lifetime_seconds=2)
    changes: list[Mapping | None] = []
    async with keeping(router, changes.append):
        router.external = "192.31.196.3"
        await until(
            lambda: not (changes[-1] is None or changes[-1].external_address != router.external)
        )


async def test_a_silent_router_does_not_hold_up_the_end() -> None:
    router = Router()
    async with keeping(router):
        router.silent = True
        start = trio.current_time()
    assert trio.current_time() - start < 1.5


async def test_another_port_replaces_the_mapping() -> None:
    router = Router()
    async with running(router) as mapper:
        await mapper.map(4001)
        mapping = await mapper.map(4002)
    assert mapping is not None
    assert mapping.external_port == 4002
    assert router.mapped == {4002: 4002}


async def test_another_gateway_is_asked_anew() -> None:
    """As when a laptop comes into another network."""
    first, second = Router(), Router(external="192.31.196.3")
    where = Gateway(LOOPBACK, LOOPBACK)
    async with running(first), running(second):
        mapper = PortMapper(find_gateway=lambda: where, nat_pmp_port=first.port)
        await mapper.map(4001)
        where = Gateway(ipaddress.IPv4Address("127.0.0.2"), LOOPBACK)
        assert await mapper.map(4001) is None
    assert first.mapped == {}
