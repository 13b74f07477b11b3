"""Space on the disk: caches of runs other than the current one are removed first, the longest
unused first.

Only what can be fetched again is removed: training data, stage snapshots, and tensors of audits
that a crash has left. Keys, logs, settings and the transfer counts stay.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from swarm_client.governor.policy import GIB
from swarm_client.governor.probes.machine import DiskProbe, folder_bytes
from swarm_client.machine.home import Home
from swarm_client.preferences import Preferences, PreferenceSource
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import RunId

CACHES = ("data", "state", "audits")

log = logging.getLogger(__name__)


def missing_disk_bytes(
    preferences: Preferences, free: int | None, used: int | None, more: int = 0
) -> float:
    """Bytes missing for `more` bytes to be allowed; 0 or less: they may be written."""
    missing = 0.0
    if free is not None and preferences.disk_leave_free_gib:
        missing = preferences.disk_leave_free_gib * GIB - (free - more)
    if used is not None and preferences.disk_gib:
        missing = max(missing, used + more - preferences.disk_gib * GIB)
    return missing


def data_budget_bytes(preferences: Preferences) -> int:
    """Bytes of training data that may be kept: `data_gib`, and at most half of `disk_gib`, which
    stage states need as well."""
    half = preferences.disk_gib / 2 or preferences.data_gib
    return int(min(preferences.data_gib, half) * GIB)


class DiskAllowance:
    """The bytes that the preferences still allow to be written."""

    def __init__(self, disk: DiskProbe, source: PreferenceSource, home: Home, run: RunId) -> None:
        self._disk = disk
        self._source = source
        self._home = home
        self._run = run

    def claim(self, size_bytes: int) -> None:
        """Raise StorageError when `size_bytes` more would exceed what the preferences allow, after
        the caches of other runs are removed."""
        disk, preferences = self._disk, self._source.current.preferences
        disk.used.forget()
        missing = missing_disk_bytes(preferences, disk.free_bytes(), disk.used(), size_bytes)
        if missing > 0:
            missing -= make_room(self._home, self._run, missing)
        if missing > 0:
            raise StorageError(
                f"{size_bytes / GIB:.2f} GiB have to be written, {missing / GIB:.2f} GiB more "
                "than disk_gib and disk_leave_free_gib allow; free some space, or change one of "
                "them with `swarm-client config set`"
            )


def unused_caches(home: Home, current: RunId) -> list[Path]:
    """Folders of other runs that have caches, the longest unused first."""
    kept = home.run_folder(current).name
    by_last_use: list[tuple[float, Path]] = []
    for folder in (*home.path.glob("runs/*"), *home.path.glob("devices/*/runs/*")):
        if folder.name == kept or not folder.is_dir():
            continue
        caches = [folder / name for name in CACHES if (folder / name).is_dir()]
        if caches:
            by_last_use.append((max(cache.stat().st_mtime for cache in caches), folder))
    return [folder for _, folder in sorted(by_last_use)]


def make_room(home: Home, current: RunId, missing_bytes: float) -> int:
    """Remove caches until `missing_bytes` are freed or none is left; return the bytes freed."""
    freed = 0
    for folder in unused_caches(home, current):
        if freed >= missing_bytes:
            break
        for name in CACHES:
            cache = folder / name
            size = folder_bytes(cache)
            # A cache that another process holds open or that may not be removed is no reason to
            # fail.
            shutil.rmtree(cache, ignore_errors=True)
            freed += size - folder_bytes(cache)
        log.info("the caches of run %s were removed to make room", folder.name)
    return freed
