"""Seconds since the last input, asked over D-Bus: of GNOME, of KDE, of logind.

GNOME and KDE count milliseconds, on the session bus of the user who runs this program. logind is
asked on the system bus, for local graphical sessions: the desktop reports to it when its session
becomes idle and when it is active again. Nothing more is known there: a session that is not idle
counts as having had input just now. Imported on Linux only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from swarm_client.machine.dbus import (
    LOGIND,
    PROPERTIES_INTERFACE,
    Bus,
    BusError,
    BusObject,
    BusRefusal,
    session_bus,
    system_bus,
)
from swarm_shared.base.clock import Clock, monotonic

ANSWER_SECONDS: Final = 0.5
"""Timeout of one probe's queries together. A bus answers within some milliseconds; one that hangs
delays a tick of the governor by this, and is asked again after `idle.REST_SECONDS`."""
SESSIONS_SECONDS: Final = 10.0
"""Seconds between two searches for sessions at the display."""

SESSION_INTERFACE: Final = "org.freedesktop.login1.Session"

MUTTER: Final = BusObject(
    "org.gnome.Mutter.IdleMonitor",
    "/org/gnome/Mutter/IdleMonitor/Core",
    "org.gnome.Mutter.IdleMonitor",
)
SCREEN_LOCKER: Final = BusObject(
    "org.kde.screensaver", "/org/freedesktop/ScreenSaver", "org.freedesktop.ScreenSaver"
)
"""KDE's implementation of org.freedesktop.ScreenSaver, under the name that only KDE's has
(kscreenlocker, interface.cpp): others of that interface count seconds (Lomiri's, Razor-qt's) or
always answer 0."""

log = logging.getLogger(__name__)


class BusIdle:
    """A source of the idle time on a bus. The first time that it does not answer is logged, until
    it answers again."""

    name: str

    def __init__(self, bus: Bus, clock: Clock = monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._is_absent = False
        self._deadline = 0.0

    def idle_seconds(self) -> float | None:
        """Return the seconds since the last input; None if the source has no answer."""
        self._deadline = self._clock() + ANSWER_SECONDS
        try:
            seconds = self._ask()
        except BusError as error:
            if not self._is_absent:
                log.info("%s is no source for whether this machine is in use: %s", self.name, error)
            self._is_absent = True
            return None
        self._is_absent = False
        return seconds

    def _ask(self) -> float | None:
        """The seconds; None where the service knows none. BusError when it does not answer."""
        raise NotImplementedError

    def _call(
        self, target: BusObject, member: str, signature: str = "", *arguments: object, answer: str
    ) -> tuple[Any, ...]:
        seconds_left = self._deadline - self._clock()
        return self._bus.call(
            target, member, signature, *arguments, answer=answer, seconds=seconds_left
        )


class MutterIdle(BusIdle):
    """GNOME's window manager, under Wayland and X11 (mutter, meta-idle-manager.c)."""

    name = "GNOME"

    def _ask(self) -> float | None:
        (milliseconds,) = self._call(MUTTER, "GetIdletime", answer="t")
        return int(milliseconds) / 1000


class KdeIdle(BusIdle):
    """KDE's screen locker, which returns KIdleTime::idleTime(), in milliseconds.

    Under Wayland it runs inside KWin, whose KIdleTime always answers 0 (kwin,
    plugins/idletime/poller.cpp, forcePollRequest): 0 is no answer. A true 0 lasts for a millisecond
    after an input, and then the next source is asked.
    """

    name = "KDE"

    def _ask(self) -> float | None:
        (milliseconds,) = self._call(SCREEN_LOCKER, "GetSessionIdleTime", answer="u")
        return int(milliseconds) / 1000 if milliseconds else None


class LogindIdle(BusIdle):
    """systemd's login manager."""

    name = "logind"

    def __init__(self, bus: Bus, clock: Clock = monotonic) -> None:
        super().__init__(bus, clock)
        self._sessions: list[BusObject] = []
        self._looked_at = -SESSIONS_SECONDS

    def _ask(self) -> float | None:
        if self._clock() - self._looked_at >= SESSIONS_SECONDS:
            (listed,) = self._call(LOGIND, "ListSessions", answer="a(susso)")
            self._looked_at = self._clock()
            self._sessions = [
                BusObject(LOGIND.service, path, PROPERTIES_INTERFACE) for *_, path in listed
            ]
        per_session = [self._idle_of(session) for session in self._sessions]
        return min((seconds for seconds in per_session if seconds is not None), default=None)

    def _idle_of(self, session: BusObject) -> float | None:
        try:
            (shown,) = self._call(session, "GetAll", "s", SESSION_INTERFACE, answer="a{sv}")
        except BusRefusal:
            return None  # it has ended since the search
        values = {name: value for name, (_, value) in shown.items()}
        graphical = values.get("Type") in ("x11", "wayland", "mir")
        if not graphical or values.get("Remote") or values.get("Class") != "user":
            return None
        if not values.get("IdleHint"):
            return 0.0
        since = values.get("IdleSinceHintMonotonic")
        return max(0.0, self._clock() - since / 1e6) if since else None


def probes_on_buses(environment: Mapping[str, str]) -> list[BusIdle]:
    """The sources to ask, the most precise one first. A service of the whole machine has no session
    bus, so that logind alone is left."""
    probes: list[BusIdle] = []
    session, system = session_bus(environment), system_bus(environment)
    if session is None:
        log.info("there is no session bus: GNOME and KDE are not asked")
    else:
        bus = Bus(session)
        probes += [MutterIdle(bus), KdeIdle(bus)]
    if system is not None:
        probes.append(LogindIdle(Bus(system)))
    return probes
