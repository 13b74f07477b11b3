"""Too many, too slow, too much: what an attack costs its victim, and whom it keeps out.

The victim is a process of its own, whose memory is measured from outside; the attackers have one
address, any number of identities, and no business there. All the while honest newcomers are to be
served.
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
    Muxed,
    connect,
    multistream,
    muxed,
    yamux_frame,
)
from kits.attack.victim import ECHO, HELLO, MEGABYTE, Victim, a_victim
from swarm_shared.identity.keys import Identity
from swarm_shared.network.inbound import MAX_UNKNOWN_PEER_STREAMS
from swarm_shared.network.libp2p.host import (
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_PENDING_PER_ADDRESS,
    MAX_UNKNOWN_PER_ADDRESS,
)

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(240)]

ENDINGS = (Exception,)
"""However the victim hangs up, an attacker sees one of many errors."""

MOST_MEGABYTES = 200.0
"""MAX_UNKNOWN_PER_ADDRESS × MAX_UNKNOWN_PEER_STREAMS × (a window and a hello's header) is 192
MB."""
MOST_SECONDS = 30.0
"""For an honest newcomer, on a machine that the attackers share."""


async def many(count: int, attack, seconds: float) -> None:
    """Runs `attack(number)` so many times at once, for so long."""

    async def one(number: int) -> None:
        with suppress(*ENDINGS):
            await attack(number)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(one, number)


def assert_unharmed(victim: Victim, megabytes: float = MOST_MEGABYTES) -> None:
    print(f"{victim.most_megabytes:.0f} MB, honest {sorted(victim.served_seconds)[-3:]}")
    assert victim.most_megabytes < megabytes
    assert victim.refusals == []
    assert max(victim.served_seconds) < MOST_SECONDS


# Connections


async def test_a_thousand_connections_that_say_nothing() -> None:
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            async with await connect(victim.target) as socket:
                while await socket.receive_some():
                    pass

        await many(1000, attack, 12)
        assert victim.sockets() < MAX_PENDING_PER_ADDRESS + 10
    assert_unharmed(victim, 40)


async def test_a_thousand_connections_each_with_an_identity() -> None:
    held = 0

    async with a_victim() as victim:

        async def attack(_: int) -> None:
            nonlocal held
            # As fast as one machine can do handshakes, so again and again.
            while True:
                with suppress(*ENDINGS):
                    async with muxed(victim.target) as connection:
                        held += 1
                        try:
                            await connection.drain()
                        finally:
                            held -= 1
                await trio.sleep(0.5)

        async def watch() -> None:
            while True:
                await trio.sleep(0.2)
                most.append(victim.sockets())

        most: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await many(1000, attack, 15)
            nursery.cancel_scope.cancel()
        assert max(most) < MAX_CONNECTIONS_PER_ADDRESS + 10
    assert_unharmed(victim, 60)


@pytest.mark.parametrize(
    "beginning",
    [b"", b"\x13", multistream(MULTISTREAM), multistream(MULTISTREAM, "/noise") + b"\x00"],
)
async def test_handshakes_a_byte_at_a_time(beginning: bytes) -> None:
    """Slow loris: every few moments one byte more, so that it looks alive."""
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

        await many(100, attack, 14)
        assert ended.is_set()
    assert_unharmed(victim, 40)


# Streams


async def test_streams_without_end_that_ask_for_nothing() -> None:
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
                nursery.start_soon(connection.drain)
                while not connection.closed.is_set():
                    await connection.open()
                    await trio.lowlevel.checkpoint()

        await many(8, attack, 10)
    assert_unharmed(victim, 60)


async def test_streams_without_end_each_with_half_a_hello() -> None:
    """What has arrived of a frame is kept until it is whole: so it must be little."""
    half = struct.pack(">IQ", 500_000, 0) + bytes(250_000)
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
                nursery.start_soon(connection.drain)
                while not connection.closed.is_set():
                    await connection.open(HELLO, more=half)

        # Two rounds: what the first one took must be there for the second.
        await many(64, attack, 12)
        first = victim.most_megabytes
        await many(64, attack, 12)
        assert victim.most_megabytes < 1.3 * first + 20
    assert_unharmed(victim)


async def test_streams_whose_data_nobody_reads() -> None:
    """Behind a hello that is whole; the handler has gone by then, or reads no more."""
    whole = struct.pack(">IQ", 5, 0) + b"hello"
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
                nursery.start_soon(connection.drain)
                while not connection.closed.is_set():
                    await connection.open(HELLO, more=whole + bytes(250_000))

        await many(32, attack, 10)
    assert_unharmed(victim)


async def test_a_protocol_that_one_is_not_admitted_to_takes_no_data() -> None:
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
                nursery.start_soon(connection.drain)
                while not connection.closed.is_set():
                    frame = struct.pack(">IQ", 5, 16 * MEGABYTE) + b"hello"
                    await connection.open(ECHO, more=frame + bytes(250_000))

        await many(32, attack, 10)
    assert_unharmed(victim)


async def test_who_asks_and_never_reads_is_cut_off() -> None:
    """Pings and hellos ask for answers; the attacker's socket is full of them, and stays so."""
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

        await many(8, attack, 40)
        assert closed == 8
    assert_unharmed(victim, 60)


async def test_frames_for_streams_that_never_were() -> None:
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

        await many(4, attack, 8)
    assert_unharmed(victim, 60)


# The relay


def hop(kind: int, peer: bytes = b"") -> bytes:
    """A hop message by hand: RESERVE is 0, CONNECT is 1."""
    content = bytes([0x08, kind])
    if peer:
        content += bytes([0x12, len(peer) + 2, 0x0A, len(peer)]) + peer
    return bytes([len(content)]) + content


HOP = "/libp2p/circuit/relay/0.2.0/hop"


async def test_slots_without_end() -> None:
    """Any number of identities from one address, each asking over and over."""
    async with a_victim() as victim:

        async def attack(_: int) -> None:
            async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
                nursery.start_soon(connection.drain)
                while not connection.closed.is_set():
                    await connection.open(HOP, more=hop(0))
                    await trio.lowlevel.checkpoint()

        await many(64, attack, 10)
    assert_unharmed(victim, 80)


async def test_circuits_without_end() -> None:
    """One identity holds a slot and lets nobody in; others ask for circuits to it, without end."""
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
            async with muxed(victim.target) as connection, trio.open_nursery() as nursery:
                nursery.start_soon(connection.drain)
                while not connection.closed.is_set():
                    await connection.open(HOP, more=hop(1, peer))
                    await trio.lowlevel.checkpoint()

        await many(32, attack, 12)
    assert_unharmed(victim, 80)


def test_what_is_allowed_to_strangers_is_little() -> None:
    """The sum that MOST_MEGABYTES stands for."""
    per_stream = 256 * 1024 + 512 * 1024
    most = MAX_UNKNOWN_PER_ADDRESS * MAX_UNKNOWN_PEER_STREAMS * per_stream
    assert most / MEGABYTE <= MOST_MEGABYTES


_ = Muxed
