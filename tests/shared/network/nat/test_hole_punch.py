"""From a relayed connection to a direct one: hole punching on loopback, honest and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.stream_muxer.exceptions import MuxedStreamError
from multiaddr import Multiaddr

from kits.network.nodes import (
    ANY_PORT,
    ECHO,
    LIMITS,
    a_node,
    a_relay,
    circuit_addresses_of,
    connections,
    ends,
    hold_slot,
    says_hello,
)
from kits.waiting import until
from swarm_shared.base.errors import NetworkError
from swarm_shared.network import Node, keepalive
from swarm_shared.network.libp2p.host import NodeSwarm
from swarm_shared.network.nat import hole_punch
from swarm_shared.network.nat.circuit import read_message, write_message
from swarm_shared.network.nat.hole_punch import DCUTR_PROTOCOL
from swarm_shared.protocol import PathKind


def kind_of_path(node: Node, peer: Node) -> PathKind | None:
    path = node.path(peer.peer_id)
    return None if path is None else path.kind


def has_only_direct(node: Node, peer: Node) -> bool:
    return {connection.relay for connection in connections(node, peer)} == {None}


def invitation(*addresses: str) -> HolePunch:
    packed = [Multiaddr(address).to_bytes() for address in addresses]
    return HolePunch(type=HolePunch.CONNECT, ObsAddrs=packed)


async def connect_over_relay(node: Node, peer: Node) -> None:
    await node.connect(peer.peer_id, circuit_addresses_of(peer))


async def invite(attacker: Node, target: Node, *addresses: str) -> None:
    """An invitation to dial these addresses, again and again until it is taken."""
    while True:
        try:
            stream = await attacker._links.open(target.peer_id, DCUTR_PROTOCOL)
            await write_message(stream, invitation(*addresses))
            await read_message(stream, HolePunch)
            await write_message(stream, HolePunch(type=HolePunch.SYNC))
        except (MuxedStreamError, NetworkError):
            await trio.sleep(0.02)
        else:
            return


# Punching


async def test_a_node_of_which_only_a_circuit_is_known_is_reached_directly() -> None:
    async with (
        a_relay() as relay,
        a_node(None, ANY_PORT) as target,
        a_node(None, ANY_PORT) as source,
    ):
        await hold_slot(target, relay)
        began = trio.current_time()
        await connect_over_relay(source, target)
        assert trio.current_time() - began < hole_punch.PUNCH_WAIT_SECONDS
        assert kind_of_path(source, target) is PathKind.DIRECT
        await until(lambda: kind_of_path(target, source) is PathKind.DIRECT)
        assert relay.relay is not None
        carried = relay.relay.forwarded_bytes
        async with await source.open_stream(target.peer_id, ECHO, LIMITS) as stream:
            for _ in range(4):
                await stream.send(b"", bytes(2**20))
                await stream.receive(timeout_seconds=10)
        assert relay.relay.forwarded_bytes - carried < 2**20


@pytest.mark.parametrize("listens", ["target", "source"])
async def test_one_end_that_can_be_dialled_is_enough(listens: str) -> None:
    async with (
        a_relay() as relay,
        a_node(None, *([ANY_PORT] if listens == "target" else [])) as target,
        a_node(None, *([ANY_PORT] if listens == "source" else [])) as source,
    ):
        await hold_slot(target, relay)
        await connect_over_relay(source, target)
        assert kind_of_path(source, target) is PathKind.DIRECT


async def test_both_ends_that_dial_each_other_at_once_end_with_a_direct_connection() -> None:
    """As two members of a stage do at the start of an all-reduce."""
    async with (
        a_relay() as relay,
        a_node(None, ANY_PORT) as one,
        a_node(None, ANY_PORT) as two,
    ):
        await hold_slot(one, relay)
        await hold_slot(two, relay)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect_over_relay, one, two)
            nursery.start_soon(connect_over_relay, two, one)
        await until(lambda: kind_of_path(one, two) is PathKind.DIRECT, 5)
        await until(lambda: kind_of_path(two, one) is PathKind.DIRECT, 5)
        assert await says_hello(one, two)


async def test_the_relayed_connection_goes_when_nothing_is_on_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keepalive, "RELAYED_LINGER_SECONDS", 0.2)
    monkeypatch.setattr(hole_punch, "PUNCH_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 0.3)
    monkeypatch.setattr(hole_punch, "REMOTE_ATTEMPT_PAUSE_SECONDS", 0.0)
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        stream = await source.open_stream(target.peer_id, ECHO, LIMITS, target.addresses)
        changes: list[tuple[str, PathKind | None]] = []
        source.on_path_change.append(
            lambda peer: changes.append((peer, kind_of_path(source, target)))
        )
        assert kind_of_path(source, target) is PathKind.RELAYED
        assert not stream.superseded

        # Meanwhile an attempt has come to nothing: neither can be dialled.
        await until(lambda: target._puncher.failed and source._puncher.failed)
        monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 4.0)
        await target.listen([ANY_PORT])
        target._puncher.network_changed()
        assert await target.punch(source.peer_id)
        await until(lambda: changes)
        assert changes == [(target.peer_id, PathKind.DIRECT)]
        assert stream.superseded
        other = await source.open_stream(target.peer_id, ECHO, LIMITS)
        assert not other.superseded

        # What is on the relayed connection may finish.
        await trio.sleep(0.5)
        await stream.send(b"still here")
        assert (await stream.receive(timeout_seconds=5)).header == b"still here"
        assert relay.relay is not None
        assert relay.relay.open_circuits == 1
        await stream.close()
        await until(lambda: has_only_direct(source, target))
        await until(lambda: has_only_direct(target, source))
        await until(lambda: not relay.relay.open_circuits)
        assert source.is_connected(target.peer_id)
        assert len(changes) == 1


async def test_where_no_hole_can_be_punched_the_relayed_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 0.3)
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        began = trio.current_time()
        await connect_over_relay(source, target)
        assert trio.current_time() - began < hole_punch.PUNCH_WAIT_SECONDS + 1
        await until(lambda: target._puncher.failed == 1)
        assert kind_of_path(source, target) is PathKind.RELAYED
        # Not again at once, and nobody waits for it a second time.
        assert not await target.punch(source.peer_id)
        assert target._puncher.failed == 1
        await source.disconnect(target.peer_id)
        began = trio.current_time()
        await connect_over_relay(source, target)
        assert trio.current_time() - began < hole_punch.PUNCH_WAIT_SECONDS
        assert await says_hello(source, target)


async def test_another_network_is_a_reason_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 0.3)
    monkeypatch.setattr(hole_punch, "REMOTE_ATTEMPT_PAUSE_SECONDS", 0.0)
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        await connect_over_relay(source, target)
        await until(lambda: target._puncher.failed == 1)
        await until(lambda: source._puncher.failed == 1)
        monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 4.0)
        await target.listen([ANY_PORT])
        target._network_changed()
        await until(lambda: kind_of_path(source, target) is PathKind.DIRECT)


# Who may


async def test_a_remote_that_is_not_admitted_is_not_punched_to() -> None:
    async with (
        a_relay() as relay,
        a_node(None, ANY_PORT) as target,
        a_node(None, ANY_PORT) as stranger,
    ):
        target.admit_only(lambda peer, protocol: peer == relay.peer_id)
        await hold_slot(target, relay)
        # The target's own offer is refused by the stranger, so that only its own is left.
        stranger.admit_only(lambda peer, protocol: False)
        await connect_over_relay(stranger, target)
        assert kind_of_path(stranger, target) is PathKind.RELAYED
        stream = await stranger._links.open(target.peer_id, DCUTR_PROTOCOL)
        assert await ends(stream)
        assert not target._puncher._is_running(stranger.peer_id)
        assert target._inbound.refused[DCUTR_PROTOCOL] >= 1


async def test_nobody_is_punched_to_who_is_connected_directly() -> None:
    async with a_node(None, ANY_PORT) as target, a_node() as source:
        await source.connect(target.peer_id, target.addresses)
        stream = await source._links.open(target.peer_id, DCUTR_PROTOCOL)
        assert await ends(stream)


# What remotes send


NONSENSE = {
    "empty": b"\x00",
    "length without an end": b"\xff" * 10,
    "oversized": b"\x81\x20" + bytes(4097),
    "not protobuf": b"\x05\xff\xff\xff\xff\xff",
    "cut short": b"\x20\x08\x64",
    "no type": b"\x06\x12\x04abcd",
    "addresses that are none": b"\x0c\x08\x64\x12\x00\x12\x01\x04\x12\x03\x06k\x0f",
    "py-multiaddr's TypeError": b"\x0d\x08\x64\x12\x09\x04\x01\x02\x03\x04\x06k\x0f\xfd",
}


@pytest.mark.parametrize("garbage", NONSENSE.values(), ids=NONSENSE.keys())
async def test_nonsense_from_either_end_ends_the_attempt_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, garbage: bytes
) -> None:
    monkeypatch.setattr(hole_punch, "MESSAGE_SECONDS", 0.5)
    monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 0.3)
    monkeypatch.setattr(hole_punch, "REMOTE_ATTEMPT_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(hole_punch, "PUNCH_WAIT_SECONDS", 0.0)

    async def answer_nonsense(stream: INetStream) -> None:
        await stream.write(garbage)

    async with a_relay() as relay, a_node() as target, a_node() as attacker:
        attacker._inbound.serve_raw(DCUTR_PROTOCOL, answer_nonsense, public=False)
        await hold_slot(target, relay)
        await connect_over_relay(attacker, target)
        await until(lambda: not target._puncher._attempts)
        stream = await attacker._links.open(target.peer_id, DCUTR_PROTOCOL)
        await stream.write(garbage)
        await until(lambda: not target._puncher._attempts)
        assert await says_hello(attacker, target)
        assert target.handler_errors == {}


@asynccontextmanager
async def invited_by_an_attacker(
    places: int,
) -> AsyncIterator[tuple[Node, Node, list[str], list[None]]]:
    """The target, an attacker at the other end of its relay, addresses that the attacker names, and
    an entry for each connection that they get."""
    dialled: list[None] = []

    async def count(stream: trio.SocketStream) -> None:
        dialled.append(None)

    async with (
        a_relay() as relay,
        a_node(None, ANY_PORT) as target,
        a_node() as attacker,
        trio.open_nursery() as nursery,
    ):
        listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(places)]
        nursery.start_soon(trio.serve_listeners, count, listeners)
        victims = [f"/ip4/127.0.0.1/tcp/{one.socket.getsockname()[1]}" for one in listeners]
        attacker.admit_only(lambda peer, protocol: protocol != DCUTR_PROTOCOL)
        await hold_slot(target, relay)
        await connect_over_relay(attacker, target)
        await until(lambda: not target._puncher._attempts)
        dialled.clear()
        yield target, attacker, victims, dialled
        nursery.cancel_scope.cancel()


async def test_an_invitation_makes_a_node_dial_a_few_addresses_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An admitted peer can name anybody's address; it gets no flood out of it."""
    monkeypatch.setattr(hole_punch, "PUNCH_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 0.5)
    async with invited_by_an_attacker(12) as (target, attacker, victims, dialled):
        with trio.move_on_after(3):
            while True:
                await invite(attacker, target, *victims)
        assert 0 < len(dialled) <= 4 * (1 + int(0.5 / hole_punch.RETRY_SECONDS))


async def test_a_handshake_that_stalls_at_a_punched_place_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a hole is expected, the listener starts the handshake; it must not wait for ever."""
    monkeypatch.setattr(hole_punch, "PUNCH_WAIT_SECONDS", 0.0)
    async with a_relay() as relay, a_node(None, ANY_PORT) as target, a_node() as attacker:
        attacker.admit_only(lambda peer, protocol: protocol != DCUTR_PROTOCOL)
        await hold_slot(target, relay)
        await connect_over_relay(attacker, target)
        with trio.socket.socket() as socket:
            await socket.bind(("127.0.0.1", 0))
            place = f"/ip4/127.0.0.1/tcp/{socket.getsockname()[1]}"
            await invite(attacker, target, place)
            swarm = target._swarm
            assert isinstance(swarm, NodeSwarm)
            await until(lambda: swarm.expected_as_initiator)
            monkeypatch.setattr("swarm_shared.network.libp2p.host.HANDSHAKE_SECONDS", 0.5)
            await socket.connect(("127.0.0.1", target.listening_port))
            await until(lambda: swarm._pending)
            # It speaks enough to get to the Noise handshake, and then no more.
            await socket.send(b"\x13/multistream/1.0.0\n\x07/noise\n")
            await until(lambda: not swarm._pending, 5)


async def test_nobody_can_claim_the_place_of_another_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other one's hole would be taken for the attacker's, and refused."""
    monkeypatch.setattr(hole_punch, "PUNCH_WAIT_SECONDS", 0.0)
    # Nothing listens there, so that both attempts last.
    place = "/ip4/127.0.0.1/tcp/1"
    async with (
        a_relay() as relay,
        a_node(None, ANY_PORT) as target,
        a_node() as honest,
        a_node() as attacker,
    ):
        await hold_slot(target, relay)
        swarm = target._swarm
        assert isinstance(swarm, NodeSwarm)
        for peer in (honest, attacker):
            peer.admit_only(lambda peer, protocol: protocol != DCUTR_PROTOCOL)
            await connect_over_relay(peer, target)
            await invite(peer, target, place)
            await until(partial(target._puncher._is_running, peer.peer_id))
            await trio.sleep(0.2)
            assert [str(peer) for peer in swarm.expected_as_initiator.values()] == [honest.peer_id]


async def test_invitations_that_lead_nowhere_are_taken_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member that names foreign addresses again and again sends few connections there."""
    monkeypatch.setattr(hole_punch, "PUNCH_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(hole_punch, "PUNCH_SECONDS", 0.1)
    monkeypatch.setattr(hole_punch, "REMOTE_ATTEMPT_PAUSE_SECONDS", 0.25)
    async with invited_by_an_attacker(1) as (target, attacker, victims, dialled):
        before, taken = target._puncher.failed, 0
        with trio.move_on_after(4):
            while True:
                await invite(attacker, target, *victims)
                taken += 1
        # After 0.25, 0.5, 1, 2 and 4 s, and the pauses of attempts before.
        assert 1 <= target._puncher.failed - before <= 5
        assert taken <= 6
        assert 1 <= len(dialled) <= 6
