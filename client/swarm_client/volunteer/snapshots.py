"""Stage snapshots: written, served and fetched.

A joining peer's stage comes from replicas (bitwise equal, so any of them can serve any chunk) or
from the coordinator's checkpoint; this peer serves snapshots that it was asked to write. Every file
is verified against a hash from the coordinator or the signed manifest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.machine.home import Home, snapshot_item
from swarm_client.pipeline.held_stage import Holding
from swarm_client.volunteer.base_files import BaseFiles, is_base_file
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.protocol import AssignStage, SaveSnapshot, SnapshotReady

log = logging.getLogger(__name__)

KEPT_SNAPSHOTS = 2
"""Snapshots kept: the newest, which joining peers and checkpoints fetch, and one older that may
still be in the middle of a fetch."""


class SnapshotStore:
    """The stage snapshots in this volunteer's folder, and the catalogue of those that are
    served."""

    def __init__(self, home: Home, run: RunId, claim_disk: Callable[[int], None]) -> None:
        """`claim_disk` raises StorageError when so many bytes more may not be written."""
        self._folder = home.state_folder(run)
        self._claim_disk = claim_disk
        self.bases = BaseFiles(self._folder)
        self._served: dict[str, Path] = {}

    def clear(self) -> None:
        """Delete the snapshots of an earlier process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.safetensors*"):
            if not is_base_file(path):
                path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Drop all snapshots for a new assignment: after a roll-back the same version number can
        mean another state."""
        while self._served:
            _, path = self._served.popitem()
            path.unlink(missing_ok=True)

    def find(self, item: str, _remote: PeerId) -> Path | None:
        """Return the file of a snapshot by the name of its transfer; None if it is not served."""
        return self._served.get(item)

    async def save(self, holding: Holding, request: SaveSnapshot) -> SnapshotReady:
        """Write the state at the requested version and serve it. SwarmError when that fails."""
        item = snapshot_item(request.version, request.stage)
        if holding.stage != request.stage or holding.version != request.version:
            raise StorageError(f"this peer is at version {holding.version} now")
        path = self._folder / f"{request.version:08d}-{request.stage}.safetensors"
        if item not in self._served:
            self._keep(KEPT_SNAPSHOTS - 1)
            self._claim_disk(holding.worker.state_bytes)
            await holding.worker.save_state(path, request.version)
        digest, size = await trio.to_thread.run_sync(_hash_file, path)
        faults.inject_outage(FaultPoint.CHECKPOINT, request.version)
        faults.corrupt_file(FaultPoint.CHECKPOINT, request.version, path)
        self._served[item] = path
        return SnapshotReady(
            version=request.version, stage=request.stage, item=item, bytes=size, sha256=digest
        )

    def _keep(self, count: int) -> None:
        """Delete the oldest snapshots until there are no more than `count`."""
        while len(self._served) > count:
            oldest = next(iter(self._served))
            self._served.pop(oldest).unlink(missing_ok=True)

    def fetched_path(self, assignment: AssignStage) -> Path:
        """Return the path to which an assigned snapshot is downloaded."""
        return self._folder / f"fetched-{assignment.version:08d}-{assignment.stage}.safetensors"


def _hash_file(path: Path) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
