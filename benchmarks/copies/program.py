"""One end of a tensor's network path, in its own process: `... program receive|send`.

Writes one line of JSON per answer to standard output. The tensor is sent twice: the first transfer
opens windows and grows buffers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import trio

from benchmarks.copies.counting import Counter
from swarm_client.ipc.shared_memory import create
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, open_node
from swarm_shared.protocol import STAGE_PROTOCOL

LIMITS = FrameLimits(max_header_bytes=2**16, max_payload_bytes=2**26)
ANY_PORT = "/ip4/127.0.0.1/tcp/0"


def say(document: object) -> None:
    print(json.dumps(document), flush=True)


async def receive() -> None:
    """Receive frames and answer each with the bytes copied for it."""
    counter, done = Counter(), trio.Event()

    async def answer(stream: FramedStream) -> None:
        await stream.receive()
        await stream.send(b"{}")
        with counter.counting() as copied:
            await stream.receive()
        await stream.send(json.dumps(asdict(copied)).encode())
        await stream.receive()  # wait until the other end has read it
        done.set()

    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        node.serve(STAGE_PROTOCOL, answer, LIMITS)
        say({"peer": node.peer_id, "addresses": node.addresses})
        await done.wait()


async def send(peer: PeerId, addresses: Sequence[str], size: int) -> None:
    """Send from shared memory, as the daemon sends its worker's output."""
    counter = Counter()
    with create("swarm-copies", size) as slot:
        slot.unlink()
        async with open_node(Identity.generate(), [ANY_PORT]) as node:
            stream = await node.open_stream(peer, STAGE_PROTOCOL, LIMITS, addresses)
            await stream.send(b"{}", slot.buffer)
            await stream.receive()
            with counter.counting() as copied:
                await stream.send(b"{}", slot.buffer)
                answer = await stream.receive()
            say({"send": asdict(copied), "receive": json.loads(answer.header)})
            await stream.send(b"{}")


def main(words: Sequence[str]) -> None:
    match words:
        case ["receive"]:
            trio.run(receive)
        case ["send", size, peer, *addresses]:
            trio.run(send, PeerId(peer), addresses, int(size))


if __name__ == "__main__":
    main(sys.argv[1:])
