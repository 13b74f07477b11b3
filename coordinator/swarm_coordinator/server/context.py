"""What one start of the coordinator works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm_coordinator.admission.authority import RENEW_AFTER_SECONDS
from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.server.dashboard_process import DashboardProcess
from swarm_coordinator.storage.store import Store
from swarm_shared.base.clock import Clock, monotonic, wall
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.run.manifest import Manifest

Report = Callable[[str], None]
"""Takes one line for the organiser's eyes."""


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    folder: RunFolder
    settings: RunSettings
    manifest: Manifest
    identity: Identity
    store: Store
    report: Report
    port: int | None = None
    clock: Clock = monotonic
    wall_clock: Clock = wall
    renew_after_seconds: float = RENEW_AFTER_SECONDS
    verified: CheckpointRecord | None = None
    """The newest checkpoint, where it has been read and hashed already."""
    on_serving: Callable[[Invite], None] = field(default=lambda invite: None)
    dashboard_process: DashboardProcess | None = None
    """Keeps the process of the pages."""
