"""Bars and sparklines: one line of text for one value, or for several values in a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm_shared.tui.styled_text import Line, Role, Span

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def bar(share: float | None, width: int, role: Role = "accent") -> Line:
    """Draw a share of 0 to 1 as a bar; empty when it is not known."""
    known = share is not None and math.isfinite(share)
    kept = min(1.0, max(0.0, share)) if known and share is not None else 0.0
    eighths = round(kept * width * 8)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return (Span(text, role), Span("░" * (width - len(text)), "dim"))


def gauge_role(share: float | None, warn: float = 0.9, bad: float = 1.0) -> Role:
    """Return the role of a gauge of used capacity."""
    if share is None:
        return "dim"
    return "bad" if share >= bad else "warn" if share >= warn else "good"


def sparkline(values: Sequence[float | None], width: int, *, from_zero: bool = True) -> str:
    """Draw the newest values, one a cell, the newest at the right. None leaves its cell blank."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None and math.isfinite(value)]
    if not known:
        return " " * width
    low = 0.0 if from_zero else min(known)
    high = max(known)
    cells = [
        " "
        if value is None or not math.isfinite(value)
        else _LEVELS[place(value, low, high, len(_LEVELS))]
        for value in shown
    ]
    return "".join(cells).rjust(width)


def place(value: float, low: float, high: float, count: int) -> int:
    """Return the nearest of `count` even steps from `low` to `high`; values outside are clamped."""
    # Halves, because the whole of two opposite numbers may be too large for a float.
    span = high / 2 - low / 2
    if span <= 0:
        return 0
    share = min(1.0, max(0.0, (value / 2 - low / 2) / span))
    return int(share * (count - 1) + 0.5)
