"""What is asked over D-Bus, on a message bus of the test's own with small services in the place of
logind."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.message_bus import Service, running_bus
from swarm_client.governor.probes.bus_idle import (
    ANSWER_SECONDS,
    SESSIONS_SECONDS,
    LogindIdle,
    probes_on_buses,
)
from swarm_client.governor.probes.idle import FirstAvailable
from swarm_client.machine.dbus import Bus
from swarm_shared.base.clock import monotonic


@pytest.fixture
def bus() -> Iterator[Path]:
    with running_bus() as path:
        yield path


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------- logind


def session(kind: str, *, remote: bool = False, group: str = "user", since: float = 0.0) -> Any:
    """A session's properties; `since` is when it became idle, 0 when it is not."""
    return {
        "Type": ("s", kind),
        "Remote": ("b", remote),
        "Class": ("s", group),
        "IdleHint": ("b", since > 0),
        "IdleSinceHint": ("t", 0),
        "IdleSinceHintMonotonic": ("t", int(since * 1e6)),
        "User": ("(uo)", (1000, "/org/freedesktop/login1/user/_1000")),
    }


SESSIONS = {
    "idle": session("wayland", since=40.0),
    "used": session("x11"),
    "remote": session("x11", remote=True),
    "greeter": session("wayland", group="greeter"),
    "ssh": session("tty", remote=True),
}


def logind(bus: Path, sessions: list[str]) -> Service:
    """Its sessions are `sessions`, of which each list that is asked for has all."""
    order = iter(sessions * 100)
    listed = [(name, 1000, "ada", "seat0", f"/session/{name}") for name in sessions]
    return Service(
        bus,
        ("org.freedesktop.login1",),
        {
            "ListSessions": lambda _: ("a(susso)", (listed,)),
            "GetAll": lambda asked: ("a{sv}", (SESSIONS[next(order)],)),
        },
    )


@pytest.mark.parametrize(
    ("sessions", "idle"),
    [
        (["idle", "ssh"], 60.0),
        (["idle", "used"], 0.0),
        (["remote", "greeter", "ssh"], None),
        ([], None),
    ],
)
def test_logind_is_believed_of_local_graphical_sessions(
    bus: Path, sessions: list[str], idle: float | None
) -> None:
    with logind(bus, sessions):
        assert LogindIdle(Bus(str(bus)), Time()).idle_seconds() == idle


def test_sessions_are_searched_now_and_then_and_one_that_has_ended_does_not_count(
    bus: Path,
) -> None:
    clock = Time()
    with logind(bus, ["idle"]) as service:
        probe = LogindIdle(Bus(str(bus)), clock)
        assert [probe.idle_seconds() for _ in range(3)] == [60.0] * 3
        assert [name for name, _ in service.calls] == ["ListSessions", *["GetAll"] * 3]
        del service.methods["GetAll"]
        assert probe.idle_seconds() is None
        clock.now += SESSIONS_SECONDS
        probe.idle_seconds()
        assert [name for name, _ in service.calls].count("ListSessions") == 2


def test_a_service_that_goes_away_and_comes_back_is_believed_again_and_logged_once(
    bus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Time()
    probe = LogindIdle(Bus(str(bus)), clock)
    assert [probe.idle_seconds() for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "logind is no source" in caplog.text
    assert "org.freedesktop.login1" in caplog.text
    for _ in range(2):
        with logind(bus, ["used"]):
            assert probe.idle_seconds() == 0.0
        clock.now += SESSIONS_SECONDS
        assert [probe.idle_seconds() for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 3


def test_a_bus_that_ends_is_found_again_under_its_address(tmp_path: Path) -> None:
    link = tmp_path / "bus"
    probe = LogindIdle(Bus(str(link)), Time())
    assert probe.idle_seconds() is None
    for _ in range(2):
        with running_bus() as path:
            link.symlink_to(path)
            with logind(path, ["idle"]):
                assert probe.idle_seconds() == 60.0
        assert probe.idle_seconds() is None
        link.unlink()


# ---------------------------------------------------------------- a bus that hangs


def test_a_service_that_hangs_costs_one_timeout_and_then_rests(bus: Path) -> None:
    clock = Time()
    with logind(bus, ["idle"]) as service:
        service.methods["GetAll"] = lambda _: None
        probe = FirstAvailable([LogindIdle(Bus(str(bus)), clock)], clock)
        began = monotonic()
        assert [probe.idle_seconds() for _ in range(5)] == [None] * 5
        assert monotonic() - began < ANSWER_SECONDS + 1.0
        assert [name for name, _ in service.calls] == ["ListSessions", "GetAll"]


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_bus_that_hangs_during_the_greeting_costs_one_timeout(tmp_path: Path, lines: int) -> None:
    """It answers that many lines of the authentication and then nothing, not even to Hello."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bus"))
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                for answer in (b"OK 0123\r\n", b"AGREE_UNIX_FD\r\n")[:lines]:
                    connection.recv(1024)
                    connection.sendall(answer)
                while connection.recv(1024):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        began = monotonic()
        assert LogindIdle(Bus(str(tmp_path / "bus"))).idle_seconds() is None
        assert ANSWER_SECONDS / 2 < monotonic() - began < ANSWER_SECONDS + 1.0
        thread.join()  # the connection was closed


def test_what_is_no_bus_at_all_gives_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bus"))
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1024)

        threading.Thread(target=serve, daemon=True).start()
        assert LogindIdle(Bus(str(tmp_path / "bus"))).idle_seconds() is None


def test_an_address_of_another_kind_is_not_used() -> None:
    assert probes_on_buses({"DBUS_SYSTEM_BUS_ADDRESS": "tcp:host=localhost,port=1"}) == []
