"""Once a second: reads what the coordinator wrote, makes a snapshot and publishes events.

The only task of the dashboard's process that reads files. Requests are answered from the newest
snapshot; when nothing can be read it grows old, which `/healthz` shows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from swarm_coordinator.dashboard.database_reader import DatabaseReader
from swarm_coordinator.dashboard.snapshot import Snapshot, joined_and_left
from swarm_coordinator.dashboard.sse import EventHub, encode_event
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status.status_file import read_status
from swarm_shared.base.clock import wall
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.manifest import Manifest

log = logging.getLogger(__name__)

READ_INTERVAL_SECONDS = 1.0
MAX_STEPS_PUBLISHED = 20
"""Steps published in one turn; more of them a second cannot be read."""


@dataclass(slots=True, eq=False)
class SnapshotLoop:
    """Keeps the newest snapshot; None until the coordinator has written its first status."""

    folder: RunFolder
    manifest: Manifest
    reader: DatabaseReader
    hub: EventHub = field(default_factory=EventHub)
    snapshot: Snapshot | None = None
    failures: int = 0
    """Turns that found something unreadable."""
    joined: int = 0
    left: int = 0

    async def run(self, first_read: anyio.Event) -> None:
        """Refresh the snapshot until cancelled. `first_read` is set after the first turn."""
        failing = False
        while True:
            try:
                await self.refresh()
                failing = False
            except (SwarmError, OSError, ValueError) as error:
                self.failures += 1
                if not failing:  # log once, not every second
                    log.warning("what the coordinator wrote cannot be read: %s", error)
                failing = True
            first_read.set()
            await anyio.sleep(READ_INTERVAL_SECONDS)

    async def refresh(self) -> None:
        now = wall()
        status = await anyio.to_thread.run_sync(read_status, self.folder.status)
        if status is None:
            return
        read = await anyio.to_thread.run_sync(self.reader.refresh, now)
        before = self.snapshot
        self.snapshot = snapshot = Snapshot(status, read, self.manifest, now)
        if before is not None:
            joined, left = joined_and_left(before.peers, snapshot.peers)
            self.joined += joined
            self.left += left
        self._publish(before, snapshot)

    def _publish(self, before: Snapshot | None, after: Snapshot) -> None:
        if not len(self.hub):
            return
        if before is None or before.run != after.run:
            self.hub.publish(encode_event("run", after.run))
            self.hub.publish(encode_event("stages", after.stages))
        if before is None or before.database.steps is not after.database.steps:
            return  # the first turn, or a rollback: readers fetch the steps anew
        first = max(before.database.step_count, after.database.step_count - MAX_STEPS_PUBLISHED)
        for index in range(first, after.database.step_count):
            self.hub.publish(encode_event("step", after.database.steps.row(index)))
        last = before.events[-1].id if before.events else 0
        for event in after.events:
            if event.id > last:
                self.hub.publish(encode_event("event", event))
