"""What is asked over D-Bus, on a message bus of the test's own with small services in the place of
GNOME, KDE and logind."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.clock import Clock
from kits.message_bus import Service, running_bus
from swarm_client.governor.probes.bus_idle import (
    ANSWER_SECONDS,
    SESSIONS_SECONDS,
    KdeIdle,
    LogindIdle,
    MutterIdle,
    probes_on_buses,
)
from swarm_client.governor.probes.idle import REST_SECONDS, FirstAvailable
from swarm_client.machine.dbus import Bus
from swarm_shared.base.clock import monotonic


@pytest.fixture
def bus() -> Iterator[Path]:
    with running_bus() as path:
        yield path


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
        assert LogindIdle(Bus(str(bus)), Clock()).idle_seconds() == idle


def test_sessions_are_searched_now_and_then_and_one_that_has_ended_does_not_count(
    bus: Path,
) -> None:
    clock = Clock()
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
    clock = Clock()
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
    probe = LogindIdle(Bus(str(link)), Clock())
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
    clock = Clock()
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


# ---------------------------------------------------------------- GNOME and KDE


def gnome(bus: Path, milliseconds: int) -> Service:
    return Service(
        bus,
        ("org.gnome.Mutter.IdleMonitor",),
        {"GetIdletime": lambda _: ("t", (milliseconds,))},
    )


def kde(bus: Path, milliseconds: int) -> Service:
    """As kscreenlocker, it has two names."""
    return Service(
        bus,
        ("org.freedesktop.ScreenSaver", "org.kde.screensaver"),
        {"GetSessionIdleTime": lambda _: ("u", (milliseconds,))},
    )


def buses(session: Path | None, system: Path) -> dict[str, str]:
    environment = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={system}"}
    if session is not None:
        environment["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={session},guid=0"
    return environment


def test_gnome_and_kde_count_milliseconds(bus: Path) -> None:
    with gnome(bus, 4_321) as mutter, kde(bus, 2**32 - 1) as locker:
        assert MutterIdle(Bus(str(bus))).idle_seconds() == 4.321
        assert KdeIdle(Bus(str(bus))).idle_seconds() == 4_294_967.295
        mutter.methods["GetIdletime"] = lambda _: ("t", (2**40,))
        assert MutterIdle(Bus(str(bus))).idle_seconds() == 2**40 / 1000
        assert locker.calls == [("GetSessionIdleTime", ())]


@pytest.mark.parametrize("milliseconds", [0, 1, 180_000])
def test_a_desktop_is_believed_before_logind(bus: Path, milliseconds: int) -> None:
    """An idle time of 0 is an answer from GNOME; under KWin it means that none is known."""
    for desktop in (gnome, kde):
        with desktop(bus, milliseconds), logind(bus, ["idle"]):
            idle = FirstAvailable(probes_on_buses(buses(bus, bus))).idle_seconds()
        assert idle is not None
        if desktop is kde and not milliseconds:
            assert idle == pytest.approx(monotonic() - 40, abs=60)
        else:
            assert idle == milliseconds / 1000


def test_an_answer_of_another_kind_is_none(bus: Path) -> None:
    with gnome(bus, 1) as mutter, logind(bus, []) as login:
        mutter.methods["GetIdletime"] = lambda _: ("s", ("1",))
        assert MutterIdle(Bus(str(bus))).idle_seconds() is None
        mutter.methods["GetIdletime"] = lambda _: ("", ())
        assert MutterIdle(Bus(str(bus))).idle_seconds() is None
        login.methods["ListSessions"] = lambda _: ("as", (["1"],))
        assert LogindIdle(Bus(str(bus)), Clock()).idle_seconds() is None


def test_another_implementation_of_the_screen_savers_interface_is_not_asked(bus: Path) -> None:
    """Some count seconds, and nothing tells them from KDE's but the name."""
    other = {"GetSessionIdleTime": lambda _: ("u", (5,))}
    with Service(bus, ("org.freedesktop.ScreenSaver",), other) as service:
        assert KdeIdle(Bus(str(bus))).idle_seconds() is None
        assert service.calls == []


def test_without_a_session_bus_logind_alone_is_asked(
    bus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    probes = probes_on_buses(buses(None, bus))
    assert [type(probe) for probe in probes] == [LogindIdle]
    assert "there is no session bus" in caplog.text


def test_a_session_bus_is_found_in_the_users_runtime_folder(bus: Path) -> None:
    with gnome(bus, 7_000):
        environment = {**buses(None, bus), "XDG_RUNTIME_DIR": str(bus.parent)}
        assert FirstAvailable(probes_on_buses(environment)).idle_seconds() == 7.0


def test_a_desktop_that_goes_away_leaves_logind_and_is_believed_when_it_is_back(bus: Path) -> None:
    clock = Clock()
    first = FirstAvailable([MutterIdle(Bus(str(bus))), LogindIdle(Bus(str(bus)), clock)], clock)
    with logind(bus, ["idle"]):
        for _ in range(2):
            with gnome(bus, 90_000):
                clock.now += REST_SECONDS
                assert first.idle_seconds() == 90.0
            assert first.idle_seconds() == clock.now - 40.0


def test_an_address_of_another_kind_is_not_used() -> None:
    other = "tcp:host=localhost,port=1"
    kinds = {"DBUS_SYSTEM_BUS_ADDRESS": other, "DBUS_SESSION_BUS_ADDRESS": other}
    assert probes_on_buses(kinds) == []
