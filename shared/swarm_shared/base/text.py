"""Values as text: sizes, counts, rates and durations, and text from remotes made safe to print.

The only formatters of these in this project.

Bytes are counted in powers of ten on disks and networks and in powers of two in memory, as both
fields do. A value that is unknown (None) or not finite is shown as `MISSING`.
"""

from __future__ import annotations

import logging
import math
import re

MISSING = "-"
"""Text shown in place of an unknown value."""


def size_text(size_bytes: float | None) -> str:
    """Format a size on a disk or a network in decimal units: `1.21 GB`."""
    return _scaled(size_bytes, 1000.0, ("B", "kB", "MB", "GB", "TB", "PB"))


def parse_size(text: str) -> int:
    """Read a size in bytes from `5GB`, `1.5 TB` or `200 kB`, in decimal units as `size_text` writes
    them. ValueError if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)b\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no size like 5GB or 200MB")
    power = " kmgtp".index(match[2].lower() or " ")
    return round(float(match[1]) * 1000.0**power)


def memory_text(size_bytes: float | None) -> str:
    """Format a size in memory in binary units: `1.13 GiB`."""
    return _scaled(size_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def count_text(count: float | None) -> str:
    """Format a large count: `950`, `405 M`, `1.21 B`."""
    return _scaled(count, 1000.0, ("", "k", "M", "B", "T")).rstrip()


def rate_text(bytes_per_second: float | None) -> str:
    """Format a transfer rate: `12.5 MB/s`."""
    text = size_text(bytes_per_second)
    return text if text == MISSING else f"{text}/s"


def progress_text(done_bytes: int, total_bytes: int, bytes_per_second: float | None) -> str:
    """Format how far a transfer is: `1.2 GB of 3.4 GB (35 %), 12.5 MB/s, 2 min left`."""
    share = f" ({100 * done_bytes // total_bytes} %)" if total_bytes else ""
    parts = [f"{size_text(done_bytes)} of {size_text(total_bytes)}{share}"]
    if bytes_per_second is not None:
        parts.append(rate_text(bytes_per_second))
    if bytes_per_second:
        parts.append(f"{duration_text((total_bytes - done_bytes) / bytes_per_second)} left")
    return ", ".join(parts)


def _scaled(value: float | None, step: float, units: tuple[str, ...]) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    for unit in units[:-1]:
        # A value that would round up to the first one of the next unit is shown in that unit.
        if abs(value) < step * 0.9995:
            return f"{value:.0f} {unit}" if unit == units[0] else f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def duration_text(seconds: float | None) -> str:
    """Format a duration of seconds to days: `12 s`, `3 min`, `4:05 h`, `6 days`."""
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


def latency_text(seconds: float | None) -> str:
    """Format a duration of milliseconds to seconds: `0.61 ms`, `81.2 ms`, `1.25 s`."""
    if seconds is None:
        return MISSING
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def excerpt(text: str, characters: int) -> str:
    """Return the beginning of a text as one line of at most so many characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= characters else f"{line[: characters - 1]}…"


def printable(text: str, replacement: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Replace every control character, so that text from a remote cannot steer a terminal."""
    return "".join(c if c.isprintable() else replacement for c in text)


def printable_line(text: str) -> str:
    """Return text that may contain a remote's as one line without control characters."""
    return printable(" ".join(text.splitlines()))


class LogFormatter(logging.Formatter):
    """Formats records that may quote a remote, for files that people read in terminals.

    Without control characters, and with further lines of a record (as those of a traceback)
    indented, so that no text passes for a record of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines()
        return "\n    ".join(printable(line.expandtabs()) for line in lines)
