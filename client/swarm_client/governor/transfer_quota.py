"""Bytes transferred per day, stored on disk so that a quota survives a restart.

Written every half minute and at the end: a crash loses the counts of half a minute.
"""

from __future__ import annotations

import logging
from datetime import date
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt

from swarm_client.control.stored_file import read_document, write_document
from swarm_shared.base.clock import Clock, monotonic
from swarm_shared.base.errors import StorageError
from swarm_shared.base.frozen_model import FrozenModel

FILE_NAME = "transfer.json"
SAVE_SECONDS = 30.0
KEPT_DAYS = 400
"""Days kept; more than the longest quota period."""

log = logging.getLogger(__name__)


class _Stored(FrozenModel):
    version: Literal[1] = 1
    days: dict[date, NonNegativeInt] = Field(default_factory=dict)


class TransferCounts:
    """The counts of one home."""

    def __init__(self, folder: Path, clock: Clock = monotonic) -> None:
        self.path = folder / FILE_NAME
        self._clock = clock
        self.bytes_by_day = self._read()
        self._saved_at = clock()
        self._unsaved = False
        self._warned = False

    def add(self, day: date, size: int) -> None:
        """Add bytes that were transferred on a day; now and then the counts are saved."""
        if size > 0:
            self.bytes_by_day[day] = self.bytes_by_day.get(day, 0) + size
            self._unsaved = True
        if self._clock() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the counts. A full disk is reported once; counting continues."""
        self._saved_at = self._clock()
        if not self._unsaved:
            return
        self.bytes_by_day = dict(sorted(self.bytes_by_day.items())[-KEPT_DAYS:])
        try:
            write_document(self.path, _Stored(days=self.bytes_by_day))
        except StorageError as error:
            if not self._warned:
                log.warning("today's transfer count cannot be saved: %s", error)
            self._warned = True
            return
        self._unsaved = self._warned = False

    def _read(self) -> dict[date, int]:
        try:
            return dict(read_document(self.path, _Stored()).days)
        except StorageError as error:
            log.warning("%s; counting starts again from zero", error)
            return {}
