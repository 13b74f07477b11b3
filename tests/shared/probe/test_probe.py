"""The doctor's protocol between two nodes: what a visitor learns, and what it cannot do."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from kits.members import ORGANISER, certificate
from kits.memory import needs, takes
from kits.waiting import until
from swarm_shared.base.endpoint import Endpoint
from swarm_shared.base.errors import AdmissionError, FrameError, LinkClosed
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.credentials import (
    check_certificate,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.probe_pass import sign_probe_pass
from swarm_shared.network import FramedStream, Node, open_node
from swarm_shared.probe import server as probe_module
from swarm_shared.probe.client import CLIENT_LIMITS, Probe, ProbeBusy, open_probe
from swarm_shared.probe.server import (
    ProbeLimits,
    address_key,
    answer_members_only,
    serve_probe,
)
from swarm_shared.protocol import (
    DOCTOR_PROTOCOL,
    MAX_RATE_BYTES,
    RATE_CHUNK_BYTES,
    SOFTWARE_VERSION,
    DialBack,
    DoctorHello,
    DoctorWelcome,
    Download,
    Echo,
    Upload,
    doctor_requests,
    encode,
    parse,
)

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
RUN = RunId("ab" * 32)
HELLO = DoctorHello(run=RUN, software=SOFTWARE_VERSION)
NOW = 1_800_000_000.0


def anybody(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
    return DoctorWelcome()


@asynccontextmanager
async def server(
    limits: ProbeLimits | None = None, ahead_seconds: float = 0.0
) -> AsyncIterator[Node]:
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        serve_probe(node, anybody, limits, lambda: NOW + ahead_seconds)
        yield node


@asynccontextmanager
async def visitor(
    observer: Node, hello: DoctorHello = HELLO, listen: str = ANY_PORT
) -> AsyncIterator[tuple[Node, Probe]]:
    async with (
        open_node(Identity.generate(), [listen]) as node,
        open_probe(node, observer.peer_id, hello, observer.addresses) as probe,
    ):
        yield node, probe


# ---------------------------------------------------------------- what a visitor learns


async def test_a_visitor_learns_the_version_and_where_it_comes_from() -> None:
    seen: list[str | None] = []

    def judge(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
        assert hello == HELLO
        return DoctorWelcome(
            software_fits=False,
            admission="the list does not name you",
            smallest_stage=needs(takes(7)),
        )

    async with (
        open_node(Identity.generate(), [ANY_PORT]) as observer,
        open_node(Identity.generate(), [ANY_PORT]) as node,
    ):
        serve_probe(observer, judge)

        async def look(stream: FramedStream) -> None:
            seen.append(stream.remote_address)

        observer.serve("/test/look/1", look, CLIENT_LIMITS)
        async with open_probe(node, observer.peer_id, HELLO, observer.addresses) as probe:
            welcome = probe.welcome
        stream = await node.open_stream(observer.peer_id, "/test/look/1", CLIENT_LIMITS)
        with pytest.raises(LinkClosed):
            await stream.receive(5)
    assert welcome.software == SOFTWARE_VERSION
    assert (welcome.software_fits, welcome.smallest_stage) == (False, needs(takes(7)))
    assert welcome.admission == "the list does not name you"
    assert welcome.observed_address is not None
    # The same connection, so the same address.
    assert seen == [welcome.observed_address]


@pytest.mark.parametrize("ahead_seconds", [-400.0, 0.0, 3600.0])
async def test_echoes_tell_the_way_and_the_clocks_apart(ahead_seconds: float) -> None:
    async with server(ahead_seconds=ahead_seconds) as observer, visitor(observer) as (_, probe):
        times = await probe.echo(wall_clock=lambda: NOW)
    assert 0 < times.rtt_seconds < 1
    assert times.clock_ahead_seconds == pytest.approx(-ahead_seconds, abs=0.5)


async def test_a_listening_visitor_is_reached_and_a_closed_port_is_not() -> None:
    async with server() as observer, visitor(observer) as (node, probe):
        endpoint = Endpoint.parse(node.addresses[0])
        assert endpoint is not None
        with trio.socket.socket() as free:
            await free.bind(("127.0.0.1", 0))
            closed = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
        results = await probe.dial_back([endpoint.multiaddr, closed])
    assert [result.reached for result in results] == [True, False]
    assert results[0].reason == ""
    assert "dialling" in results[1].reason


async def test_somebody_else_at_the_visitors_address_does_not_count_as_the_visitor() -> None:
    async with (
        server() as observer,
        open_node(Identity.generate(), [ANY_PORT]) as other,
        visitor(observer) as (_, probe),
    ):
        (result,) = await probe.dial_back([other.addresses[0].split("/p2p/")[0]])
    assert not result.reached


async def test_rates_are_measured_in_both_directions() -> None:
    async with server() as observer, visitor(observer) as (_, probe):
        up = await probe.upload_rate()
        down = await probe.download_rate()
    # A loopback that carries less than this is no loopback.
    assert up > 1e6
    assert down > 1e6


# ---------------------------------------------------------------- what it cannot do


async def test_no_address_but_the_visitors_own_is_dialled() -> None:
    dialled = trio.Event()

    async def note(stream: trio.SocketStream) -> None:
        dialled.set()

    async with server() as observer, trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, note, 0)
        port = listeners[0].socket.getsockname()[1]
        async with visitor(observer) as (_, probe):
            elsewhere = ["/ip4/127.0.0.2", "/ip6/::1", "/dns4/localhost"]
            results = await probe.dial_back([f"{ip}/tcp/{port}" for ip in elsewhere])
            (own,) = await probe.dial_back([f"/ip6/::ffff:127.0.0.1/tcp/{port}"])
        assert [result.reached for result in results] == [False] * 3
        assert "only the address that you come from" in results[0].reason
        assert "only the address that you come from" in results[1].reason
        assert "no address" in results[2].reason
        # The listener does hear of the visitor's own address, so it would have heard of others.
        assert not own.reached
        await dialled.wait()
        nursery.cancel_scope.cancel()


async def raw_visit(node: Node, observer: Node) -> FramedStream:
    stream = await node.open_stream(
        observer.peer_id, DOCTOR_PROTOCOL, CLIENT_LIMITS, observer.addresses
    )
    await stream.send(encode(HELLO))
    await stream.receive(5)
    return stream


async def ends(stream: FramedStream) -> bool:
    """Whether the other side ends the stream, whatever it says before."""
    try:
        while True:
            await stream.receive(5)
    except LinkClosed:
        return True


@pytest.mark.parametrize("kind", ["upload", "download", "echo", "dial", "hello", "payload"])
async def test_a_visitor_that_wants_too_much_is_thrown_out(kind: str) -> None:
    async with server() as observer, open_node(Identity.generate(), [ANY_PORT]) as node:
        stream = await raw_visit(node, observer)
        try:
            if kind == "upload":
                for _ in range(MAX_RATE_BYTES // RATE_CHUNK_BYTES + 1):
                    await stream.send(encode(Upload(more=True)), bytes(RATE_CHUNK_BYTES))
            elif kind == "download":
                for _ in range(2):
                    await stream.send(encode(Download(bytes=MAX_RATE_BYTES)))
            elif kind == "echo":
                for number in range(probe_module.MAX_ECHOES + 1):
                    await stream.send(encode(Echo(number=number)))
            elif kind == "dial":
                for _ in range(probe_module.MAX_DIAL_REQUESTS + 1):
                    await stream.send(encode(DialBack(addresses=("/ip4/127.0.0.2/tcp/1",))))
            elif kind == "hello":
                await stream.send(encode(HELLO))
            else:
                await stream.send(encode(Echo(number=1)), b"surprise")
        except LinkClosed:
            return
        assert await ends(stream)


async def test_a_chunk_or_a_list_that_is_too_long_is_no_message() -> None:
    async with server() as observer, open_node(Identity.generate(), [ANY_PORT]) as node:
        stream = await raw_visit(node, observer)
        await stream.send(encode(Upload(more=False)), bytes(RATE_CHUNK_BYTES + 1))
        assert await ends(stream)
    with pytest.raises(FrameError):
        parse(doctor_requests, b'{"kind":"dial_back","addresses":["a","b","c","d","e"]}')
    with pytest.raises(FrameError):
        parse(doctor_requests, b'{"kind":"download","bytes":8388609}')


async def test_a_visitor_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "HELLO_SECONDS", 0.2)
    monkeypatch.setattr(probe_module, "IDLE_SECONDS", 0.2)
    async with server() as observer, open_node(Identity.generate(), [ANY_PORT]) as node:
        silent = await node.open_stream(
            observer.peer_id, DOCTOR_PROTOCOL, CLIENT_LIMITS, observer.addresses
        )
        assert await ends(silent)
        assert await ends(await raw_visit(node, observer))


async def test_a_visit_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "SESSION_SECONDS", 0.3)
    async with server() as observer, visitor(observer) as (_, probe):
        start = trio.current_time()
        await probe.echo()
        with trio.fail_after(2):
            assert await ends(probe._stream)
        assert trio.current_time() - start >= 0.2


async def test_one_visit_at_a_time_for_each_peer() -> None:
    async with server() as observer, visitor(observer) as (node, probe):
        with pytest.raises(ProbeBusy, match="probe session of this peer") as caught:
            async with open_probe(node, observer.peer_id, HELLO):
                raise AssertionError
        assert caught.value.retry_after_seconds > 0
        await probe.echo()


async def test_places_are_limited_and_come_free_again() -> None:
    async with server(ProbeLimits(sessions_per_address=2)) as observer:
        async with visitor(observer), visitor(observer):
            with pytest.raises(ProbeBusy, match="from this address"):
                async with visitor(observer):
                    raise AssertionError
        with trio.fail_after(10):
            while True:
                try:
                    async with visitor(observer):
                        break
                except ProbeBusy:
                    await trio.sleep(0.01)
    async with server(ProbeLimits(visits=1)) as observer, visitor(observer):
        with pytest.raises(ProbeBusy, match="1 probe sessions"):
            async with visitor(observer):
                raise AssertionError


async def test_an_address_that_asks_too_often_is_told_when_to_come_again() -> None:
    async with server(ProbeLimits(burst=2, per_second=0.1)) as observer:
        async with visitor(observer) as (_, probe):
            (result,) = await probe.dial_back(["/ip4/127.0.0.2/tcp/1"])
            assert not result.reached
            with pytest.raises(ProbeBusy):
                await probe.dial_back(["/ip4/127.0.0.2/tcp/1"])
        with pytest.raises(ProbeBusy, match="too often") as caught:
            async with visitor(observer):
                raise AssertionError
    assert 5 < caught.value.retry_after_seconds <= 10


async def test_only_so_many_addresses_are_dialled_at_once_and_others_after_them() -> None:
    async with server(ProbeLimits(dials=1)) as observer, visitor(observer) as (node, probe):
        endpoint = Endpoint.parse(node.addresses[0])
        assert endpoint is not None
        results = await probe.dial_back([endpoint.multiaddr] * 2)
        assert sorted(result.reached for result in results) == [False, True]
        (reason,) = (result.reason for result in results if not result.reached)
        assert reason == "too many addresses are being dialled at this moment; try again"
        (later,) = await probe.dial_back([endpoint.multiaddr])
        assert later.reached


async def test_an_address_that_measures_too_often_is_refused_and_answered_otherwise() -> None:
    limits = ProbeLimits(burst=probe_module.RATE_COST, per_second=0.1)
    async with server(limits) as observer, visitor(observer) as (_, probe):
        for measure in (probe.upload_rate, probe.download_rate):
            with pytest.raises(ProbeBusy, match="measured too often") as caught:
                await measure()
            assert 5 < caught.value.retry_after_seconds <= 10
        assert (await probe.echo()).rtt_seconds > 0


@pytest.mark.parametrize("direction", ["upload", "download"])
async def test_a_visitor_measures_with_its_whole_allowance_and_not_a_byte_more(
    direction: str,
) -> None:
    async with server() as observer, visitor(observer) as (_, probe):
        transfer = probe._upload if direction == "upload" else probe._download
        await transfer(MAX_RATE_BYTES)
        with pytest.raises(LinkClosed):
            await transfer(1)


async def test_only_so_many_measure_at_once_and_the_others_go_on() -> None:
    async with (
        server(ProbeLimits(measuring_sessions=1)) as observer,
        visitor(observer) as (_, first),
        visitor(observer) as (_, second),
    ):
        await first.upload_rate()
        with pytest.raises(ProbeBusy, match="other sessions are measuring"):
            await second.upload_rate()
        with pytest.raises(ProbeBusy, match="other sessions are measuring"):
            await second.download_rate()
        assert (await second.echo()).rtt_seconds > 0


async def test_what_a_visit_took_comes_free_with_its_end() -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as observer:
        limits = ProbeLimits(visits=1, sessions_per_address=1, measuring_sessions=1)
        serving = serve_probe(observer, anybody, limits)
        for _ in range(3):
            async with visitor(observer) as (_, probe):
                await probe.download_rate()
                assert serving.measuring.value == 0
            await until(lambda: not serving._active_peers, 5)
            assert serving.measuring.value == 1
            assert not serving._addresses


# ---------------------------------------------------------------- who may visit a volunteer


def check_member(remote: PeerId, run: RunId, text: str) -> None:
    check_certificate(base64.b64decode(text), run, ORGANISER.peer_id, NOW, remote)


def test_a_volunteer_answers_members_and_visitors_with_a_pass() -> None:
    me, other = Identity.generate(), Identity.generate()
    judge = answer_members_only(RUN, ORGANISER.peer_id, check_member, lambda: NOW)
    their_pass = sign_probe_pass(ORGANISER, me.peer_id, RUN, NOW)
    for hello in (
        HELLO.model_copy(update={"certificate": certificate(me.peer_id, RUN, now=NOW)}),
        HELLO.model_copy(update={"probe_pass": their_pass}),
    ):
        assert judge(me.peer_id, hello) == DoctorWelcome()
        with pytest.raises(AdmissionError):
            judge(other.peer_id, hello)
        with pytest.raises(AdmissionError):
            judge(me.peer_id, hello.model_copy(update={"run": RunId("cd" * 32)}))
    with pytest.raises(AdmissionError):
        judge(me.peer_id, HELLO)


async def test_a_visitor_that_is_refused_learns_why() -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as observer:
        serve_probe(
            observer, answer_members_only(RUN, ORGANISER.peer_id, check_member, lambda: NOW)
        )
        with pytest.raises(AdmissionError, match="with a probe pass only"):
            async with visitor(observer):
                raise AssertionError


def test_a_home_with_ipv6_counts_as_one_requester() -> None:
    def key(text: str) -> object:
        return address_key(ipaddress.ip_address(text))

    assert key("2001:db8::1") == key("2001:db8::ffff:2")
    assert key("2001:db8::1") != key("2001:db8:0:1::1")
    assert key("192.0.2.1") != key("192.0.2.2")
    assert address_key(None) == address_key(None)
