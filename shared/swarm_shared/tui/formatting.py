"""Numbers, times of day and peers as a view shows them.

Sizes, rates and durations are in `swarm_shared.base.text`.
"""

from __future__ import annotations

import math
import time

from swarm_shared.base.text import MISSING, printable


def number(value: float | None, digits: int = 0) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}"


def short_number(value: float | None) -> str:
    """Format in at most six characters: 999, 1.2 k, 3.4 M."""
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


def clock_text(unix_seconds: float) -> str:
    """Format the local time of day; the caller adds the date where it matters."""
    return time.strftime("%H:%M:%S", time.localtime(unix_seconds))


def counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def peer_text(peer: str, name: str | None) -> str:
    """Return the name the peer chose, or the end of its ID, by which commands accept it."""
    return printable(name) if name else f"…{peer[-8:]}"
