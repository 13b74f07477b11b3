"""Writes the status file and the store's table of links while the coordinator runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import trio

from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.server.admission_service import AdmissionService
from swarm_coordinator.server.control_protocol import ControlServer
from swarm_coordinator.server.link_reports import LinkReports
from swarm_coordinator.server.sessions import ClientSessions
from swarm_coordinator.server.startup import CoordinatorContext
from swarm_coordinator.status.document import DashboardStatus
from swarm_coordinator.status.status_file import write_status
from swarm_coordinator.storage.records import LinksReported, RowsPruned
from swarm_shared.base.clock import wall
from swarm_shared.base.errors import StorageError

STATUS_SECONDS = 1.0
"""Seconds between two writes of the status file in a small run."""
STATUS_PAUSE_FACTOR = 30.0
"""Pause after writing the status, as a multiple of its CPU time: a few percent of a core."""
LINKS_SECONDS = 10.0
"""Seconds between two writes of the link table, which has up to n² rows and need not be current to
the second."""
COMMIT_SECONDS = 0.25
"""Seconds between two commits of some links."""
PRUNE_SECONDS = 60.0
"""Seconds between two deletions of what is beyond the limits of rows."""


@dataclass(frozen=True, slots=True)
class StatusWriter:
    """Writes the status from the parts of the coordinator, and the reported links to the store."""

    context: CoordinatorContext
    state: RunState
    addresses: tuple[str, ...]
    reports: LinkReports
    admission_service: AdmissionService
    sessions: ClientSessions
    control: ControlServer

    async def write_status(self, *, running: bool = True) -> float:
        """Write the status file. Returns the CPU seconds that this took."""
        context, pages = self.context, self.context.dashboard_process
        evaluator = context.evaluator_process
        try:
            return await write_status(
                context.folder.status,
                self.state,
                context.clock(),
                self.reports.links(),
                self.reports.paths(self.state.peers),
                running=running,
                pid=os.getpid(),
                time=wall(),
                addresses=self.addresses,
                admission=self.admission_service.status(),
                sessions=len(self.sessions),
                sessions_ended=dict(self.control.ended),
                http=DashboardStatus() if pages is None else pages.status(),
                evaluation=None
                if evaluator is None
                else evaluator.shown(self.state.history.version),
            )
        except StorageError:
            return 0.0  # a full disk must not stop a run that can still train; the file gets old

    async def write_status_repeatedly(self) -> None:
        """Write the status file every few seconds until cancelled."""
        while True:
            # Ten thousand volunteers take a third of a second to describe.
            took = await self.write_status()
            await trio.sleep(max(STATUS_SECONDS, STATUS_PAUSE_FACTOR * took))

    async def write_links_repeatedly(self) -> None:
        """Write links a few at a time: the writer's thread needs the interpreter lock, and ten
        thousand reporters at once would delay all tasks for a second."""
        while True:
            await trio.sleep(LINKS_SECONDS)
            for links in self.reports.unsaved_links():
                self.context.store.post(LinksReported(links))
                await trio.sleep(COMMIT_SECONDS)

    async def prune_rows_repeatedly(self) -> None:
        """Delete rows beyond the limits every PRUNE_SECONDS until cancelled."""
        while True:
            self.context.store.post(RowsPruned())
            await trio.sleep(PRUNE_SECONDS)

    def save_links(self) -> None:
        """Write all links at once, at the end of the run."""
        for links in self.reports.unsaved_links():
            self.context.store.post(LinksReported(links))
