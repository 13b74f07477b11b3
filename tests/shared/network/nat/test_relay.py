"""A relay from both sides: what it carries, what it refuses, and what its clients do about it."""

from __future__ import annotations

import hashlib
import struct
from contextlib import AsyncExitStack

import pytest
import trio
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage

from kits.network.nodes import (
    ANY_PORT,
    ECHO,
    LIMITS,
    a_node,
    a_relay,
    ask_circuit,
    ask_hop,
    ask_slot,
    circuit_addresses_of,
    connections,
    ends,
    hold_slot,
    hop_stream,
    noise_bytes,
    says_hello,
)
from kits.waiting import until
from swarm_shared.addresses.dial_order import Circuit, circuits
from swarm_shared.base.errors import LinkClosed, NetworkError
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, Node, RelayLimits
from swarm_shared.network.nat.circuit import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    read_message,
    write_message,
)
from swarm_shared.network.nat.relay_server import RelayServer
from swarm_shared.protocol import PathKind

MEGABYTE = 2**20


pytestmark = pytest.mark.usefixtures("no_waiting_for_holes")


def server_of(relay: Node) -> RelayServer:
    assert relay.relay is not None
    return relay.relay


async def echo_for_ever(stream: FramedStream) -> None:
    while True:
        await stream.send(b"", bytes(MEGABYTE))
        await stream.receive(timeout_seconds=10)


# What goes through


async def test_twenty_megabytes_go_both_ways_at_once_and_arrive_intact() -> None:
    sent = [noise_bytes(MEGABYTE, seed) for seed in range(20)]
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        stream = await source.open_stream(target.peer_id, ECHO, LIMITS, target.addresses)
        path = source.path(target.peer_id)
        assert path is not None
        assert (path.kind, path.relay) == (PathKind.RELAYED, relay.peer_id)
        received: list[bytes] = []

        async def send() -> None:
            for number, payload in enumerate(sent):
                await stream.send(struct.pack(">I", number), payload)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            for number in range(len(sent)):
                frame = await stream.receive(timeout_seconds=30)
                assert frame.header == struct.pack(">I", number)
                received.append(hashlib.sha256(frame.payload).digest())
        assert received == [hashlib.sha256(payload).digest() for payload in sent]
        assert server_of(relay).forwarded_bytes > 2 * len(sent) * MEGABYTE
        assert relay.link_bytes() == ()


async def test_both_ends_know_each_other_and_neither_takes_the_relay_for_the_other() -> None:
    remotes: list[str] = []
    addresses: list[str | None] = []

    async def note(stream: FramedStream) -> None:
        remotes.append(stream.remote)
        addresses.append(stream.remote_address)
        await stream.send(b"seen")

    async with a_relay() as relay, a_node() as target, a_node() as source:
        target.serve("/test/note/1", note, LIMITS)
        await hold_slot(target, relay)
        stream = await source.open_stream(target.peer_id, "/test/note/1", LIMITS, target.addresses)
        await stream.receive(timeout_seconds=10)
        assert stream.remote == target.peer_id
        assert remotes == [source.peer_id]
        assert addresses == [None]


async def test_a_relay_that_leads_to_somebody_else_is_noticed() -> None:
    """The relay takes a CONNECT for one peer to another: Noise tells who really answers."""
    async with a_relay() as relay, a_node() as asked_for, a_node() as other, a_node() as source:
        await hold_slot(asked_for, relay)
        await hold_slot(other, relay)
        honest = relay._links.open
        relay._links.open = lambda peer, protocol: honest(other.peer_id, protocol)
        with pytest.raises(NetworkError, match=asked_for.peer_id):
            await source.connect(asked_for.peer_id, asked_for.addresses)
        assert source.connected_peers == (relay.peer_id,)


async def test_a_closed_connection_gives_its_circuit_back() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        server = server_of(relay)
        for closer, peer in ((source, target), (target, source)):
            assert await says_hello(source, target)
            await closer.disconnect(peer.peer_id)
            await until(lambda: not server.open_circuits)
        assert not server._circuits


async def test_a_dial_that_is_given_up_in_its_handshake_gives_its_circuit_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A direct connection came first, or the caller lost patience."""
    monkeypatch.setattr("swarm_shared.network.nat.relay_server.HALF_CLOSED_SECONDS", 0.3)
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        server = server_of(relay)
        silent = trio.Event()

        async def never_answer(stream: object) -> None:
            silent.set()
            await write_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
            await trio.sleep_forever()

        target._inbound.serve_raw(STOP_PROTOCOL, never_answer, public=True)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(source.connect, target.peer_id, target.addresses)
                await silent.wait()
                await until(lambda: server.open_circuits == 1)
                await trio.sleep(0.05)
                scope.cancel()
        await until(lambda: not connections(source, relay)[0].stream_count)
        await until(lambda: not server.open_circuits)


# What a relay refuses


async def test_slots_are_given_up_to_the_limit_and_again_when_one_is_free() -> None:
    async with a_relay(RelayLimits(max_reservations=2)) as relay, AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(a_node()) for _ in range(3)]
        answers = [await ask_slot(node, relay) for node in nodes]
        assert [answer.status for answer in answers] == [
            Status.OK, Status.OK, Status.RESERVATION_REFUSED,
        ]  # fmt: skip
        # Who has one may renew it.
        assert (await ask_slot(nodes[0], relay)).status == Status.OK
        await nodes[0].disconnect(relay.peer_id)
        await until(lambda: server_of(relay).reservations == 1)
        assert (await ask_slot(nodes[2], relay)).status == Status.OK


async def test_one_address_gets_so_many_slots_and_no_more() -> None:
    limits = RelayLimits(max_reservations_per_address=2)
    async with a_relay(limits) as relay, AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(a_node()) for _ in range(3)]
        statuses = [(await ask_slot(node, relay)).status for node in nodes]
        assert statuses == [Status.OK, Status.OK, Status.RESERVATION_REFUSED]


async def test_a_slot_ends_at_its_time_unless_it_is_renewed() -> None:
    limits = RelayLimits(reservation_seconds=0.3, max_reservations=1)
    async with a_relay(limits) as relay, a_node() as target, a_node() as source:
        assert (await ask_slot(target, relay)).status == Status.OK
        await trio.sleep(0.35)
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status == Status.NO_RESERVATION
        assert (await ask_slot(source, relay)).status == Status.OK


async def test_a_client_renews_its_slot_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_shared.network.nat.relay_client.SHORTEST_RENEWAL_SECONDS", 0.05)
    async with (
        a_relay(RelayLimits(reservation_seconds=1.5)) as relay,
        a_node() as target,
        a_node() as source,
    ):
        await hold_slot(target, relay)
        changes: list[None] = []
        target.on_addresses.append(lambda: changes.append(None))
        await trio.sleep(2.5)
        assert await says_hello(source, target)
        assert changes == []


async def test_circuits_are_opened_up_to_the_limit() -> None:
    limits = RelayLimits(max_circuits=2)
    async with a_relay(limits) as relay, AsyncExitStack() as stack:
        target = await stack.enter_async_context(a_node())
        await hold_slot(target, relay)
        sources = [await stack.enter_async_context(a_node()) for _ in range(3)]
        for source in sources[:2]:
            assert await says_hello(source, target)
        with pytest.raises(NetworkError, match="resource limit exceeded"):
            await says_hello(sources[2], target)
        await sources[0].disconnect(target.peer_id)
        await until(lambda: server_of(relay).open_circuits == 1)
        assert await says_hello(sources[2], target)


async def test_one_peer_gets_so_many_circuits_at_either_end() -> None:
    limits = RelayLimits(max_circuits_per_peer=1)
    async with a_relay(limits) as relay, AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(a_node()) for _ in range(2)]
        for target in targets:
            await hold_slot(target, relay)
        sources = [await stack.enter_async_context(a_node()) for _ in range(2)]
        assert await says_hello(sources[0], targets[0])
        for calling, called in ((0, 1), (1, 0)):
            asked = await ask_circuit(sources[calling], relay, targets[called].peer_id)
            assert asked.status == Status.RESOURCE_LIMIT_EXCEEDED
        assert await says_hello(sources[1], targets[1])


async def test_one_peer_cannot_take_all_the_circuits_of_another() -> None:
    """It asks for circuits and says nothing on them, which the target bears for ten seconds."""
    limits = RelayLimits(max_circuits_per_peer=6, max_circuits_per_pair=2)
    async with a_relay(limits) as relay, AsyncExitStack() as stack:
        target, greedy, honest = [await stack.enter_async_context(a_node()) for _ in range(3)]
        await hold_slot(target, relay)
        statuses = [(await ask_circuit(greedy, relay, target.peer_id)).status for _ in range(4)]
        assert statuses == 2 * [Status.OK] + 2 * [Status.RESOURCE_LIMIT_EXCEEDED]
        assert await says_hello(honest, target)


async def test_one_address_gets_so_many_circuits_whatever_its_peers_call_themselves() -> None:
    limits = RelayLimits(max_circuits_per_address=2)
    async with a_relay(limits) as relay, AsyncExitStack() as stack:
        target = await stack.enter_async_context(a_node())
        await hold_slot(target, relay)
        sources = [await stack.enter_async_context(a_node()) for _ in range(3)]
        statuses = [(await ask_circuit(s, relay, target.peer_id)).status for s in sources]
        assert statuses == [Status.OK, Status.OK, Status.RESOURCE_LIMIT_EXCEEDED]


async def test_a_circuit_that_its_source_has_left_without_a_word_ends() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status == Status.OK
        await asked.stream.close()
        assert await ends(asked.stream)
        await until(lambda: not server_of(relay).open_circuits)


async def test_a_circuit_carries_so_many_bytes_and_no_more() -> None:
    limits = RelayLimits(circuit_bytes=3 * MEGABYTE)
    async with a_relay(limits) as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        stream = await source.open_stream(target.peer_id, ECHO, LIMITS, target.addresses)
        await stream.send(b"", bytes(MEGABYTE))
        assert len((await stream.receive(timeout_seconds=10)).payload) == MEGABYTE
        with pytest.raises(LinkClosed):
            await echo_for_ever(stream)
        server = server_of(relay)
        assert server.forwarded_bytes < 4 * MEGABYTE
        await until(lambda: not server.open_circuits)
        # A new one is there for the asking.
        assert await says_hello(source, target)


async def test_a_circuit_lasts_so_long_and_no_longer() -> None:
    limits = RelayLimits(circuit_seconds=0.5)
    async with a_relay(limits) as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        assert await says_hello(source, target)
        lost = trio.Event()
        source.on_disconnect.append(lambda peer: lost.set())
        with trio.fail_after(3):
            await lost.wait()
        await until(lambda: not server_of(relay).open_circuits)


async def test_identities_of_one_address_share_the_rate_of_a_relay() -> None:
    """Two identities of one outsider, with as many circuits as they like, are no proxy."""
    rate, burst = MEGABYTE, MEGABYTE // 2
    limits = RelayLimits(address_bytes_per_second=rate, address_burst_bytes=burst)
    async with a_relay(limits) as relay, AsyncExitStack() as stack:
        target, *sources = [await stack.enter_async_context(a_node()) for _ in range(4)]
        await hold_slot(target, relay)
        server = server_of(relay)
        began = trio.current_time()

        async def flood(source: Node) -> None:
            stream = await source.open_stream(target.peer_id, ECHO, LIMITS, target.addresses)
            await echo_for_ever(stream)

        with trio.move_on_after(1.5):
            async with trio.open_nursery() as nursery:
                for source in sources:
                    nursery.start_soon(flood, source)
        elapsed = trio.current_time() - began
        assert burst < server.forwarded_bytes <= burst + rate * elapsed + 6 * 65_536, (
            "a chunk of each direction of each circuit may wait"
        )


async def test_a_circuit_ends_when_one_of_its_ends_is_not_admitted_any_more() -> None:
    allowed: set[str] = set()
    limits = RelayLimits(recheck_seconds=0.1)
    async with (
        a_relay(limits, allow=allowed.__contains__) as relay,
        a_node() as target,
        a_node() as source,
    ):
        allowed |= {target.peer_id, source.peer_id}
        await hold_slot(target, relay)
        assert await says_hello(source, target)
        lost = trio.Event()
        source.on_disconnect.append(lambda peer: peer == target.peer_id and lost.set())
        await trio.sleep(0.3)
        assert not lost.is_set(), "it goes on while both are admitted"
        assert server_of(relay).open_circuits == 1
        allowed.remove(source.peer_id)
        with trio.fail_after(5):
            await lost.wait()
        await until(lambda: not target.is_connected(source.peer_id))
        assert server_of(relay).open_circuits == 0


async def test_a_relay_serves_only_those_it_should_at_either_end() -> None:
    allowed: set[str] = set()
    async with (
        a_relay(allow=allowed.__contains__) as relay,
        a_node() as target,
        a_node() as source,
    ):
        assert (await ask_slot(target, relay)).status == Status.PERMISSION_DENIED
        allowed.add(target.peer_id)
        assert (await ask_slot(target, relay)).status == Status.OK
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status == Status.PERMISSION_DENIED
        allowed.clear()
        allowed.add(source.peer_id)
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status == Status.PERMISSION_DENIED


async def test_a_peer_without_a_slot_is_not_reached_although_it_is_connected() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await target.connect(relay.peer_id, relay.addresses)
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status == Status.NO_RESERVATION
        assert await ends(asked.stream)


async def test_no_slot_and_no_circuit_is_had_over_a_circuit() -> None:
    """Chains of relays would hide who talks to whom, and multiply the traffic."""
    async with a_relay() as first, a_node() as second, a_node() as source:
        second.serve_relay(RelayLimits(), lambda peer: True)
        await hold_slot(second, first)
        await source.connect(second.peer_id, circuit_addresses_of(second))
        path = source.path(second.peer_id)
        assert path is not None
        assert path.kind is PathKind.RELAYED
        assert (await ask_slot(source, second)).status == Status.PERMISSION_DENIED
        asked = await ask_circuit(source, second, first.peer_id)
        assert asked.status == Status.PERMISSION_DENIED


async def test_a_slot_does_not_reach_its_holder_over_another_relay() -> None:
    """The holder's own connection is gone meanwhile, and a relayed one is left."""
    async with (
        a_relay() as outer,
        a_relay() as relay,
        a_node() as target,
        a_node() as source,
    ):
        await hold_slot(target, outer, relay)
        direct = connections(relay, target)
        await relay._relays.dial(target.peer_id, _circuit(target, outer))
        await until(lambda: len(connections(relay, target)) == 2)
        for connection in direct:
            await connection.close()
        await until(lambda: len(connections(relay, target)) == 1)
        assert connections(relay, target)[0].relay == outer.peer_id
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status != Status.OK


def _circuit(node: Node, relay: Node) -> Circuit:
    return next(c for c in circuits(node.addresses) if c.relay == relay.peer_id)


# Who comes through a relay


@pytest.mark.parametrize("holds_another", [False, True])
async def test_nobody_comes_through_a_relay_at_which_no_slot_is_held(holds_another: bool) -> None:
    """Any peer could say that somebody wants to talk: only a chosen relay is listened to."""
    async with a_relay() as relay, a_node() as target, a_node(None, ANY_PORT) as forger:
        if holds_another:
            await hold_slot(target, relay)
        await target.connect(forger.peer_id, forger.addresses)
        stream = await forger._links.open(target.peer_id, STOP_PROTOCOL)
        peer = PeerMessage(id=b"somebody")
        await write_message(stream, StopMessage(type=StopMessage.CONNECT, peer=peer))
        answer = await read_message(stream, StopMessage)
        assert answer.status == Status.PERMISSION_DENIED
        assert await ends(stream)


async def test_a_slot_that_was_given_up_is_closed_to_its_relay() -> None:
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        target.use_relays({}, 0)
        # The relay does not know yet.
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status == Status.CONNECTION_FAILED


# Nonsense


NONSENSE = {
    "empty": b"\x00",
    "oversized": b"\x81\x20" + bytes(4097),
    "largest length": b"\xff\xff\x7f" + bytes(100),
    "a type that does not exist": b"\x02\x08\x7f",
    "cut short": b"\x20\x08\x01",
}


@pytest.mark.parametrize("garbage", NONSENSE.values(), ids=NONSENSE.keys())
@pytest.mark.parametrize("protocol", [HOP_PROTOCOL, STOP_PROTOCOL])
async def test_nonsense_ends_its_stream_and_nothing_else(protocol: str, garbage: bytes) -> None:
    async with a_relay() as relay, a_node() as target, a_node() as attacker:
        await hold_slot(target, relay)
        await attacker.connect(relay.peer_id, relay.addresses)
        stream = await attacker._links.open(relay.peer_id, protocol)
        await stream.write(garbage)
        await stream.close()
        assert await ends(stream)
        assert await says_hello(attacker, target)
        assert relay.handler_errors == {}


@pytest.mark.parametrize(
    "peer",
    [b"", b"\x00", b"x" * 4000, Identity.generate().public_key_bytes],
    ids=["nothing", "one byte", "far too long", "a bare key"],
)
async def test_a_target_that_is_no_peer_id_is_refused(peer: bytes) -> None:
    async with a_relay() as relay, a_node() as attacker:
        request = HopMessage(type=HopMessage.CONNECT, peer=PeerMessage(id=peer))
        answer = await ask_hop(attacker, relay, request)
        assert answer.status in (Status.NO_RESERVATION, Status.MALFORMED_MESSAGE)
        assert relay.handler_errors == {}


async def test_an_answer_is_no_request() -> None:
    async with a_relay() as relay, a_node() as attacker:
        answer = await ask_hop(attacker, relay, HopMessage(type=HopMessage.STATUS))
        assert answer.status == Status.UNEXPECTED_MESSAGE
        assert await ends(answer.stream)


async def test_who_asks_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_shared.network.nat.relay_server.MESSAGE_SECONDS", 0.3)
    async with a_relay() as relay, a_node() as attacker:
        stream = await hop_stream(attacker, relay)
        began = trio.current_time()
        await stream.write(b"\x20\x08")
        assert await ends(stream)
        assert trio.current_time() - began < 2


async def test_a_target_that_does_not_answer_costs_the_source_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm_shared.network.nat.relay_server.MESSAGE_SECONDS", 0.3)
    async with a_relay() as relay, a_node() as target, a_node() as source:
        await hold_slot(target, relay)
        target._inbound.serve_raw(STOP_PROTOCOL, lambda stream: trio.sleep_forever(), public=True)
        asked = await ask_circuit(source, relay, target.peer_id)
        assert asked.status == Status.CONNECTION_FAILED
        assert server_of(relay).open_circuits == 0


async def test_a_peer_is_not_connected_to_itself() -> None:
    async with a_relay() as relay, a_node() as node:
        await hold_slot(node, relay)
        asked = await ask_circuit(node, relay, node.peer_id)
        assert asked.status != Status.OK
        await until(lambda: not server_of(relay).open_circuits)
