"""A node in a process of its own, so that what an attack costs it can be measured.

    python -m attack_kit.victim_program

Prints its address, then serves until its standard input ends. It serves what a coordinator does:
a hello to everybody, within ten seconds; a relay to everybody; and an echo to nobody.
"""

from __future__ import annotations

import sys

import trio

from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, RelayLimits, open_node

HELLO, ECHO = "/test/hello/1", "/test/echo/1"
HELLO_LIMITS = FrameLimits(max_header_bytes=512 * 1024)
ECHO_LIMITS = FrameLimits(max_payload_bytes=16 * 2**20)


async def hello(stream: FramedStream) -> None:
    frame = await stream.receive(timeout_seconds=10)
    await stream.send(frame.header)


async def echo(stream: FramedStream) -> None:
    while True:
        frame = await stream.receive()
        await stream.send(frame.header, frame.payload)


async def main() -> None:
    async with open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as node:
        node.serve(HELLO, hello, HELLO_LIMITS, public=True)
        node.serve(ECHO, echo, ECHO_LIMITS)
        node.admit_only(lambda peer, protocol: False)
        node.serve_relay(RelayLimits(), lambda peer: True)
        print(node.addresses[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    trio.run(main)
