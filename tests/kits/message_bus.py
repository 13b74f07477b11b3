"""A message bus of the tests' own (`dbus-daemon`), and small services on it.

The services use jeepney's own connection, not the one that is tested.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    MessageType,
    message_bus,
    new_error,
    new_method_return,
    new_signal,
)
from jeepney.io.blocking import DBusConnection, open_dbus_connection

CONFIGURATION = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""

Answer = Callable[[tuple[Any, ...]], tuple[str, tuple[Any, ...]] | None]
"""A method: its arguments to a signature and values; None: it never answers."""


@contextlib.contextmanager
def running_bus() -> Iterator[Path]:
    """The socket of a running bus; the test is skipped where there is no dbus-daemon."""
    if shutil.which("dbus-daemon") is None:
        pytest.skip("there is no dbus-daemon here; sh tools/install_dbus.sh installs one")
    # Below a short path: a socket's has at most 108 bytes.
    with tempfile.TemporaryDirectory(prefix="swarm-bus-") as folder:
        path = Path(folder) / "bus"
        configuration = Path(folder) / "bus.conf"
        configuration.write_text(CONFIGURATION.format(socket=path))
        command = ["dbus-daemon", f"--config-file={configuration}", "--nofork", "--print-address"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"unix:"), "it listens"
            try:
                yield path
            finally:
                process.terminate()


class Service:
    """Names on a bus with methods, by their member. Calls are answered in a thread."""

    def __init__(self, path: Path, names: tuple[str, ...], methods: Mapping[str, Answer]) -> None:
        self.methods = dict(methods)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.senders: set[str] = set()
        """The callers' names on the bus."""
        self._connection: DBusConnection = open_dbus_connection(
            f"unix:path={path}", enable_fds=True
        )
        for name in names:
            reply = self._connection.send_and_get_reply(message_bus.RequestName(name), timeout=5)
            assert reply.body == (1,), f"{name} belongs to this connection"
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def emit(self, path: str, interface: str, member: str, signature: str, *values: Any) -> None:
        """Send a signal to all that have subscribed to it."""
        emitter = DBusAddress(path, interface=interface)
        self._send(new_signal(emitter, member, signature, values))

    def close(self) -> None:
        """End the connection, and with it the ownership of the names."""
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: Message) -> None:
        with self._sending:
            self._connection.send(message)

    def _serve(self) -> None:
        while True:
            try:
                message = self._connection.receive()
            except OSError:
                return
            if message.header.message_type is MessageType.method_call:
                self._answer(message)

    def _answer(self, message: Message) -> None:
        member = message.header.fields[HeaderFields.member]
        self.calls.append((member, message.body))
        self.senders.add(message.header.fields[HeaderFields.sender])
        method = self.methods.get(member)
        if method is None:
            error = "org.freedesktop.DBus.Error.UnknownMethod"
            self._send(new_error(message, error, "s", (f"there is no {member}",)))
            return
        answer = method(message.body)
        if answer is not None:
            self._send(new_method_return(message, answer[0] or None, answer[1]))
