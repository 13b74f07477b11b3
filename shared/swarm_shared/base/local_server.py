"""Serving lines of JSON (`swarm_shared.base.local_socket`) on a Unix socket, in trio.

Owns the socket's file and its permissions. What the messages mean is the callers' part, and so is
the handling of a connection that fails: `handle` is a supervisor of its own.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from swarm_shared.base.atomic_file import PRIVATE_MODE, storage_error
from swarm_shared.base.local_socket import MAX_LINE_BYTES, from_line, socket_address, to_line

_LISTEN_BACKLOG = 16
"""Connections the kernel queues before they are accepted."""


class LocalServerConnection:
    """The server's end of one connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end. ValueError for anything but one JSON object a
        line."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            part = await self._stream.receive_some(MAX_LINE_BYTES)
            self._buffer += part
            if not part and not self._buffer:
                return None
            if not part or len(self._buffer) > MAX_LINE_BYTES:
                raise ValueError(f"{len(self._buffer)} bytes and no end of line")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return from_line(line)

    async def send(self, message: dict[str, Any], max_bytes: int = MAX_LINE_BYTES) -> None:
        await self._stream.send_all(to_line(message, max_bytes))


async def serve_lines(
    path: Path,
    handle: Callable[[LocalServerConnection], Awaitable[None]],
    *,
    on_listening: Callable[[], None] = lambda: None,
) -> None:
    """Serve connections at `path` until cancelled. StorageError when the socket cannot be created.

    `on_listening` is called once connections are accepted. The caller holds the folder's lock, so a
    socket that exists already was left by a process that was killed.
    """
    listener = listen_privately(path)
    try:
        on_listening()

        async def converse(stream: trio.SocketStream) -> None:
            async with stream:
                await handle(LocalServerConnection(stream))

        await trio.serve_listeners(converse, [trio.SocketListener(listener)])
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            path.unlink()


def listen_privately(path: Path, backlog: int = _LISTEN_BACKLOG) -> trio.socket.SocketType:
    """A listening socket at `path`, in the place of one left there, which only this user can open.
    StorageError when it cannot be created."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        with socket_address(path) as address:
            made.bind(address)
        # Before listen: no connection is possible until the permissions are set.
        path.chmod(PRIVATE_MODE)
        made.listen(backlog)
    except OSError as error:
        made.close()
        raise storage_error(path, error) from error
    except BaseException:
        made.close()
        raise
    made.setblocking(False)
    return trio.socket.from_stdlib_socket(made)
