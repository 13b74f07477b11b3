"""Numbers as people read them, and words of strangers made harmless.

Bytes are counted in powers of ten on the network and of two in memory, as both fields do.
"""

from __future__ import annotations

import math
import time

from swarm_shared.base.text import printable
from swarm_shared.tui.terminal_style import Look

MISSING = "-"
"""What stands where a value is not known."""


def number(value: float | None, digits: int = 0) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}"


def short_number(value: float | None) -> str:
    """At most six characters: 999, 1.2 k, 3.4 M."""
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 1000:
        return f"{value:.0f}" if value == int(value) else f"{value:.3g}"
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.0f}"


def percent(share: float | None) -> str:
    return MISSING if share is None or not math.isfinite(share) else f"{share * 100:.0f} %"


def disk_text(size_bytes: float | None) -> str:
    """Decimal units, as disks and networks are sold."""
    return _scaled(size_bytes, 1000.0, ("B", "kB", "MB", "GB", "TB", "PB"))


def memory_text(size_bytes: float | None) -> str:
    return _scaled(size_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def rate_text(bytes_per_second: float | None) -> str:
    text = disk_text(bytes_per_second)
    return text if text == MISSING else f"{text}/s"


def _scaled(value: float | None, step: float, units: tuple[str, ...]) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    for unit in units[:-1]:
        # What would be rounded up to the next unit's first value is told in that unit.
        if abs(value) < step * 0.9995:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def duration(seconds: float | None) -> str:
    """Like 12 s, 3 min, 4:05 h, 6 days."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 2 * 86_400:
        return f"{whole // 3600}:{whole % 3600 // 60:02} h"
    return f"{whole // 86_400} days"


def milliseconds(seconds: float | None) -> str:
    """Like 0.61 ms, 81.2 ms, 1.25 s."""
    if seconds is None:
        return MISSING
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def clock_text(unix_seconds: float) -> str:
    """The local time of day; of another day the date too is the caller's to say."""
    return time.strftime("%H:%M:%S", time.localtime(unix_seconds))


def counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def peer_text(peer: str, name: str | None, look: Look) -> str:
    """The name that it gives itself, or the end of its ID, by which commands know it."""
    mark = "…" if look.unicode else ".."
    return printable(name) if name else f"{mark}{peer[-8:]}"
