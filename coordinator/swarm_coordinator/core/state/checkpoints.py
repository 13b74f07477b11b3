"""Saved states of stages: checkpoints in the organiser's folder, and snapshots at holders.

Values only; the rules are in `swarm_coordinator.core.rules.checkpoints` and `state_transfer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_coordinator.core.events import CheckpointRecord, SessionNumber
from swarm_shared.base.types import PeerId, StageIndex, Step, Version


class SnapshotFile(NamedTuple):
    """A stage's state as a file that a holder serves."""

    item: str
    bytes: int
    sha256: str


@dataclass(slots=True)
class StageSnapshots:
    """The snapshots of one stage and version: the peers that were asked to save one, and the files
    that they announced."""

    stage: StageIndex
    version: Version
    asked_at: float
    asked: dict[PeerId, SessionNumber] = field(default_factory=dict)
    """The session in which each holder was asked; a request is lost with its session."""
    owners: dict[PeerId, PeerId] = field(default_factory=dict)
    """The owner of each holder that was asked."""
    ready: dict[PeerId, SnapshotFile] = field(default_factory=dict)
    first_at: float = math.inf
    """When the first snapshot was ready."""


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint in progress."""

    version: Version
    asked_at: float
    stages: dict[StageIndex, StageSnapshots] = field(default_factory=dict)
    fetched: dict[StageIndex, str] = field(default_factory=dict)
    """stage → sha256 of the snapshot that the shell fetches."""


@dataclass(frozen=True, slots=True)
class CheckpointFailures:
    """Failures to store the checkpoint of one version."""

    version: Version
    times: int
    retry_at: float
    """Time of the next try."""


@dataclass(slots=True)
class CheckpointState:
    """The newest checkpoint, the one in progress, and the snapshots for joining peers."""

    stored: CheckpointRecord | None
    overdue: bool
    """Whether the store had no checkpoint at the start, or one older than the manifest allows."""
    pending: PendingCheckpoint | None = None
    failed: CheckpointFailures | None = None
    """The failures of the version whose checkpoint failed last."""
    snapshots: dict[StageIndex, StageSnapshots] = field(default_factory=dict)
    keep: int = 1
    """Number of newest checkpoints that the organiser's folder keeps."""
    older: tuple[CheckpointRecord, ...] = ()
    """The kept checkpoints before the newest one that this start of the coordinator has stored, the
    oldest first."""

    def store(self, record: CheckpointRecord) -> None:
        """Record a stored checkpoint; the folder deletes the oldest ones."""
        previous = self.older if self.stored is None else (*self.older, self.stored)
        older = tuple(checkpoint for checkpoint in previous if checkpoint.version < record.version)
        self.older = older[-(self.keep - 1) :] if self.keep > 1 else ()
        self.stored, self.overdue = record, False

    def before(self, step: Step, earliest: Version) -> CheckpointRecord | None:
        """The newest kept checkpoint before a step; the oldest kept one if all are later. None if
        none is kept; checkpoints of versions before `earliest` do not count."""
        kept = [*self.older, self.stored] if self.stored is not None else []
        allowed = [record for record in kept if record.version >= earliest]
        earlier = [record for record in allowed if record.version < step]
        return earlier[-1] if earlier else next(iter(allowed), None)

    def return_to(self, record: CheckpointRecord) -> None:
        """Make a kept checkpoint the newest one."""
        self.older = tuple(older for older in self.older if older.version < record.version)
        self.stored = record

    @property
    def stored_version(self) -> Version:
        """The version to which the run can return: the newest checkpoint's; 0, the initialisation,
        without one."""
        return self.stored.version if self.stored is not None else Version(0)

    def failures_of(self, version: Version) -> int:
        """Number of failures to store the checkpoint of a version."""
        failed = self.failed
        return failed.times if failed is not None and failed.version == version else 0

    def roll_back(self) -> None:
        """Discard what belongs to the history that is abandoned."""
        self.snapshots.clear()
        self.pending, self.overdue, self.failed = None, False, None
