"""What another user of the machine can send over a message bus, and what comes of it."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jeepney import DBusAddress, HeaderFields, Message, message_bus, new_signal
from jeepney.io.blocking import open_dbus_connection

from kits.message_bus import Service, running_bus
from swarm_client.machine.dbus import (
    LOGIND,
    MAX_MESSAGE_BYTES,
    MAX_READ_BYTES,
    BusConnection,
    BusError,
)

SECONDS = 5.0


@pytest.fixture(scope="module")
def bus() -> Iterator[Path]:
    with running_bus() as path:
        yield path


@pytest.fixture
def logind(bus: Path) -> Iterator[Service]:
    with Service(bus, (LOGIND.service,), {"CanSuspend": lambda _: ("s", ("no",))}) as service:
        yield service


@pytest.fixture
def connection(bus: Path, logind: Service) -> Iterator[BusConnection]:
    connection = BusConnection(str(bus), seconds=SECONDS)
    yield connection
    connection.close()


def ask(connection: BusConnection) -> tuple[Any, ...]:
    return connection.call(LOGIND, "CanSuspend", answer="s", seconds=SECONDS)


def send(bus: Path, logind: Service, *messages: Message) -> None:
    """Send as another connection to the one that has asked logind, and wait until it is done."""
    (receiver,) = logind.senders
    with open_dbus_connection(f"unix:path={bus}") as stranger:
        for message in messages:
            message.header.fields[HeaderFields.destination] = receiver
            stranger.send(message)
        stranger.send_and_get_reply(message_bus.ListNames(), timeout=SECONDS)


def signal(text: str) -> Message:
    return new_signal(DBusAddress("/x", interface="x.y"), "Z", "s", (text,))


def test_a_signal_is_no_answer_though_it_has_the_number_of_a_call(
    bus: Path, logind: Service, connection: BusConnection
) -> None:
    assert ask(connection) == ("no",)
    forged = [signal("yes") for _ in range(20)]
    for number, message in enumerate(forged):
        message.header.fields[HeaderFields.reply_serial] = number + 1
    send(bus, logind, *forged)
    assert ask(connection) == ("no",)


def test_of_many_signals_a_part_is_read_at_a_time(
    bus: Path, logind: Service, connection: BusConnection
) -> None:
    ask(connection)
    text = "x" * (MAX_READ_BYTES // 4)
    send(bus, logind, *(signal(text) for _ in range(12)))
    parts: list[int] = []
    while sum(parts) < 12:
        select.select([connection], [], [], SECONDS)
        parts.append(len(connection.signals()))
    assert max(parts) <= 5  # that of the name which the bus has given is among them


def test_a_signal_that_is_too_long_ends_the_connection_before_it_is_read(
    bus: Path, logind: Service, connection: BusConnection
) -> None:
    ask(connection)
    send(bus, logind, signal("x" * MAX_MESSAGE_BYTES))
    with pytest.raises(BusError, match="bytes"):
        connection.signals()
    with pytest.raises(BusError):
        ask(connection)
