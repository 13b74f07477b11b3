"""A goodbye before the machine sleeps: logind's delay lock (trio; decision 0052).

While the lock is held, logind announces a sleep (a closed lid, too) and waits for the lock's end,
at most for its InhibitDelayMaxSec. Without logind nothing happens. Imported on Linux only.

Source: "Inhibitor Locks" of systemd's documentation; org.freedesktop.login1(5).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from swarm_client.machine.dbus import (
    LOGIND,
    PROPERTIES_INTERFACE,
    BusConnection,
    BusError,
    BusObject,
    Signal,
    take_descriptor,
)

ANSWER_SECONDS: Final = 1.0
"""Timeout of one query; a bus answers within some milliseconds."""
RETRY_SECONDS: Final = 60.0
"""Seconds until logind is looked for again. Where there is no bus, that is one system call."""
READ_INTERVAL_SECONDS: Final = 0.1
"""Seconds between two readings of signals: every user of the machine may send some, without end."""
GOODBYE_SHARE: Final = 0.6
"""Part of logind's delay in which the coordinator may agree to the goodbye: 3 s of 5. The rest is
for closing the sessions, at most 1 s, and for a machine whose cores are busy."""

PROPERTIES: Final = BusObject(LOGIND.service, LOGIND.path, PROPERTIES_INTERFACE)
BUS: Final = BusObject("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")

log = logging.getLogger(__name__)


class SleepLock:
    """Run `run` beside what sleeps. `fall_asleep` is given the seconds that it may take."""

    def __init__(
        self, bus: str, fall_asleep: Callable[[float], Awaitable[None]], wake: Callable[[], None]
    ) -> None:
        self._bus = bus
        self._fall_asleep = fall_asleep
        self._wake = wake
        self._asleep = False
        self._lock: int | None = None
        self._logind = ""
        """logind's own name on the bus: anyone may send a signal of the same name."""
        self._delay_seconds = 0.0
        self._is_absent = False

    async def run(self) -> None:
        while True:
            try:
                await self._hold()
            except BusError as error:
                if not self._is_absent:
                    log.info("a sleep of this machine will not be announced: %s", error)
                self._is_absent = True
            finally:
                self._release()
                self._end_sleep()
            await trio.sleep(RETRY_SECONDS)

    async def _hold(self) -> None:
        """Hold the lock and answer logind's signals. BusError when the bus or logind is gone."""
        connection = await trio.to_thread.run_sync(self._connect)
        try:
            self._is_absent = False
            while True:
                for signal in connection.signals():
                    await self._act_on(signal, connection)
                await trio.sleep(READ_INTERVAL_SECONDS)
                await trio.lowlevel.wait_readable(connection.fileno())
        finally:
            connection.close()

    def _connect(self) -> BusConnection:
        connection = BusConnection(self._bus, seconds=ANSWER_SECONDS)
        try:
            connection.subscribe(LOGIND, "PrepareForSleep", seconds=ANSWER_SECONDS)
            connection.subscribe(BUS, "NameOwnerChanged", seconds=ANSWER_SECONDS)
            (self._logind,) = connection.call(
                BUS, "GetNameOwner", "s", LOGIND.service, answer="s", seconds=ANSWER_SECONDS
            )
            ((kind, microseconds),) = connection.call(
                PROPERTIES, "Get", "ss", LOGIND.interface, "InhibitDelayMaxUSec",
                answer="v", seconds=ANSWER_SECONDS,
            )  # fmt: skip
            if kind != "t":
                raise BusError(f"logind's InhibitDelayMaxUSec is of kind {kind!r} instead of 't'")
            self._delay_seconds = microseconds / 1e6
            self._take(connection)
        except BusError:
            connection.close()
            raise
        return connection

    def _take(self, connection: BusConnection) -> None:
        (received,) = connection.call(
            LOGIND, "Inhibit", "ssss", "sleep", "swarmtrain",
            "Hands its work over to other volunteers", "delay",
            answer="h", seconds=ANSWER_SECONDS,
        )  # fmt: skip
        self._lock = take_descriptor(received)

    def _release(self) -> None:
        """Close the descriptor: the machine may sleep."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _act_on(self, signal: Signal, connection: BusConnection) -> None:
        if signal.sender == BUS.service and signal.values[:1] == (LOGIND.service,):
            raise BusError("logind has ended")
        if signal.sender != self._logind or signal.member != "PrepareForSleep":
            return
        if signal.values == (True,):
            self._asleep = True
            try:
                await self._fall_asleep(self._delay_seconds * GOODBYE_SHARE)
            finally:
                self._release()
        else:
            self._end_sleep()
            if self._lock is None:
                await trio.to_thread.run_sync(self._take, connection)

    def _end_sleep(self) -> None:
        if self._asleep:
            self._asleep = False
            self._wake()
