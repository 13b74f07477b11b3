"""Bytes transferred per day, stored on disk so that a quota survives a restart.

Written every half minute and at the end: a crash loses the counts of half a minute.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.clock import Clock, monotonic
from swarm_shared.base.errors import StorageError

VERSION = 1
FILE_NAME = "transfer.json"
SAVE_SECONDS = 30.0
KEPT_DAYS = 400
"""Days kept; more than the longest quota period."""
MAX_FILE_BYTES = 2**20

log = logging.getLogger(__name__)


class TransferCounts:
    """The counts of one home."""

    def __init__(self, folder: Path, clock: Clock = monotonic) -> None:
        self.path = folder / FILE_NAME
        self._clock = clock
        self._days = self._read()
        self._saved_at = clock()
        self._unsaved = False
        self._warned = False

    @property
    def bytes_by_day(self) -> Mapping[int, int]:
        """By the day's proleptic ordinal."""
        return dict(self._days)

    def add(self, day: date, size: int) -> None:
        if size > 0:
            ordinal = day.toordinal()
            self._days[ordinal] = self._days.get(ordinal, 0) + size
            self._unsaved = True
        if self._clock() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the counts. A full disk is reported once; counting continues."""
        self._saved_at = self._clock()
        if not self._unsaved:
            return
        newest = sorted(self._days)[-KEPT_DAYS:]
        self._days = {day: self._days[day] for day in newest}
        days = {date.fromordinal(day).isoformat(): size for day, size in self._days.items()}
        content = json.dumps({"version": VERSION, "days": days}, indent=1).encode()
        try:
            write_atomically(self.path, content)
        except StorageError as error:
            if not self._warned:
                log.warning("today's transfer count cannot be saved: %s", error)
            self._warned = True
            return
        self._unsaved = self._warned = False

    def _read(self) -> dict[int, int]:
        try:
            with self.path.open("rb") as file:
                document = json.loads(file.read(MAX_FILE_BYTES))
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']}")
            days = {date.fromisoformat(day).toordinal(): n for day, n in document["days"].items()}
            if not all(type(size) is int and size >= 0 for size in days.values()):
                raise ValueError("an invalid count")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s); counting starts again from zero", self.path, error)
            return {}
        return days
