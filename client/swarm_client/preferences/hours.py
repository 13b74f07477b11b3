"""Hours of the day at which something is allowed, with exceptions for days of the week.

Pure: the moment and the time zone are arguments. A window belongs to the day on which it begins:
"22:00-06:00" on a Friday ends on Saturday morning, whatever Saturday's own hours are. Times are
local wall-clock time, so a window may last an hour more or less when clocks change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Literal

Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
WEEKDAYS: tuple[Weekday, ...] = (
    "monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday",
)  # fmt: skip

MINUTES_A_DAY = 24 * 60
_FORM = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")
_LONGEST_GAP = timedelta(hours=3)
"""Longest jump of a clock that is put forward; by law nowhere more than two hours."""


@dataclass(frozen=True, slots=True)
class Window:
    """Minutes after midnight, [start, end); an end before the start is on the next day."""

    start: int
    end: int

    @property
    def crosses_midnight(self) -> bool:
        return self.end <= self.start and not self.is_empty

    @property
    def is_empty(self) -> bool:
        return self.start == self.end == 0


ALWAYS = Window(0, MINUTES_A_DAY)
NEVER = Window(0, 0)


def parse_window(text: str) -> Window:
    """ "always", "never" or "HH:MM-HH:MM". ValueError for anything else."""
    word = text.strip().lower()
    if word in ("always", "never"):
        return ALWAYS if word == "always" else NEVER
    match = _FORM.fullmatch(word)
    if match:
        hour, minute, to_hour, to_minute = map(int, match.groups())
        start, end = 60 * hour + minute, 60 * to_hour + to_minute
        in_range = minute < 60 and to_minute < 60 and start < MINUTES_A_DAY and end <= MINUTES_A_DAY
        if in_range and start != end:
            return Window(start, end)
    raise ValueError('must be "always", "never" or two times like "22:00-06:30"')


@dataclass(frozen=True, slots=True)
class Hours:
    """One window for each day of the week, Monday first."""

    days: tuple[Window, ...]

    @classmethod
    def of(cls, every_day: str, on: Mapping[str, str]) -> Hours:
        """`on` names days (as in WEEKDAYS) with other hours. ValueError as parse_window."""
        return cls(tuple(parse_window(on.get(day, every_day)) for day in WEEKDAYS))

    def contain(self, now: float, zone: tzinfo | None = None) -> bool:
        """Whether this moment (Unix seconds) is within the hours; `zone` None: this
        machine's zone."""
        local = datetime.fromtimestamp(now, zone)
        minute = 60 * local.hour + local.minute
        today = self.days[local.weekday()]
        yesterday = self.days[local.weekday() - 1]
        if yesterday.crosses_midnight and minute < yesterday.end:
            return True
        if today.crosses_midnight:
            return minute >= today.start
        return today.start <= minute < today.end

    def next_opening(self, now: float, zone: tzinfo | None = None) -> float | None:
        """The first moment after `now` within the hours; None when there is none."""
        midnight = datetime.fromtimestamp(now, zone).replace(
            hour=0, minute=0, second=0, microsecond=0, tzinfo=None, fold=0
        )
        openings: list[float] = []
        for ahead in range(9):
            day = midnight + timedelta(days=ahead)
            window = self.days[day.weekday()]
            if window.is_empty:
                continue
            start = day + timedelta(minutes=window.start)
            openings += self._moments(start, zone)
        later = [moment for moment in openings if moment > now and self.contain(moment, zone)]
        return min(later, default=None)

    def _moments(self, local: datetime, zone: tzinfo | None) -> list[float]:
        """The moments at which the clock shows that time: one, two where it is put back, or, where
        it is put forward over that time, the moment of the change."""
        first, second = (local.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
        shown = datetime.fromtimestamp(first, zone).replace(tzinfo=None, fold=0)
        if shown == local:
            return [first, second]
        minute = first - _LONGEST_GAP.total_seconds()
        while not self.contain(minute, zone) and minute < first:
            minute += 60.0
        return [minute]
