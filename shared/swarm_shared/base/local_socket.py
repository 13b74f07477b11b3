"""Lines of JSON over a Unix socket in a folder of the user: how programs of one machine
communicate.

Owns the form of a line, its bound, and the address of a socket however deep its folder lies. Every
process that can open the socket may do what its owner may: the socket is private to the user, as
its folder is. Free of trio, so that a command that only sends a request starts quickly. Serving is
in `swarm_shared.base.local_server`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swarm_shared.base.errors import StorageError

MAX_LINE_BYTES = 64 * 1024
"""Longest request. Answers may be longer where their reader allows it."""

_PATH_BYTES = 100
"""Longest path used as a socket's address, which holds 108 bytes on Linux and 104 on macOS, the
final zero included."""


def to_line(message: dict[str, Any], max_bytes: int = MAX_LINE_BYTES) -> bytes:
    """Encode one message as a line; ValueError when it is too long."""
    content = json.dumps(message).encode() + b"\n"
    if len(content) > max_bytes:
        raise ValueError(f"a message of {len(content)} bytes is too long")
    return content


def from_line(line: bytes) -> dict[str, Any]:
    """Parse a line; ValueError for anything but one JSON object."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield a path that leads to `path` and fits into a socket's address."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise StorageError(
            f"{path.parent} has too long a path for a socket; choose a folder whose path has at "
            f"most {_PATH_BYTES - len(path.name) - 1} bytes, or move it to one"
        )
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


class LocalConnection:
    """The client's end of one connection; made by `connect`. Blocks; OSError when it breaks."""

    def __init__(self, connection: socket.socket, lines: BinaryIO, max_line_bytes: int) -> None:
        self._connection = connection
        self._lines = lines
        self._max_line_bytes = max_line_bytes

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(to_line(message))

    def receive(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        """Return the next message; None at the end. TimeoutError, after which the connection is of
        no use; ValueError for a malformed line."""
        self._connection.settimeout(timeout_seconds)
        line = self._lines.readline(self._max_line_bytes + 1)
        if line and not line.endswith(b"\n"):
            raise ValueError(f"{len(line)} bytes and no end of line")
        return from_line(line) if line else None


@contextlib.contextmanager
def connect(
    path: Path, timeout_seconds: float, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[LocalConnection]:
    """Connect to the server at `path`. FileNotFoundError or ConnectionRefusedError when none
    listens."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with made as connection, connection.makefile("rb") as lines:
        connection.settimeout(timeout_seconds)
        with socket_address(path) as address:
            connection.connect(address)
        yield LocalConnection(connection, lines, max_line_bytes)
