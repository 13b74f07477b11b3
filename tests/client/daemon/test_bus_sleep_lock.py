"""The goodbye before a sleep, with a small logind on a message bus of the test's own."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from jeepney import DBusAddress, HeaderFields, message_bus, new_signal
from jeepney.io.blocking import open_dbus_connection

from client.volunteer.test_volunteer_admission import scene
from kits.message_bus import Service, running_bus
from kits.waiting import until
from swarm_client.daemon import sleep_lock
from swarm_client.daemon.sleep_lock import GOODBYE_SHARE, SleepLock
from swarm_client.volunteer.device_group import DeviceGroup

PATH, MANAGER = "/org/freedesktop/login1", "org.freedesktop.login1.Manager"


class Logind:
    """Its locks are pipes, as logind's: the reading end ends when the lock is closed."""

    def __init__(self, bus: Path, delay_seconds: float = 5.0) -> None:
        self.locks: list[int] = []
        self.hangs = False
        self._lent: int | None = None
        self._delay = int(delay_seconds * 1e6)
        self.service = Service(
            bus,
            ("org.freedesktop.login1",),
            {"Inhibit": self._inhibit, "Get": lambda _: ("v", (("t", self._delay),))},
        )

    def _inhibit(self, asked: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]] | None:
        assert (asked[0], asked[3]) == ("sleep", "delay")
        if self.hangs:
            return None
        reading, lent = os.pipe()
        if self._lent is not None:
            os.close(self._lent)  # the answer before has been sent
        self._lent = lent
        self.locks.append(reading)
        return "h", (lent,)

    def prepare_for_sleep(self, begins: bool) -> None:
        self.service.emit(PATH, MANAGER, "PrepareForSleep", "b", begins)

    async def wait_for_lock(self, number: int) -> int:
        """The reading end of lock `number`, once it is lent and this process has no other copy."""
        await until(lambda: len(self.locks) >= number)
        return self.locks[number - 1]

    def forget_copies(self) -> None:
        if self._lent is not None:
            os.close(self._lent)
            self._lent = None

    def close(self) -> None:
        self.service.close()
        self.forget_copies()
        for reading in self.locks:
            os.close(reading)


def is_held(reading: int) -> bool:
    os.set_blocking(reading, False)
    try:
        return os.read(reading, 1) != b""
    except BlockingIOError:
        return True


async def released(reading: int) -> None:
    os.set_blocking(reading, False)
    await trio.lowlevel.wait_readable(reading)
    assert os.read(reading, 1) == b""


class Sleeper:
    """What a volunteer does, with the lock as it was then."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.changed = trio.Event()
        self.goodbye = trio.Event()
        self.lock: int | None = None
        self.seconds: float | None = None

    async def fall_asleep(self, seconds: float) -> None:
        self.seconds = seconds
        self._note("pausing")
        await self.goodbye.wait()
        assert self.lock is not None
        self._note("goodbye, lock held" if is_held(self.lock) else "goodbye, lock lost")

    def wake(self) -> None:
        self._note("awake")

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, event: str) -> None:
        while event not in self.events:
            await self.changed.wait()


@asynccontextmanager
async def locking(bus: Path, sleeper: Sleeper) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(SleepLock(str(bus), sleeper.fall_asleep, sleeper.wake).run)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture
def bus() -> Iterator[Path]:
    with running_bus() as path:
        yield path


@pytest.fixture
def logind(bus: Path) -> Iterator[Logind]:
    made = Logind(bus)
    yield made
    made.close()


async def test_the_machine_sleeps_after_the_goodbye_and_a_new_lock_is_taken_after_it(
    bus: Path, logind: Logind
) -> None:
    sleeper = Sleeper()
    async with locking(bus, sleeper):
        for number in (1, 2):
            sleeper.lock = await logind.wait_for_lock(number)
            logind.prepare_for_sleep(True)
            await sleeper.until("pausing")
            logind.forget_copies()
            assert is_held(sleeper.lock)
            sleeper.goodbye.set()
            await released(sleeper.lock)
            assert sleeper.events == ["pausing", "goodbye, lock held"]
            logind.prepare_for_sleep(False)
            await sleeper.until("awake")
            sleeper.events.clear()
            sleeper.goodbye = trio.Event()
        await logind.wait_for_lock(3)
    assert sleeper.seconds == 5.0 * GOODBYE_SHARE
    logind.forget_copies()
    assert not any(map(is_held, logind.locks)), "the last one is closed with the daemon"


async def fall_asleep_for(
    bus: Path, logind: Logind, devices: DeviceGroup, nursery: trio.Nursery
) -> float:
    """Announce a sleep; return the seconds until the lock ends."""
    nursery.start_soon(SleepLock(str(bus), devices.fall_asleep, devices.wake).run)
    lock = await logind.wait_for_lock(1)
    began = trio.current_time()
    logind.prepare_for_sleep(True)
    await until(lambda: not logind.service.senders or devices.suspended is not None)
    logind.forget_copies()
    await released(lock)
    return trio.current_time() - began


async def test_a_volunteer_is_paused_and_has_said_goodbye_before_the_lock_ends(
    bus: Path, logind: Logind, tmp_path: Path
) -> None:
    async with scene(tmp_path) as s, trio.open_nursery() as nursery:
        devices = DeviceGroup([s.volunteer])
        seconds = await fall_asleep_for(bus, logind, devices, nursery)
        assert s.script.paused[-1], "the last heartbeat said so"
        assert (s.script.leaving, s.volunteer.attachment.session) == (1, None)
        assert seconds < 5.0
        logind.prepare_for_sleep(False)
        await s.script.sessions(2)
        await s.until(lambda: s.script.paused[-1:] == [False])
        await logind.wait_for_lock(2)
        nursery.cancel_scope.cancel()


async def test_a_signal_that_is_not_loginds_is_nothing(
    bus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sleeper, logind = Sleeper(), Logind(bus)
    async with locking(bus, sleeper):
        await logind.wait_for_lock(1)
        (receiver,) = logind.service.senders
        emitter = DBusAddress(PATH, interface=MANAGER)
        forged = new_signal(emitter, "PrepareForSleep", "b", (True,))
        forged.header.fields[HeaderFields.destination] = receiver
        with open_dbus_connection(f"unix:path={bus}") as stranger:
            stranger.send(forged)
            stranger.send_and_get_reply(message_bus.GetId(), timeout=5)  # the bus has passed it on
        logind.close()
        await until(lambda: caplog.records or sleeper.events)
    assert sleeper.events == []
    assert "logind has ended" in caplog.text


async def test_when_logind_ends_in_a_sleep_the_volunteer_wakes_and_finds_the_next_one(
    bus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sleep_lock, "RETRY_SECONDS", 0.01)
    sleeper = Sleeper()
    sleeper.goodbye.set()
    first = Logind(bus)
    async with locking(bus, sleeper):
        sleeper.lock = await first.wait_for_lock(1)
        first.prepare_for_sleep(True)
        await sleeper.until("goodbye, lock held")
        first.close()
        await sleeper.until("awake")
        second = Logind(bus)
        await second.wait_for_lock(1)
    second.close()
    assert sleeper.events == ["pausing", "goodbye, lock held", "awake"]
    assert "logind has ended" in caplog.text


async def test_without_logind_nothing_happens_and_that_is_logged_once(
    bus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sleep_lock, "RETRY_SECONDS", 0.01)
    sleeper = Sleeper()
    for path in (bus, tmp_path / "none"):
        caplog.clear()
        with trio.move_on_after(0.3):
            await SleepLock(str(path), sleeper.fall_asleep, sleeper.wake).run()
        assert len(caplog.records) == 1
    assert sleeper.events == []


async def test_a_logind_that_hangs_stops_neither_the_loop_nor_the_daemon(
    bus: Path, logind: Logind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sleep_lock, "ANSWER_SECONDS", 0.1)
    logind.hangs = True
    sleeper = Sleeper()
    ticks = 0
    async with locking(bus, sleeper):
        while not caplog.records:
            ticks += 1
            await trio.sleep(0.005)
    assert ticks > 3
    assert "does not answer in time" in caplog.text
