"""Counts a process's sent bytes per connection, at the socket and the muxer, and per frame.

`benchmarks.instruments.inside` runs the program and writes the counts. Four methods of the network
layer are wrapped.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.instruments.inside import run_inside, wrapped
from swarm_shared.network import FramedStream
from swarm_shared.network.libp2p.noise_channel import NoiseChannel, _transport
from swarm_shared.network.libp2p.tcp import BufferedTcpStream
from swarm_shared.network.libp2p.yamux import YamuxConnection
from swarm_shared.protocol import CONTROL_PROTOCOL, STAGE_PROTOCOL, TRANSFER_PROTOCOL
from swarm_shared.protocol.framing import PREFIX_BYTES, payload_parts

NAMES = {CONTROL_PROTOCOL: "control", STAGE_PROTOCOL: "stage", TRANSFER_PROTOCOL: "transfer"}


class Instrument:
    """Counters of this process while `counting`."""

    def __init__(self) -> None:
        self.peer = ""
        self._frames: dict[tuple[str, str, str], Counter[str]] = {}
        self._connections: list[YamuxConnection] = []
        self._socket_bytes: Counter[int] = Counter()
        self._messages: Counter[int] = Counter()
        self._alive: list[object] = []
        """Objects kept alive because counters are keyed by their address."""

    def document(self) -> dict[str, Any]:
        """Frames sent by remote and kind, and each connection's bytes at the socket, those of the
        muxer in them, and its Noise messages."""
        return {
            "peer": self.peer,
            "frames": [
                {"remote": remote, "protocol": protocol, "kind": kind, **count}
                for (remote, protocol, kind), count in self._frames.items()
            ],
            "connections": [
                {
                    "remote": one.remote,
                    "socket_bytes": self._socket_bytes[id(_transport(one._channel))],
                    "muxer_bytes": one.sent_bytes,
                    "noise_messages": self._messages[id(one._channel)],
                }
                for one in self._connections
            ],
        }

    def counting(self) -> AbstractContextManager[None]:
        """Count everything that this process sends; relayed connections have no own socket."""
        return wrapped(
            (
                (BufferedTcpStream, BufferedTcpStream.write_pieces, self._wrap_socket),
                (NoiseChannel, NoiseChannel.write, self._wrap_noise),
                (YamuxConnection, YamuxConnection.__init__, self._wrap_muxer),
                (FramedStream, FramedStream.send, self._wrap_frames),
            )
        )

    def _wrap_socket(self, write: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(stream: BufferedTcpStream, pieces: Sequence[bytes]) -> None:
            if id(stream) not in self._socket_bytes:
                self._alive.append(stream)
            await write(stream, pieces)
            self._socket_bytes[id(stream)] += sum(map(len, pieces))

        return counted

    def _wrap_noise(self, write: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(channel: NoiseChannel, messages: Sequence[bytes]) -> None:
            await write(channel, messages)
            self._messages[id(channel)] += len(messages)

        return counted

    def _wrap_muxer(self, initialise: Callable[..., Any]) -> Callable[..., Any]:
        def counted(connection: YamuxConnection, *arguments: Any, **options: Any) -> None:
            initialise(connection, *arguments, **options)
            self._connections.append(connection)
            self.peer = connection.secured_conn.get_local_peer().to_base58()

        return counted

    def _wrap_frames(self, send: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(
            stream: FramedStream, header: bytes, payload: Any = b"", *rest: Any, **options: Any
        ) -> None:
            await send(stream, header, payload, *rest, **options)
            size = sum(part.nbytes for part in payload_parts(payload))
            protocol = NAMES.get(stream.protocol, stream.protocol)
            kind, targets = _stage_kind(header, size) if protocol == "stage" else ("", 0)
            count = self._frames.setdefault((stream.remote, protocol, kind), Counter())
            count.update(
                frames=1, header_bytes=PREFIX_BYTES + len(header), payload_bytes=size,
                targets_bytes=targets,
            )  # fmt: skip

        return counted


def _stage_kind(header: bytes, size: int) -> tuple[str, int]:
    """Return the content kind of a stage frame and its bytes of targets."""
    said = json.loads(header)
    match said["kind"]:
        case "forward":
            return ("tokens" if said["stage"] == 0 else "activation"), said["target_bytes"]
        case "backward":
            return ("gradient" if size else "answer"), 0
    return str(said["kind"]), 0


def main(words: Sequence[str]) -> None:
    instrument = Instrument()
    run_inside(
        words, instrument.counting(), lambda module: {"module": module, **instrument.document()}
    )


if __name__ == "__main__":
    main(sys.argv[1:])
