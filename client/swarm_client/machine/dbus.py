"""The door to D-Bus: connections to a message bus of this machine, over its own socket (jeepney).

Blocking, for a thread that may wait; every wait has a deadline, because jeepney's own connection
waits without limit for the first answer of a bus. Nothing is started on a bus: a service that does
not run is an error. Imported on Linux only, where jeepney is installed.

Source: D-Bus Specification 0.43, "Message Protocol" and "Authentication Protocol".
"""

from __future__ import annotations

import array
import itertools
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from jeepney import (
    DBusAddress,
    FileDescriptor,
    HeaderFields,
    MatchRule,
    Message,
    MessageFlag,
    MessageType,
    Parser,
    message_bus,
    new_method_call,
)
from jeepney.auth import BEGIN, Authenticator
from jeepney.bus import get_connectable_addresses
from jeepney.fds import fds_buf_size

from swarm_shared.base.clock import monotonic
from swarm_shared.base.errors import SwarmError

SYSTEM_BUS: Final = "unix:path=/run/dbus/system_bus_socket"
"""Address of the system's bus where DBUS_SYSTEM_BUS_ADDRESS names no other."""

MAX_MESSAGE_BYTES: Final = 128 * 1024
"""Longest message that is read; answers of logind and desktops have some KB. Every user of the
machine may send signals of 32 MiB to every connection of the system bus."""
MAX_READ_BYTES: Final = 64 * 1024
"""After how many bytes `signals` returns, though there may be more."""

_FAILURES = (OSError, ValueError, LookupError, RuntimeError, AssertionError, struct.error)
"""Errors of the socket, and those with which jeepney reports what a bus must not send."""


class BusError(SwarmError):
    """A message bus cannot be reached, or does not answer in time."""


class BusRefusal(BusError):
    """The bus or the service answered with an error; the connection goes on."""


@dataclass(frozen=True, slots=True)
class BusObject:
    """One interface of one object of a service."""

    service: str
    path: str
    interface: str

    def call(self, member: str, signature: str, arguments: tuple[Any, ...]) -> Any:
        address = DBusAddress(self.path, bus_name=self.service, interface=self.interface)
        message = new_method_call(address, member, signature or None, arguments)
        message.header.flags |= MessageFlag.no_auto_start
        return message


LOGIND: Final = BusObject(
    "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"
)
PROPERTIES_INTERFACE: Final = "org.freedesktop.DBus.Properties"


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal, from a connection of the bus: anyone's, not only of the service subscribed to."""

    sender: str
    member: str
    values: tuple[Any, ...]


def system_bus(environment: Mapping[str, str]) -> str | None:
    """Path of the system bus's socket; None where the address is of a kind that is not used."""
    return _socket_path(environment.get("DBUS_SYSTEM_BUS_ADDRESS") or SYSTEM_BUS)


def session_bus(environment: Mapping[str, str]) -> str | None:
    """Path of the socket of this user's session bus; None where there is none, as for a service of
    the whole machine."""
    folder = environment.get("XDG_RUNTIME_DIR")
    address = environment.get("DBUS_SESSION_BUS_ADDRESS")
    return _socket_path(address or (f"unix:path={folder}/bus" if folder else ""))


def _socket_path(address: str) -> str | None:
    try:
        return str(next(iter(get_connectable_addresses(address))))
    except (ValueError, RuntimeError):
        return None


class BusConnection:
    """One connection. Not thread-safe. BusError, after which it is closed: the bus is not there,
    hangs or sends what it must not."""

    def __init__(self, path: str, *, seconds: float) -> None:
        """Connect to the socket at `path` and register, within `seconds`."""
        self._serials = itertools.count(1)
        self._parser = Parser()
        self._signals: deque[Signal] = deque()
        self._read_bytes = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline = monotonic() + seconds
        with self._closing_on_failure():
            self._wait_until(deadline)
            self._socket.connect(path)
            self._authenticate(deadline)
            self._call(message_bus.Hello(), deadline)

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """The socket, to wait for signals: readable when `signals` has something to read."""
        return self._socket.fileno()

    def call(
        self,
        target: BusObject,
        member: str,
        signature: str = "",
        *arguments: object,
        answer: str,
        seconds: float,
    ) -> tuple[Any, ...]:
        """The values with which the method answers within `seconds`.

        BusRefusal when it answers with an error, or with values that have not the signature
        `answer`.
        """
        with self._closing_on_failure():
            message = self._call(target.call(member, signature, arguments), monotonic() + seconds)
        found = message.header.fields.get(HeaderFields.signature, "")
        if found != answer:
            raise BusRefusal(f"{member} answers with {found!r} instead of {answer!r}")
        return tuple(message.body)

    def subscribe(self, source: BusObject, member: str, *, seconds: float) -> None:
        """Have the bus pass this signal of `source` on to here from now on."""
        rule = MatchRule(
            type="signal", sender=source.service, path=source.path, interface=source.interface,
            member=member,
        )  # fmt: skip
        with self._closing_on_failure():
            self._call(message_bus.AddMatch(rule), monotonic() + seconds)

    def signals(self) -> tuple[Signal, ...]:
        """The signals that have arrived, without waiting for more, of MAX_READ_BYTES at a time.

        BusError once the bus has ended the connection.
        """
        with self._closing_on_failure():
            self._socket.setblocking(False)
            until = self._read_bytes + MAX_READ_BYTES
            try:
                while self._read_bytes < until:
                    self._file(self._read())
            except BlockingIOError:
                pass
        arrived, self._signals = tuple(self._signals), deque()
        return arrived

    # ---- messages

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            self.close()
            what = "does not answer in time" if isinstance(error, TimeoutError) else f"{error}"
            raise BusError(f"the message bus: {what}") from error

    def _wait_until(self, deadline: float) -> None:
        left = deadline - monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _authenticate(self, deadline: float) -> None:
        authenticator = Authenticator(enable_fds=True, inc_null_byte=True)
        for request in authenticator:
            self._wait_until(deadline)
            self._socket.sendall(request)
            self._wait_until(deadline)
            authenticator.feed(self._not_empty(self._socket.recv(1024)))
        self._wait_until(deadline)
        self._socket.sendall(BEGIN)

    def _call(self, message: Any, deadline: float) -> Any:
        """The message that answers it. BusRefusal when that is an error."""
        serial = next(self._serials)
        self._wait_until(deadline)
        self._socket.sendall(message.serialise(serial, fds=array.array("i")))
        while True:
            self._wait_until(deadline)
            answer = self._read()
            if answer is None or not _answers(answer, serial):
                self._file(answer)
            elif answer.header.message_type is MessageType.error:
                name = answer.header.fields.get(HeaderFields.error_name)
                raise BusRefusal(f"{name}: {' '.join(map(str, answer.body))}")
            else:
                return answer

    def _file(self, message: Any) -> None:
        """Keep a signal. An answer that came too late for its call is dropped."""
        if message is not None and message.header.message_type is MessageType.signal:
            fields = message.header.fields
            sender, member = fields.get(HeaderFields.sender), fields.get(HeaderFields.member)
            self._signals.append(Signal(str(sender), str(member), tuple(message.body)))

    def _read(self) -> Message | None:
        """The next message, or None when only a part of one has arrived."""
        wanted = self._parser.bytes_desired()
        if wanted > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {wanted} bytes")
        content, ancillary, flags, _ = self._socket.recvmsg(wanted, fds_buf_size())
        self._read_bytes += len(content)
        if flags & socket.MSG_CTRUNC:
            raise ValueError("more file descriptors than can be received")
        descriptors = FileDescriptor.from_ancdata(ancillary)
        self._parser.add_data(self._not_empty(content), fds=descriptors)
        return self._parser.get_next_message()

    @staticmethod
    def _not_empty(content: bytes) -> bytes:
        if not content:
            raise ConnectionResetError("the bus has closed the connection")
        return content


def _answers(message: Message, serial: int) -> bool:
    """Whether a message is the answer to a call. A signal, which every user may send, is none."""
    is_answer = message.header.message_type in (MessageType.method_return, MessageType.error)
    return is_answer and message.header.fields.get(HeaderFields.reply_serial) == serial


class Bus:
    """Calls over one connection, which is opened when it is needed and again after a failure."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: BusConnection | None = None

    def call(
        self,
        target: BusObject,
        member: str,
        signature: str = "",
        *arguments: object,
        answer: str,
        seconds: float,
    ) -> tuple[Any, ...]:
        """Call a method as `BusConnection.call` does, within so many seconds, which include opening
        a connection."""
        deadline = monotonic() + seconds
        if self._connection is None:
            self._connection = BusConnection(self._path, seconds=seconds)
        try:
            return self._connection.call(
                target, member, signature, *arguments, answer=answer, seconds=deadline - monotonic()
            )
        except BusRefusal:
            raise
        except BusError:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def take_descriptor(received: Any) -> int:
    """The file descriptor of an answer, which the caller closes."""
    return int(received.to_raw_fd())
