"""A bare node of the project's network on one machine of the lab, told by lines of JSON.

    python -m kits.network_lab.node_program IDENTITY_FILE LISTEN_ADDRESS

`node_process` is the other end. Logs go to standard error.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from kits.network_lab.commanded_process import obey, say
from swarm_shared.base.errors import SwarmError
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, Node, RelayLimits, open_node

SINK = "/lab/sink/1"
LIMITS = FrameLimits(max_payload_bytes=16 * 2**20)
POLL_SECONDS = 0.01


async def sink(stream: FramedStream) -> None:
    """Takes frames and throws them away; answers the one that says it is the last."""
    while (await stream.receive()).header != b"last":
        pass
    await stream.send(b"done")


class Program:
    def __init__(self, node: Node) -> None:
        self._node = node

    async def do(self, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await getattr(self, f"do_{what}")(**arguments)
        return answer

    async def do_tell(self) -> dict[str, Any]:
        node = self._node
        return {
            "peer": node.peer_id,
            "addresses": node.addresses,
            "slots": node.relay_slots,
            "paths": [path.model_dump(mode="json") for path in node.paths()],
            "forwarded_bytes": node.relay.forwarded_bytes if node.relay is not None else 0,
        }

    async def do_serve_relay(self, **limits: int) -> dict[str, Any]:
        self._node.serve_relay(RelayLimits(**limits), lambda peer: True)
        return {}

    async def do_reserve(
        self, relays: dict[str, list[str]], wanted: int, seconds: float
    ) -> dict[str, Any]:
        self._node.use_relays(relays, wanted)  # type: ignore[arg-type]
        took = await self._until(lambda: len(self._node.relay_slots) >= wanted, seconds)
        return {"seconds": took, **await self.do_tell()}

    async def do_connect(self, peer: Any, addresses: list[str]) -> dict[str, Any]:
        began = trio.current_time()
        await self._node.connect(peer, addresses)
        return {"seconds": trio.current_time() - began, "kind": self._kind(peer)}

    async def do_wait_for_path(self, peer: Any, kind: str, seconds: float) -> dict[str, Any]:
        took = await self._until(lambda: self._kind(peer) == kind, seconds)
        return {"seconds": took, "kind": self._kind(peer)}

    async def do_disconnect(self, peer: Any) -> dict[str, Any]:
        await self._node.disconnect(peer)
        return {}

    async def do_send(self, peer: Any, size_bytes: int, frame_bytes: int) -> dict[str, Any]:
        """Frames until the size is reached; the time until the other end has taken them all."""
        payload = os.urandom(frame_bytes)
        async with await self._node.open_stream(peer, SINK, LIMITS) as stream:
            began = trio.current_time()
            for _ in range(size_bytes // frame_bytes):
                await stream.send(b"more", payload)
            await stream.send(b"last")
            await stream.receive()
        return {"seconds": trio.current_time() - began, "kind": self._kind(peer)}

    def _kind(self, peer: Any) -> str | None:
        path = self._node.path(peer)
        return path.kind.value if path is not None else None

    async def _until(self, ready: Callable[[], bool], seconds: float) -> float | None:
        """How long it took; None when it took longer than allowed."""
        began = trio.current_time()
        with trio.move_on_after(seconds):
            while not ready():
                await trio.sleep(POLL_SECONDS)
            return trio.current_time() - began
        return None


async def main(identity_file: str, listen: str) -> None:
    identity = Identity.load_or_create(Path(identity_file))
    async with open_node(identity, [listen]) as node:
        node.serve(SINK, sink, LIMITS)
        program = Program(node)
        say(await program.do_tell())
        requests = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
        await obey(requests, program.do, (SwarmError,))


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s: %(message)s")
    for name in ("libp2p", "multiaddr"):
        logging.getLogger(name).setLevel(logging.WARNING)
    trio.run(main, *sys.argv[1:])
