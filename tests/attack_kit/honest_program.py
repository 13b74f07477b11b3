"""Honest newcomers, one after the other, in a process of their own.

    python -m attack_kit.honest_program ADDRESS

Prints for each how many seconds it took to be served, or why it was not.
"""

from __future__ import annotations

import sys

import trio

from swarm_shared.base.errors import SwarmError
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FrameLimits, open_node

HELLO = "/test/hello/1"
LIMITS = FrameLimits(max_header_bytes=512 * 1024)
PATIENCE_SECONDS = 20.0
PAUSE_SECONDS = 0.3


async def say_hello(address: str) -> None:
    peer = address.split("/")[-1]
    async with open_node(Identity.generate()) as node:
        stream = await node.open_stream(peer, HELLO, LIMITS, [address])
        await stream.send(b"good day")
        answer = await stream.receive(timeout_seconds=PATIENCE_SECONDS)
        assert answer.header == b"good day"


async def main(address: str) -> None:
    while True:
        began = trio.current_time()
        try:
            await say_hello(address)
        except SwarmError as error:
            print("refused", error, flush=True)
        else:
            print("served", trio.current_time() - began, flush=True)
        await trio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
