"""What is known of the links: which connection is best, how fast it is, whether it lives."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from kits.network.nodes import (
    ANY_PORT,
    ECHO,
    LIMITS,
    a_node,
    a_relay,
    circuit_addresses_of,
    connections,
    hold_slot,
    says_hello,
)
from kits.waiting import until
from swarm_shared.network import Node, links
from swarm_shared.network.links import MIN_SAMPLE_SECONDS, RATE_DECAY, RateMeter
from swarm_shared.protocol import PathKind

pytestmark = pytest.mark.usefixtures("no_waiting_for_holes")


# Rates


def test_a_rate_is_what_was_counted_between_two_looks() -> None:
    meter = RateMeter()
    assert meter.look(1000, 5.0) == 0.0
    assert meter.look(3000, 7.0) == 1000.0


def test_a_link_that_rests_keeps_most_of_the_rate_it_had() -> None:
    meter = RateMeter()
    meter.look(0, 0.0)
    best = meter.look(1000, 1.0)
    for seconds in range(2, 16):
        assert meter.look(1000, float(seconds)) < best
    assert meter.look(1000, 16.0) == pytest.approx(best * RATE_DECAY**15)


def test_two_looks_in_a_moment_tell_nothing_new() -> None:
    meter = RateMeter()
    meter.look(0, 0.0)
    assert meter.look(10**9, MIN_SAMPLE_SECONDS / 2) == 0.0
    assert meter.look(10**9, 1.0) == 10**9


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 100)), max_size=30))
def test_a_rate_is_never_negative_and_never_above_what_went_through(
    looks: list[tuple[int, float]],
) -> None:
    meter, counted, now, highest = RateMeter(), 0, 0.0, 0.0
    meter.look(0, 0.0)
    for more, seconds in looks:
        counted, now = counted + more, now + seconds
        if seconds:
            highest = max(highest, counted / MIN_SAMPLE_SECONDS)
        assert 0.0 <= meter.look(counted, now) <= highest


# Paths


async def test_a_peer_that_is_not_connected_has_no_path() -> None:
    async with a_node(None, ANY_PORT) as one, a_node() as other:
        assert other.path(one.peer_id) is None
        assert other.paths() == []
        assert await says_hello(other, one)
        assert [path.remote for path in other.paths()] == [one.peer_id]
        await other.disconnect(one.peer_id)
        assert other.path(one.peer_id) is None
        assert other.paths() == []


async def test_a_path_tells_how_far_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MIN_SAMPLE_SECONDS", 0.0)
    async with a_node(None, ANY_PORT) as one, a_node() as other:
        stream = await other.open_stream(one.peer_id, ECHO, LIMITS, one.addresses)
        await until(lambda: other.path(one.peer_id).rtt_seconds)
        assert other.path(one.peer_id).bytes_per_second < 2**20
        for _ in range(8):
            await stream.send(b"", bytes(2**20))
            await stream.receive(timeout_seconds=10)
        for node, peer in ((other, one), (one, other)):
            path = node.path(peer.peer_id)
            assert (path.kind, path.relay) == (PathKind.DIRECT, None)
            assert 0 < path.rtt_seconds < 1
        assert other.path(one.peer_id).bytes_per_second > 2**20


async def test_every_connected_peer_has_one_path_whatever_leads_there() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        assert await says_hello(source, target)
        paths = {path.remote: path for path in source.paths()}
        assert paths[target.peer_id].kind is PathKind.RELAYED
        assert paths[target.peer_id].relay == relay.peer_id
        assert paths[relay.peer_id].kind is PathKind.DIRECT
        assert len(paths) == len(source.paths()) == 2


async def test_meters_of_connections_that_are_gone_are_thrown_away() -> None:
    async with a_node(None, ANY_PORT) as one, a_node() as other:
        for _ in range(3):
            assert await says_hello(other, one)
            assert len(other.paths()) == 1
            await other.disconnect(one.peer_id)
        assert other.paths() == []
        assert other._links._meters == {}


async def test_a_direct_connection_is_used_before_a_relayed_one_and_its_loss_is_told() -> None:
    async with a_relay() as relay, a_node(None) as target, a_node() as source:
        await hold_slot(target, relay)
        assert await says_hello(source, target)
        changes: list[PathKind] = []
        source.on_path_change.append(lambda peer: changes.append(source.path(peer).kind))
        lost: list[str] = []
        source.on_disconnect.append(lost.append)
        old = await source.open_stream(target.peer_id, ECHO, LIMITS)
        await target.listen([ANY_PORT])
        await source._dialer._dial_direct(
            target.peer_id, listening_address(target), from_listening_port=False
        )
        assert changes == [PathKind.DIRECT]
        assert old.superseded
        async with await source.open_stream(target.peer_id, ECHO, LIMITS) as stream:
            assert not stream.superseded
            assert stream._stream.connection.relay is None

        # The other way round: the direct one goes, the relayed one still serves.
        for connection in connections(source, target):
            if connection.relay is None:
                await connection.close()
        await until(lambda: len(changes) == 2)
        assert changes[-1] is PathKind.RELAYED
        assert not old.superseded
        assert lost == []
        await source.disconnect(target.peer_id)
        assert lost == [target.peer_id]


def listening_address(node: Node) -> Multiaddr:
    return Multiaddr(node._own.listening()[0])


# Whether a connection lives


async def test_a_connection_that_answers_is_left_alone() -> None:
    async with a_node(None, ANY_PORT) as one, a_node() as other:
        assert await says_hello(other, one)
        [connection] = connections(other, one)
        await connection.check_alive(5.0)
        other.check(one.peer_id)
        assert await says_hello(other, one)
        assert connections(other, one) == [connection]


async def test_a_connection_whose_remote_is_gone_without_a_word_is_closed_in_time() -> None:
    """As after sleep, or on another network: only a question that nobody answers tells."""
    async with a_node(None, ANY_PORT) as one, a_node() as other:
        assert await says_hello(other, one)
        [connection], [theirs] = connections(other, one), connections(one, other)

        async def deaf(*_: object) -> int:
            return await trio.sleep_forever()

        theirs._channel._raw.stream._fill = deaf
        # What it reads at the moment is the last.
        theirs._ping()
        lost = trio.Event()
        other.on_disconnect.append(lambda peer: lost.set())
        began = trio.current_time()
        await connection.check_alive(0.5)
        await connection.check_alive(0.5)
        with trio.fail_after(2):
            await lost.wait()
        assert trio.current_time() - began < 2


async def test_all_connections_are_questioned_when_the_network_has_changed() -> None:
    async with a_node(None, ANY_PORT) as one, a_node(None, ANY_PORT) as other:
        assert await says_hello(other, one)
        [connection] = connections(other, one)
        answered = connection._heard
        told: list[str] = []
        other.on_network_change.append(lambda: told.append("network"))
        other.on_addresses.append(lambda: told.append("addresses"))
        other._network_changed()
        assert sorted(told) == ["addresses", "network"]
        await until(lambda: connection._heard is not answered and connection._heard.is_set())
        assert other.is_connected(one.peer_id)


async def test_a_connection_from_an_address_that_is_gone_is_closed_at_once() -> None:
    async with a_node(None, ANY_PORT) as one, a_node() as other:
        assert await says_hello(other, one)
        [connection] = connections(other, one)
        assert connection.local_host == "127.0.0.1"
        connection.local_host = "198.51.100.9"
        lost = trio.Event()
        other.on_disconnect.append(lambda peer: lost.set())
        other._network_changed()
        with trio.fail_after(1):
            await lost.wait()


async def test_the_addresses_of_a_listening_node_are_known_and_a_circuits_too() -> None:
    async with a_relay() as relay, a_node(None, ANY_PORT) as node, a_node() as caller:
        assert node.addresses == tuple(
            f"/ip4/127.0.0.1/tcp/{node.listening_port}/p2p/{p}" for p in [node.peer_id]
        )
        await hold_slot(node, relay)
        assert len(circuit_addresses_of(node)) == 1
        node.announce(["/dns4/example.org/tcp/4001", f"/ip4/203.0.113.7/tcp/1/p2p/{node.peer_id}"])
        assert node.addresses[:2] == (
            f"/dns4/example.org/tcp/4001/p2p/{node.peer_id}",
            f"/ip4/203.0.113.7/tcp/1/p2p/{node.peer_id}",
        )
        assert caller.listening_port is None
        assert caller.addresses == ()
