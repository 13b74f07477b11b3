"""Floods of connections, streams and frames: their cost to the victim, and whether it still serves.

The victim is a process of its own, and its memory is measured from outside. The attackers have one
address and any number of identities, and are not admitted. Honest clients have to be served all the
while. Each test asserts how much of its attack got through.
"""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
import trio

from kits.attack.raw import (  # fmt: skip
    ACK,
    DATA,
    FIN,
    MULTISTREAM,
    PING,
    SYN,
    WINDOW_UPDATE,
    Tally,
    connect,
    got_through,
    multistream,
    muxed,
    yamux_frame,
)
from kits.attack.victim import ECHO, HELLO, MEGABYTE, Victim, a_victim
from kits.attack.victim_program import HELLO_LIMITS
from swarm_shared.identity.keys import Identity
from swarm_shared.network.inbound import MAX_UNKNOWN_PEER_STREAMS
from swarm_shared.network.libp2p.host import (
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_PENDING_PER_ADDRESS,
    MAX_UNKNOWN_PER_ADDRESS,
)
from swarm_shared.network.libp2p.yamux import INITIAL_WINDOW_BYTES

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ENDINGS = (Exception,)
"""An attacker sees one of many errors when the victim closes its connection."""

FLOOD_SECONDS = 3.0
"""The victim's memory peaks within two seconds."""

IDENTITIES = 4 * MAX_CONNECTIONS_PER_ADDRESS
"""Few enough that handshakes succeed: a thousand at once in one process exceed every time limit."""

MOST_MEGABYTES = 200.0
"""MAX_UNKNOWN_PER_ADDRESS × MAX_UNKNOWN_PEER_STREAMS × (a window and a hello's header) is 192
MB."""
MOST_SECONDS = 30.0
"""Upper bound until an honest client is served, on a machine shared with the attackers."""


async def many(count: int, attack, seconds: float, least: Tally) -> None:
    """Run `attack(number)` so many times at once, for so long and until `least` has got through."""

    async def one(number: int) -> None:
        with suppress(*ENDINGS):
            await attack(number)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
        sent = await got_through(least, seconds)
        nursery.cancel_scope.cancel()
    print(f"{count} attackers for {seconds:g} s: {sent}")
    assert sent.reaches(least), sent


async def keep_opening(victim: Victim, *protocols: str, more: bytes = b"") -> None:
    """Open streams, with `more` in each, until the victim ends the connection."""
    async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
        nursery.start_soon(connection.drain)
        while not connection.closed.is_set():
            await connection.open(*protocols, more=more)
            await trio.lowlevel.checkpoint()


def assert_unharmed(victim: Victim, megabytes: float = MOST_MEGABYTES) -> None:
    print(f"{victim.most_megabytes:.0f} MB, honest {sorted(victim.served_seconds)[-3:]}")
    assert victim.most_megabytes < megabytes
    assert victim.refusals == []
    assert max(victim.served_seconds) < MOST_SECONDS


# Connections


async def test_a_thousand_silent_connections() -> None:
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            async with await connect(victim.target) as socket:
                while await socket.receive_some():
                    pass

        await many(1000, attack, FLOOD_SECONDS, Tally(connections=MAX_PENDING_PER_ADDRESS))
        assert victim.sockets() < MAX_PENDING_PER_ADDRESS + 10
    assert_unharmed(victim, 40)


async def test_more_identities_than_one_address_may_have() -> None:
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            # Again and again, because handshakes are slower than the victim's limits.
            while True:
                with suppress(*ENDINGS):
                    async with muxed(victim.target) as connection:
                        await connection.drain()
                await trio.sleep(0.5)

        async def watch() -> None:
            while True:
                await trio.sleep(0.2)
                most.append(victim.sockets())

        most: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            least = Tally(handshakes=MAX_UNKNOWN_PER_ADDRESS)
            await many(IDENTITIES, attack, 3 * FLOOD_SECONDS, least)
            nursery.cancel_scope.cancel()
        assert max(most) < MAX_CONNECTIONS_PER_ADDRESS + 10
    assert_unharmed(victim, 60)


@pytest.mark.parametrize(
    "beginning",
    [
        pytest.param(b"", marks=pytest.mark.nightly),
        pytest.param(b"\x13", marks=pytest.mark.nightly),
        pytest.param(multistream(MULTISTREAM), marks=pytest.mark.nightly),
        multistream(MULTISTREAM, "/noise") + b"\x00",
    ],
)
async def test_handshakes_a_byte_at_a_time(beginning: bytes) -> None:
    """Slow loris: one byte twice a second."""
    async with a_victim() as victim:
        ended = trio.Event()

        async def attack(number: int) -> None:
            async with await connect(victim.target) as socket:
                await socket.send_all(beginning)
                with suppress(*ENDINGS):
                    while True:
                        await trio.sleep(0.5)
                        await socket.send_all(b"\x00")
            ended.set()

        await many(100, attack, 14, Tally(connections=100))
        assert ended.is_set()
    assert_unharmed(victim, 40)


# Streams


async def test_unlimited_streams_without_a_protocol() -> None:
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            await keep_opening(victim)

        await many(8, attack, FLOOD_SECONDS, Tally(streams=500))
    assert_unharmed(victim, 60)


async def test_unlimited_streams_with_half_a_hello() -> None:
    """A part of a frame is kept until the frame is whole, so it has to be small."""
    half = struct.pack(">IQ", 500_000, 0) + bytes(250_000)
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            # The victim refuses handshakes while the rate of the address is used up.
            while True:
                with suppress(*ENDINGS):
                    await keep_opening(victim, HELLO, more=half)
                await trio.sleep(0.1)

        # Two rounds: what the first one took has to be free for the second. The victim reads slowly
        # from such an address, and so notices slowly that the connections are closed.
        sockets = victim.sockets()
        await many(64, attack, FLOOD_SECONDS, Tally(bytes=5 * MEGABYTE))
        first = victim.most_megabytes
        began = trio.current_time()
        with trio.fail_after(MOST_SECONDS):
            while victim.sockets() > sockets + 4:  # honest ones come and go
                await trio.sleep(0.1)
        print(f"the victim has closed all connections after {trio.current_time() - began:.1f} s")
        await many(64, attack, FLOOD_SECONDS, Tally(bytes=MEGABYTE))
        assert victim.most_megabytes < 1.3 * first + 20
    assert_unharmed(victim)


async def test_streams_whose_data_is_not_read() -> None:
    """The data follows a whole hello, after which the handler reads nothing."""
    whole = struct.pack(">IQ", 5, 0) + b"hello"
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            await keep_opening(victim, HELLO, more=whole + bytes(250_000))

        await many(32, attack, FLOOD_SECONDS, Tally(bytes=5 * MEGABYTE))
    assert_unharmed(victim)


async def test_a_protocol_for_members_takes_no_data_of_an_unadmitted_client() -> None:
    async with a_victim() as victim:
        frame = struct.pack(">IQ", 5, 16 * MEGABYTE) + b"hello"

        async def attack(_: int) -> None:
            await keep_opening(victim, ECHO, more=frame + bytes(250_000))

        await many(32, attack, FLOOD_SECONDS, Tally(bytes=5 * MEGABYTE))
    assert_unharmed(victim)


async def test_a_client_that_asks_and_never_reads_is_disconnected() -> None:
    """Pings ask for answers; the attacker's socket is full of them and stays full."""
    closed = 0

    async with a_victim() as victim:

        async def attack(number: int) -> None:
            nonlocal closed
            async with muxed(victim.target) as connection:
                asked = yamux_frame(PING, SYN, 0, number) * 5000
                while True:
                    try:
                        with trio.fail_after(15):
                            await connection.write(asked)
                    except ENDINGS:
                        closed += 1
                        return

        with trio.fail_after(40):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(attack, number)
        assert closed == 8
    assert_unharmed(victim, 60)


async def test_frames_for_streams_that_were_never_opened() -> None:
    async with a_victim() as victim:

        async def attack(number: int) -> None:
            async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
                nursery.start_soon(connection.drain)
                stream = 1001
                while not connection.closed.is_set():
                    stream += 2
                    await connection.write(
                        yamux_frame(DATA, 0, stream, 1000, bytes(1000))
                        + yamux_frame(WINDOW_UPDATE, ACK, stream, 2**32 - 1)
                        + yamux_frame(WINDOW_UPDATE, FIN, stream, 0)
                    )
                    await trio.lowlevel.checkpoint()

        await many(4, attack, FLOOD_SECONDS, Tally(bytes=MEGABYTE))
    assert_unharmed(victim, 60)


# The relay


def hop(kind: int, peer: bytes = b"") -> bytes:
    """Encode a hop message: RESERVE is 0, CONNECT is 1."""
    content = bytes([0x08, kind])
    if peer:
        content += bytes([0x12, len(peer) + 2, 0x0A, len(peer)]) + peer
    return bytes([len(content)]) + content


HOP = "/libp2p/circuit/relay/0.2.0/hop"


async def test_unlimited_relay_slots() -> None:
    """Many identities at one address, each of which asks repeatedly."""
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            await keep_opening(victim, HOP, more=hop(0))

        await many(64, attack, FLOOD_SECONDS, Tally(streams=100))
    assert_unharmed(victim, 80)


async def test_unlimited_relay_circuits() -> None:
    """One identity holds a slot and accepts no circuit; others ask for circuits to it."""
    from libp2p.peer.id import ID

    async with a_victim() as victim:
        holder = Identity.generate()
        peer = ID.from_base58(holder.peer_id).to_bytes()

        async def hold() -> None:
            async with muxed(victim.target, holder) as connection:
                await connection.open(HOP, more=hop(0))
                await connection.drain()

        async def attack(number: int) -> None:
            if number == 0:
                await hold()
            await trio.sleep(1)
            await keep_opening(victim, HOP, more=hop(1, peer))

        await many(32, attack, FLOOD_SECONDS, Tally(streams=100))
    assert_unharmed(victim, 80)


def test_the_limits_of_unadmitted_clients_sum_up_to_little() -> None:
    """The sum that MOST_MEGABYTES stands for."""
    per_stream = INITIAL_WINDOW_BYTES + HELLO_LIMITS.max_header_bytes
    most = MAX_UNKNOWN_PER_ADDRESS * MAX_UNKNOWN_PEER_STREAMS * per_stream
    assert most / MEGABYTE <= MOST_MEGABYTES
