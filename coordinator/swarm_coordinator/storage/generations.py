"""From which number generations go on where the ones given before cannot be known.

A run's database counts its starts, and that number fences off words of earlier starts. Where the
database is lost, or is an older one that was restored, starts may have been counted that it knows
nothing of. Seconds since a fixed day are above all of them: a start takes longer than a second.
"""

from __future__ import annotations

_EPOCH_UNIX_SECONDS = 1_767_225_600
"""2026-01-01 00:00 UTC."""

LARGEST_GENERATION = 2**29 - 1
"""Numbers of attempts and leases are generation * 2**24 and must stay below 2**53; the seconds
reach it in 2043."""


def generation_floor(unix_seconds: float) -> int:
    """At that time no start of any run had a generation as high as this, unless it was restored."""
    return min(LARGEST_GENERATION, max(0, int(unix_seconds) - _EPOCH_UNIX_SECONDS))
