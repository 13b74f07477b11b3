"""Seconds since the last input at this machine: X11 and macOS for its display; terminals.

What is asked over D-Bus is `swarm_client.governor.probes.bus_idle`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm_client.governor.probes.x11 import X11Idle
from swarm_shared.base.clock import Clock, monotonic

COMMAND_SECONDS = 1.0
"""Timeout of a command."""
REST_SECONDS = 10.0
"""Seconds between two queries of a probe that has no answer: a desktop may start later."""

TERMINALS = ((Path("/dev/pts"), re.compile(r"\d+")), (Path("/dev"), re.compile(r"ttys?\d+")))
"""Terminals of ssh, of windows with a shell, of consoles; the last are called ttys000 on macOS."""
GRAIN_SECONDS = 8 if sys.platform == "linux" else 0
"""Resolution of a terminal's access time. Linux updates it only when the clock enters another eight
seconds (drivers/tty/tty_io.c, tty_update_time), so that passwords cannot be timed."""
GRAIN_LATE_SECONDS = 0.1
"""Seconds by which the next eight may begin late: the kernel counts seconds at the clock's
ticks."""

Run = Callable[[Sequence[str]], str | None]


class IdleProbe(Protocol):
    """Seconds since the last input of a user at this machine."""

    def idle_seconds(self) -> float | None: ...


def run_command(words: Sequence[str]) -> str | None:
    """The command's output; None when it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=COMMAND_SECONDS, check=True, text=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


@dataclass(frozen=True, slots=True)
class TerminalIdle:
    """Time of the last key in any terminal, from the access times of the terminal devices.

    With a resolution of several seconds, the last key may have been at any moment up to the end of
    the interval; that moment counts. So a user who counts as idle is past the interval, and the
    next key is seen at once.
    """

    places: Sequence[tuple[Path, re.Pattern[str]]] = TERMINALS
    wall: Clock = time.time
    grain_seconds: int = GRAIN_SECONDS

    def idle_seconds(self) -> float | None:
        newest = max((read_at for place in self.places for read_at in _read_at(*place)), default=0)
        if newest <= 0:
            return None
        if self.grain_seconds:
            newest = (newest // self.grain_seconds + 1) * self.grain_seconds
            newest += GRAIN_LATE_SECONDS
        return max(0.0, self.wall() - newest)


def _read_at(folder: Path, names: re.Pattern[str]) -> Iterator[float]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if names.fullmatch(entry.name):
            with contextlib.suppress(OSError):
                yield entry.stat().st_atime


class MacIdle:
    """Nanoseconds since the last event of any keyboard, mouse or trackpad, from macOS."""

    def __init__(self, run: Run = run_command) -> None:
        self._run = run

    def idle_seconds(self) -> float | None:
        shown = self._run(["ioreg", "-c", "IOHIDSystem", "-d", "4"]) or ""
        times = re.findall(r'"HIDIdleTime"\s*=\s*(\d+)', shown)
        return min((int(text) / 1e9 for text in times), default=None)


class FirstAvailable:
    """The first of several probes for the same value that has one; a probe without is asked again
    later."""

    def __init__(self, probes: Sequence[IdleProbe], clock: Clock = monotonic) -> None:
        self._probes = list(probes)
        self._clock = clock
        self._rest_until = [0.0] * len(self._probes)

    def idle_seconds(self) -> float | None:
        now = self._clock()
        for index, probe in enumerate(self._probes):
            if self._rest_until[index] > now:
                continue
            seconds = probe.idle_seconds()
            if seconds is not None:
                return seconds
            self._rest_until[index] = now + REST_SECONDS
        return None


def display_idle() -> IdleProbe:
    """The probe for this system's display; one that returns None where there is no display."""
    probes: list[IdleProbe] = []
    if sys.platform == "darwin":
        probes.append(MacIdle())
    elif "WAYLAND_DISPLAY" not in os.environ:
        # Under Wayland, X11 receives only what goes to its own windows.
        probes.append(X11Idle(os.environ))
    if sys.platform == "linux":
        from swarm_client.governor.probes.bus_idle import probes_on_buses

        probes.extend(probes_on_buses(os.environ))
    return FirstAvailable(probes)
