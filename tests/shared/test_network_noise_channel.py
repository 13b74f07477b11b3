"""Messages through our end of a Noise connection, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.io.exceptions import IncompleteReadError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from noise.exceptions import NoiseInvalidMessage

from swarm_shared.network.libp2p.noise_channel import MAX_PLAINTEXT_BYTES, NoiseChannel
from swarm_shared.network.libp2p.tcp import BufferedTcpStream


@asynccontextmanager
async def channels() -> AsyncIterator[tuple[NoiseChannel, NoiseChannel]]:
    """Both ends after the handshake."""
    sockets = trio.socket.socketpair()
    keys = [create_new_key_pair() for _ in sockets]
    made: dict[int, NoiseChannel] = {}

    async def secure(end: int) -> None:
        transport = NoiseTransport(keys[end], noise_privkey=create_x25519_key_pair().private_key)
        stream = BufferedTcpStream(trio.SocketStream(sockets[end]))
        raw = RawConnection(stream, initiator=end == 0)
        if end == 0:
            secured = await transport.secure_outbound(raw, ID.from_pubkey(keys[1].public_key))
        else:
            secured = await transport.secure_inbound(raw)
        made[end] = NoiseChannel(secured)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(secure, 0)
        nursery.start_soon(secure, 1)
    yield made[0], made[1]
    for channel in made.values():
        await channel.close()


async def test_messages_of_all_sizes_arrive_whole_and_stay_as_they_are() -> None:
    sent = [bytes([n]) * size for n, size in enumerate((1, 5000, MAX_PLAINTEXT_BYTES, 2) * 4)]
    async with channels() as (ours, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(ours.write, sent)
        received = [await theirs.read() for _ in sent]
    assert received == sent


@pytest.mark.parametrize("message", ["forged", "cut below its tag", "empty"])
async def test_a_message_that_the_remote_did_not_encrypt_is_refused(message: str) -> None:
    async with channels() as (ours, theirs):
        encrypted = bytearray(ours._cipher.encrypt(b"x" * 100))
        encrypted[50] ^= 1
        wrong = {"forged": encrypted, "cut below its tag": encrypted[:3], "empty": b""}[message]
        await ours._raw.write(len(wrong).to_bytes(2, "big") + wrong)
        with pytest.raises(NoiseInvalidMessage):
            await theirs.read()


@pytest.mark.parametrize("left", [b"", b"\x01", b"\x00\x64" + b"x" * 99])
async def test_a_connection_that_ends_anywhere_says_so(left: bytes) -> None:
    async with channels() as (ours, theirs):
        if left:
            await ours._raw.write(left)
        await ours.close()
        with pytest.raises(IncompleteReadError):
            await theirs.read()
