"""Seconds since the last input at an X display, read over the display's own socket.

Three requests of the X protocol and its screen saver extension, instead of libX11 and libXss, which
end the whole process when the display disappears. Only displays of this machine are asked; a
display that ssh forwards is another machine's.

Sources: X Window System Protocol, X Version 11, section 8 and appendix B; MIT-SCREEN-SAVER 1.1.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from swarm_shared.base.clock import monotonic

ANSWER_SECONDS = 0.5
"""Timeout of an answer, the connection's beginning included. Without a display of the user's, the
socket's name is free to any user, and what listens there may send events without end."""
_EXTENSION = b"MIT-SCREEN-SAVER"
_COOKIE = b"MIT-MAGIC-COOKIE-1"
_QUERY_EXTENSION = 98
_QUERY_INFO = 1
"""Minor opcode of the extension's request."""
_REPLY = 1
MAX_SETUP_BYTES = 2**18
"""The setup's length is in units of four bytes, 16 bits of them."""


class X11Idle:
    """Holds one connection; reconnects when it is lost."""

    def __init__(
        self,
        environment: Mapping[str, str],
        sockets: Path = Path("/tmp/.X11-unix"),
    ) -> None:
        self._environment = environment
        self._sockets = sockets
        self._connection: socket.socket | None = None
        self._deadline = 0.0
        self._root = 0
        self._opcode = 0

    def idle_seconds(self) -> float | None:
        number = display_number(self._environment.get("DISPLAY", ""))
        if number is None:
            return None
        self._deadline = monotonic() + ANSWER_SECONDS
        try:
            if self._connection is None:
                self._connect(number)
            return self._query() / 1000
        except (OSError, ValueError, struct.error):
            self.close()
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, number: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_SECONDS)
        self._connection = connection
        connection.connect(str(self._sockets / f"X{number}"))
        cookie = find_cookie(_authority(self._environment), number)
        name = _COOKIE if cookie else b""
        # Little-endian, protocol 11.0.
        head = struct.pack("<cxHHHHxx", b"l", 11, 0, len(name), len(cookie))
        connection.sendall(head + _padded(name) + _padded(cookie))
        answer, _, _, _, units = struct.unpack("<BBHHH", self._read(8))
        setup = self._read(4 * units)
        if answer != 1:
            raise ValueError("the display refuses this user")
        self._root = _root_window(setup)
        request = struct.pack("<BxHHxx", _QUERY_EXTENSION, 2 + 4, len(_EXTENSION))
        connection.sendall(request + _EXTENSION)
        present, self._opcode = struct.unpack_from("<8xBB", self._reply())
        if not present:
            raise ValueError("the display has no screen saver extension")

    def _query(self) -> int:
        """Milliseconds since the last input."""
        assert self._connection is not None
        self._connection.sendall(struct.pack("<BBHI", self._opcode, _QUERY_INFO, 2, self._root))
        (idle,) = struct.unpack_from("<16xI", self._reply())
        return int(idle)

    def _reply(self) -> bytes:
        """The next reply; events, which were not requested, are skipped."""
        while True:
            message = self._read(32)
            if message[0] == 0:
                raise ValueError(f"the display answers with error {message[1]}")
            if message[0] != _REPLY:
                continue
            (units,) = struct.unpack_from("<4xI", message)
            return message + self._read(4 * units)

    def _read(self, size: int) -> bytes:
        assert self._connection is not None
        if size > MAX_SETUP_BYTES:
            raise ValueError(f"the display announces {size} bytes")
        content = b""
        while len(content) < size:
            left = self._deadline - monotonic()
            if left <= 0:
                raise TimeoutError("the display does not come to an end")
            self._connection.settimeout(left)
            part = self._connection.recv(size - len(content))
            if not part:
                raise ValueError("the display has closed the connection")
            content += part
        return content


def display_number(display: str) -> int | None:
    """Number of a display of this machine, like ":0" or "unix:1.0"; None otherwise."""
    match = re.fullmatch(r"(?:unix)?:(\d{1,5})(?:\.\d+)?", display)
    return int(match[1]) if match else None


def _root_window(setup: bytes) -> int:
    """Root window of the first screen. Before it: 32 bytes, the vendor's name, the formats."""
    vendor_bytes, formats = struct.unpack_from("<16xH3xB", setup)
    start = 32 + vendor_bytes + -vendor_bytes % 4 + 8 * formats
    (root,) = struct.unpack_from("<I", setup, start)
    return int(root)


def _authority(environment: Mapping[str, str]) -> bytes:
    named = environment.get("XAUTHORITY")
    home = environment.get("HOME", "")
    try:
        return (Path(named) if named else Path(home) / ".Xauthority").read_bytes()
    except OSError:
        return b""


def find_cookie(authority: bytes, number: int) -> bytes:
    """The display's cookie in an Xauthority file; empty when it has none.

    Entries: a process_tree, then address, display, name and data, each after its length,
    big-endian.
    """
    position = 0
    while position + 2 <= len(authority):
        position += 2
        fields: list[bytes] = []
        for _ in range(4):
            if position + 2 > len(authority):
                return b""
            (size,) = struct.unpack_from(">H", authority, position)
            fields.append(authority[position + 2 : position + 2 + size])
            position += 2 + size
        _, display, name, data = fields
        if name == _COOKIE and display in (b"", str(number).encode()):
            return data
    return b""


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 4)
