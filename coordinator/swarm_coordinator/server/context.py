"""The inputs of one start of the coordinator."""

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
"""Prints one line for the organiser."""


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    """The run's folder, settings and store, the clocks, and the callbacks of one start."""

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
    """The newest checkpoint if its files have been verified already."""
    on_serving: Callable[[Invite], None] = field(default=lambda invite: None)
    dashboard_process: DashboardProcess | None = None
    """None where no dashboard is configured."""
