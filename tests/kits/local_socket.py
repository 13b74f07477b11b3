"""A client of a Unix socket that sends what no client of ours sends."""

from __future__ import annotations

import socket
from pathlib import Path

import trio


async def first_answer(path: Path, content: bytes) -> bytes:
    """The first line that comes back for these bytes; empty when the server hangs up."""

    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(path))
            try:
                connection.sendall(content)
                return connection.makefile("rb").readline()
            except (BrokenPipeError, ConnectionResetError):
                return b""

    return await trio.to_thread.run_sync(talk)
