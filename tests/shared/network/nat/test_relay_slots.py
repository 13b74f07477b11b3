"""The slots that a node holds at relays: how many, at which, and what it does when one is lost."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from contextlib import AsyncExitStack
from hashlib import sha256

import pytest
import trio
import trio.testing
from libp2p.abc import INetStream
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Reservation, Status
from multiaddr import Multiaddr

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
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node, RelayLimits, open_node
from swarm_shared.network.nat.circuit import HOP_PROTOCOL, read_message, write_message
from swarm_shared.protocol import AddressUpdate

pytestmark = pytest.mark.usefixtures("no_waiting_for_holes")


def offered(*relays: Node) -> dict[PeerId, tuple[str, ...]]:
    return {relay.peer_id: relay.addresses for relay in relays}


def chosen_first(own: PeerId, relays: list[Node]) -> list[Node]:
    """In the order in which a node with this ID prefers them (by hash)."""
    return sorted(relays, key=lambda r: sha256(f"{own} {r.peer_id}".encode()).digest())


async def test_two_relays_are_two_slots_and_two_ways_to_the_node() -> None:
    async with a_relay() as one, a_relay() as two, a_node() as node, a_node() as caller:
        before = node.addresses
        told: list[tuple[str, ...]] = []
        node.on_addresses.append(lambda: told.append(node.addresses))
        await hold_slot(node, one, two)
        assert set(node.relay_slots) == {one.peer_id, two.peer_id}
        assert told[-1] == node.addresses != before
        for relay in (one, two):
            [way] = [a for a in circuit_addresses_of(node) if relay.peer_id in a]
            assert way == (
                f"{relay.addresses[0]}/p2p-circuit/p2p/{node.peer_id}"
            )  # relay.addresses end in its own peer ID
            assert await says_hello(caller, node, [way])
            await caller.disconnect(node.peer_id)


async def test_as_many_slots_are_held_as_are_wanted() -> None:
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(a_relay()) for _ in range(3)]
        node = await stack.enter_async_context(a_node())
        await hold_slot(node, *relays, wanted=2)
        first_two = chosen_first(node.peer_id, relays)[:2]
        assert set(node.relay_slots) == {relay.peer_id for relay in first_two}
        node.use_relays(offered(*relays), 1)
        assert node.relay_slots == (first_two[0].peer_id,)
        node.use_relays(offered(*relays), 3)
        await until(lambda: len(node.relay_slots) == 3)


async def test_who_wants_no_slots_gives_them_up_at_once() -> None:
    async with a_relay() as relay, a_node(None, ANY_PORT) as node:
        await hold_slot(node, relay)
        changes: list[tuple[str, ...]] = []
        node.on_addresses.append(lambda: changes.append(node.addresses))
        node.use_relays(offered(relay), 0)
        assert node.relay_slots == ()
        assert circuit_addresses_of(node) == []
        assert changes == [node.addresses]


async def test_peers_spread_over_the_relays() -> None:
    async with AsyncExitStack() as stack:
        relays = [
            await stack.enter_async_context(a_relay(identity=Identity.from_seed(bytes([n]) * 32)))
            for n in (1, 2, 3)
        ]
        held: Counter[PeerId] = Counter()
        for n in range(12):
            node = await stack.enter_async_context(a_node(Identity.from_seed(bytes([n + 9]) * 32)))
            await hold_slot(node, *relays, wanted=1)
            held.update(node.relay_slots)
        assert min(held[relay.peer_id] for relay in relays) >= 2


async def test_the_last_resort_is_used_while_there_is_no_other_and_no_longer() -> None:
    """The coordinator's relay, so that not all traffic crosses one machine."""
    async with AsyncExitStack() as stack:
        coordinator, one, two = [await stack.enter_async_context(a_relay()) for _ in range(3)]
        node = await stack.enter_async_context(a_node())

        def use(*relays: Node) -> None:
            node.use_relays(offered(coordinator, *relays), 2, last=coordinator.peer_id)

        use()
        await until(lambda: node.relay_slots == (coordinator.peer_id,))
        use(one)
        await until(lambda: len(node.relay_slots) == 2)
        use(one, two)
        await until(lambda: set(node.relay_slots) == {one.peer_id, two.peer_id})
        use(two)
        await until(lambda: set(node.relay_slots) == {coordinator.peer_id, two.peer_id})


# Relays that die, hang, refuse or lie


async def test_the_slot_of_a_dead_relay_moves_to_another_one_within_seconds() -> None:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(a_node())
        caller = await stack.enter_async_context(a_node())
        survivors = [await stack.enter_async_context(a_relay()) for _ in range(2)]
        async with a_relay() as mortal:
            await hold_slot(node, mortal, survivors[0])
            node.use_relays(offered(mortal, *survivors), 2)
            assert mortal.peer_id in node.relay_slots
            before = node.addresses
        await until(lambda: set(node.relay_slots) == {s.peer_id for s in survivors}, 5)
        assert node.addresses != before
        assert not any(mortal.peer_id in address for address in node.addresses)
        assert await says_hello(caller, node)


async def test_a_relay_that_hangs_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine takes connections, its process says nothing: stopped, or swapped out."""
    monkeypatch.setattr("swarm_shared.network.nat.relay_client.RESERVE_SECONDS", 1.0)
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(a_node())
        nursery = await stack.enter_async_context(trio.open_nursery())
        relays = [await stack.enter_async_context(a_relay()) for _ in range(2)]
        first, second = chosen_first(node.peer_id, relays)
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, lambda stream: trio.sleep_forever(), [listener])
        addresses = {first.peer_id: [f"/ip4/127.0.0.1/tcp/{port}"]}
        node.use_relays({**offered(second), **addresses}, 1)
        with trio.fail_after(4):
            await until(lambda: node.relay_slots == (second.peer_id,))
        nursery.cancel_scope.cancel()


async def test_a_relay_that_comes_back_is_used_again() -> None:
    identity = Identity.generate()
    async with a_node() as node, a_node() as caller:
        async with a_relay(identity=identity) as relay:
            await hold_slot(node, relay)
            address = relay.addresses[0].split("/p2p/")[0]
        await until(lambda: not node.relay_slots)
        async with a_node(identity, address) as relay:
            relay.serve_relay(RelayLimits(), lambda peer: True)
            await until(lambda: node.relay_slots == (relay.peer_id,))
            assert await says_hello(caller, node)


async def test_a_relay_that_refuses_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_shared.network.nat.relay_client.FIRST_RETRY_SECONDS", 0.1)
    allowed: set[PeerId] = set()
    asked: list[float] = []

    def allow(peer: PeerId) -> bool:
        asked.append(trio.current_time())
        return peer in allowed

    async with a_relay(allow=allow) as relay, a_node() as node:
        node.use_relays(offered(relay), 1)
        await until(lambda: len(asked) == 4)
        pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]
        for pause, least in zip(pauses, (0.2, 0.4, 0.8), strict=True):
            assert pause >= least
        assert node.relay_slots == ()
        allowed.add(node.peer_id)
        await until(lambda: node.relay_slots == (relay.peer_id,))


GARBAGE_ADDRESSES = {
    "empty": b"",
    "cut short": b"\x04\x01",
    "a port of no bytes": b"\x04\x01\x02\x03\x04\x06",
    "a length beyond all memory": b"8\xa3\xb4\x90\x9f\xd0\x9c\xb2\x82\xfe\xc2\x189\xa2\x07",
    "what py-multiaddr stumbles over": b"\x04\x01\x02\x03\x04\x06k\x0f\xfd",
    "QUIC": Multiaddr("/ip4/1.2.3.4/udp/1/quic-v1").to_bytes(),
    "a circuit": Multiaddr("/ip4/1.2.3.4/tcp/1/p2p-circuit").to_bytes(),
    "a name that is an address": b"\x36\x15a/tcp/1/p2p/Q/p2p-circ\x06\x00\x01",
    "a name longer than messages": b"\x36\xff\x01" + b"a" * 255 + b"\x06\x00\x01",
}


@pytest.mark.parametrize("garbage", GARBAGE_ADDRESSES.values(), ids=GARBAGE_ADDRESSES.keys())
async def test_what_a_relay_says_of_its_addresses_harms_nobody(garbage: bytes) -> None:
    """Any admitted peer may offer itself as a relay."""

    async def lie(stream: object) -> None:
        await read_message(stream, HopMessage)
        answer = HopMessage(type=HopMessage.STATUS)
        answer.status = Status.OK
        addresses = [garbage, Multiaddr("/ip4/203.0.113.7/tcp/1").to_bytes()]
        answer.reservation.CopyFrom(Reservation(expire=int(time.time()) + 60, addrs=addresses))
        await write_message(stream, answer)

    async with a_node(None, ANY_PORT) as liar, a_relay() as relay, a_node() as node:
        liar._inbound.serve_raw(HOP_PROTOCOL, lie, public=True)
        await hold_slot(node, liar, relay)
        assert set(node.relay_slots) == {liar.peer_id, relay.peer_id}
        ways = [a for a in circuit_addresses_of(node) if liar.peer_id in a]
        assert ways == [f"/ip4/203.0.113.7/tcp/1/p2p/{liar.peer_id}/p2p-circuit/p2p/{node.peer_id}"]


async def test_a_relay_whose_address_is_too_long_for_messages_is_not_passed_on() -> None:
    """Else the peers that use it could not tell the coordinator where they are."""
    async with a_relay() as relay, a_node() as node:
        long = f"/dns4/{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 60}.example/tcp/4001"
        node.use_relays({relay.peer_id: [long, *relay.addresses]}, 1)
        await until(lambda: node.relay_slots)
        AddressUpdate(addresses=node.addresses, reachability="unknown", offers_relay=False)
        assert len(circuit_addresses_of(node)) == 1


@pytest.mark.parametrize(
    "answer", [b"", b"\x00", b"\xff\xff\x7f", b"\x02\x08\x01", b"\x02\x08\x02"]
)
async def test_a_relay_that_talks_nonsense_is_no_relay(answer: bytes) -> None:
    async def nonsense(stream: INetStream) -> None:
        await read_message(stream, HopMessage)
        await stream.write(answer)
        await stream.close()

    async with a_node(None, ANY_PORT) as liar, a_relay() as relay, a_node() as node:
        liar._inbound.serve_raw(HOP_PROTOCOL, nonsense, public=True)
        node.use_relays(offered(liar, relay), 2)
        await until(lambda: relay.peer_id in node.relay_slots)
        await until(lambda: not connections(node, liar) or node.relay_slots == (relay.peer_id,))
        assert node.relay_slots == (relay.peer_id,)


async def test_a_node_is_no_relay_of_its_own() -> None:
    async with a_relay() as node:
        node.use_relays(offered(node), 1)
        await trio.testing.wait_all_tasks_blocked()
        assert node.relay_slots == ()


async def test_a_closed_node_holds_no_slots() -> None:
    async with a_relay() as relay:
        async with open_node(Identity.generate()) as node:
            await hold_slot(node, relay)
        assert relay.relay is not None
        await until(lambda: relay.relay.reservations == 0)
