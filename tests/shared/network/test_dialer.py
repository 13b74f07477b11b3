"""Getting a connection by the best way there is, in a bounded time, whatever is announced."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import pytest
import trio

from kits.network.nodes import (
    ANY_PORT,
    a_node,
    a_relay,
    circuit_addresses_of,
    connections,
    hold_slot,
    says_hello,
)
from kits.waiting import until
from swarm_shared.base.errors import LinkTimeout, NetworkError
from swarm_shared.identity.keys import Identity
from swarm_shared.network import dialer
from swarm_shared.network.libp2p.yamux import YamuxStream
from swarm_shared.network.nat.circuit import HOP_PROTOCOL
from swarm_shared.protocol import PathKind

pytestmark = pytest.mark.usefixtures("no_waiting_for_holes")


@contextmanager
def silent_address() -> Iterator[str]:
    """Connections are taken, and nothing is ever said on them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"


def refusing_address() -> str:
    """Nobody listens there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"


async def test_no_relay_is_used_where_a_direct_way_leads_there() -> None:
    async with a_relay() as relay, a_node(None, ANY_PORT) as target, a_node() as source:
        await hold_slot(target, relay)
        await source.connect(target.peer_id, target.addresses)
        assert source.path(target.peer_id).kind is PathKind.DIRECT
        assert len(connections(source, target)) == 1
        assert source.connected_peers == (target.peer_id,)


async def test_a_relay_is_used_at_once_when_the_direct_ways_are_refused() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        began = trio.current_time()
        await source.connect(target.peer_id, [refusing_address(), *target.addresses])
        assert trio.current_time() - began < dialer.RELAY_HEAD_START_SECONDS
        assert source.path(target.peer_id).kind is PathKind.RELAYED


async def test_a_direct_way_that_is_silent_holds_the_relay_up_for_a_moment_only() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        with silent_address() as silent:
            began = trio.current_time()
            await source.connect(target.peer_id, [silent, *target.addresses])
            took = trio.current_time() - began
        assert dialer.RELAY_HEAD_START_SECONDS <= took < dialer.RELAY_HEAD_START_SECONDS + 2
        assert source.path(target.peer_id).kind is PathKind.RELAYED


async def test_another_relay_is_tried_when_the_first_does_not_lead_there() -> None:
    async with AsyncExitStack() as stack:
        no_slot, dead, good = [await stack.enter_async_context(a_relay()) for _ in range(3)]
        target = await stack.enter_async_context(a_node())
        source = await stack.enter_async_context(a_node())
        await hold_slot(target, good)
        ways = [
            f"{no_slot.addresses[0]}/p2p-circuit",
            f"{refusing_address()}/p2p/{dead.peer_id}/p2p-circuit",
            *circuit_addresses_of(target),
        ]
        assert await says_hello(source, target, ways)
        assert source.path(target.peer_id).relay == good.peer_id


async def test_a_peer_that_no_way_leads_to_is_an_error_that_names_the_reasons() -> None:
    async with a_relay() as relay, a_node() as source:
        nobody = Identity.generate().peer_id
        ways = [refusing_address(), f"{relay.addresses[0]}/p2p-circuit"]
        with pytest.raises(NetworkError, match=r"(?s)refused.*no reservation"):
            await source.connect(nobody, ways)
        assert not source.is_connected(nobody)
        assert source._dialer._locks == {}


async def test_a_relay_that_is_silent_costs_no_more_than_was_allowed() -> None:
    async with a_node() as source:
        relay, nobody = Identity.generate().peer_id, Identity.generate().peer_id
        with silent_address() as silent:
            began = trio.current_time()
            with pytest.raises(LinkTimeout, match=relay):
                await source.connect(nobody, [f"{silent}/p2p/{relay}/p2p-circuit"], 1.0)
            assert trio.current_time() - began < 3


async def test_many_who_want_the_same_peer_at_once_share_one_connection() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(source.connect, target.peer_id, target.addresses)
        assert len(connections(source, target)) == 1
        assert source._dialer._locks == {}


async def test_only_so_many_addresses_of_a_peer_are_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer announces what it likes: it must not make others knock on every door."""
    monkeypatch.setattr(dialer, "DIAL_STAGGER_SECONDS", 0.01)
    taken = 0

    async def take(stream: trio.SocketStream) -> None:
        nonlocal taken
        taken += 1

    async with a_node() as source, trio.open_nursery() as nursery:
        listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(40)]
        nursery.start_soon(trio.serve_listeners, take, listeners)
        addresses = [f"/ip4/127.0.0.1/tcp/{one.socket.getsockname()[1]}" for one in listeners]
        relays = [f"{a}/p2p/{Identity.generate().peer_id}/p2p-circuit" for a in addresses]
        nobody = Identity.generate().peer_id
        with pytest.raises(NetworkError):
            await source.connect(nobody, addresses)
        assert taken <= dialer.MAX_ADDRESSES_DIALLED
        taken = 0
        with pytest.raises(NetworkError):
            await source.connect(nobody, relays)
        assert taken <= dialer.MAX_CIRCUITS_DIALLED
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/",
        "nonsense",
        "/ip4/127.0.0.1/udp/1/quic-v1",
        "/ip4/127.0.0.1/tcp/1/ws",
        "/unix/tmp/x",
        "/p2p-circuit",
        "/ip4/127.0.0.1/tcp/99999",
        "/dns4//tcp/1",
        "/ip4/127.0.0.1/tcp/1/p2p/nobody/p2p-circuit",
        "/ip4/127.0.0.1/tcp/1/p2p/QmQQ/p2p-circuit",
        "/certhash/x/tcp/1/p2p-circuit/p2p/y",
    ],
)
async def test_an_address_that_makes_no_sense_is_a_network_error(address: str) -> None:
    async with a_node() as source:
        with pytest.raises(NetworkError):
            await source.connect(Identity.generate().peer_id, [address])


async def test_a_peer_is_not_sought_on_this_machine_when_it_is_elsewhere() -> None:
    """Its loopback address means another machine; what listens here is somebody else."""
    async with a_node(None, ANY_PORT) as here, a_node() as source:
        nobody = Identity.generate().peer_id
        own = here._own.listening()[0]
        with pytest.raises(NetworkError, match="no address that leads there"):
            await source.connect(nobody, ["/ip4/10.255.255.1/tcp/1", own])


@pytest.mark.parametrize("answer", [b"\x00", b"\x02\x08\x02", b"\x03\x08\x02\x28", b"\xff\xff\x7f"])
async def test_a_relay_that_talks_nonsense_is_a_network_error(answer: bytes) -> None:
    async def nonsense(stream: YamuxStream) -> None:
        await stream.write(answer)
        await stream.close()

    async with a_node(None, ANY_PORT) as relay, a_node() as source:
        relay._inbound.serve_raw(HOP_PROTOCOL, nonsense, public=True)
        with pytest.raises(NetworkError):
            await source.connect(Identity.generate().peer_id, [f"{relay.addresses[0]}/p2p-circuit"])
        assert source.connected_peers == (relay.peer_id,)


# The port that others dial


async def test_a_connection_from_the_listening_port_shows_that_port() -> None:
    async with a_node(None, ANY_PORT) as target, a_node(None, ANY_PORT) as source:
        await source.connect(target.peer_id, target.addresses, from_listening_port=True)
        observed = f"/ip4/127.0.0.1/tcp/{source.listening_port}"
        assert source.observed_address(target.peer_id) == observed
        assert connections(target, source)[0].get_remote_address()[1] == source.listening_port
        await source.disconnect(target.peer_id)
        assert source.observed_address(target.peer_id) is None


async def test_any_port_serves_when_the_listening_one_cannot_and_says_nothing_of_it() -> None:
    """An old connection between the same two ports lingers."""
    async with a_node(None, ANY_PORT) as target, a_node(None, ANY_PORT) as source:
        with socket.socket() as lingering:
            lingering.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            lingering.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            lingering.bind(("127.0.0.1", source.listening_port))
            lingering.setblocking(False)
            lingering.connect_ex(("127.0.0.1", target.listening_port))
            await until(lambda: target._swarm._from_address)
            await source.connect(target.peer_id, target.addresses, from_listening_port=True)
            assert connections(source, target)[0].local_port != source.listening_port
            assert source.observed_address(target.peer_id) is None


async def test_who_does_not_listen_is_told_nothing_of_its_address() -> None:
    async with a_node(None, ANY_PORT) as target, a_node() as source:
        await source.connect(target.peer_id, target.addresses, from_listening_port=True)
        assert source.observed_address(target.peer_id) is None
        assert source._own.punchable() == []


async def test_no_more_addresses_are_dialled_at_once_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator's roster can name any number of members, and any machine as theirs."""
    monkeypatch.setattr(dialer, "MAX_ATTEMPTS", 3)
    arrived = 0

    async def count(stream: trio.SocketStream) -> None:
        nonlocal arrived
        arrived += 1
        await trio.sleep_forever()

    async with a_node() as source, trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, count, 0, host="127.0.0.1"))
        address = f"/ip4/127.0.0.1/tcp/{listeners[0].socket.getsockname()[1]}"

        async def dial() -> None:
            with pytest.raises(LinkTimeout):
                await source.connect(Identity.generate().peer_id, [address], 0.5)

        async with trio.open_nursery() as dialling:
            for _ in range(12):
                dialling.start_soon(dial)
        assert arrived == 3
        nursery.cancel_scope.cancel()
