"""The run folder as a source: read again when its status has changed, at a bounded cost.

A large run's status takes a while to read, so the view rests `REST_FACTOR` times as long as the
processor was busy with it: that keeps it at about 2 % of a core, and a small run at one read a
second. Reading happens in a thread, and so do its imports: the screen is there before them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_coordinator.status.document import (
    AppliedStepRow,
    ContributorRow,
    NoteRow,
    RunDocument,
    current_health,
)
from swarm_shared.base.clock import monotonic, wall
from swarm_shared.base.errors import StorageError, SwarmError
from swarm_shared.credit.contributions import ContributionSums
from swarm_shared.tui.recording import Sleep
from swarm_shared.tui.source import DocumentReceived, Event, SourceLost

if TYPE_CHECKING:
    from swarm_coordinator.run_dir.folder import RunFolder
    from swarm_coordinator.storage.connection import Connection

LOOK_SECONDS = 1.0
REST_FACTOR = 50.0
LONGEST_REST_SECONDS = 15.0
HISTORY_SECONDS = 5.0
"""Interval of reading the history; notes are also written between steps."""
CONTRIBUTORS_SECONDS = 30.0
"""Interval of summing the contributors over the whole run, which takes a while in a long one."""
MOST_STEPS = 2000
MOST_NOTES = 500


@dataclass(slots=True)
class RunFolderReader:
    """Reads a run folder; blocking. Keeps what need not be read again."""

    run_dir: Path
    _steps: tuple[AppliedStepRow, ...] = ()
    _notes: tuple[NoteRow, ...] = ()
    _contributors: tuple[ContributorRow, ...] = ()
    _read_for: tuple[int, int] | None = None
    _history_due: float = 0.0
    _contributors_due: float = 0.0
    _trouble: str = ""

    def prepare(self) -> None:
        """Import the reading modules, so that their time does not count as reading."""
        import psutil  # noqa: F401

        from swarm_coordinator.durability import run_files  # noqa: F401

    def read(self) -> tuple[RunDocument, str, float]:
        """Return the run now, what could not be read of it, and the processor seconds this took.

        SwarmError when nothing could be read.
        """
        start = time.thread_time()
        document, trouble = self._read()
        return document, trouble, time.thread_time() - start

    def _read(self) -> tuple[RunDocument, str]:
        import psutil

        from swarm_coordinator.durability.run_files import load_manifest
        from swarm_coordinator.run_dir.folder import RunFolder
        from swarm_coordinator.status.status_file import read_status

        folder = RunFolder.open(self.run_dir)
        status = read_status(folder.status)
        if status is None:
            return RunDocument(run=load_manifest(folder).name, phase="never started"), ""
        # The folder's lock would tell for certain, but taking it could make a coordinator that
        # starts at that moment believe that another one runs.
        running = status.running and psutil.pid_exists(status.pid)
        document = status.model_copy(update={"running": running})
        self._read_history(folder, (document.generation, document.version))
        return RunDocument.model_construct(
            **dict(document), history=self._steps, notes=self._notes,
            contributors=self._contributors,
        ), self._trouble  # fmt: skip

    def _read_history(self, folder: RunFolder, moment: tuple[int, int]) -> None:
        """Read what is available in the database; a failure is shown and does not end the view."""
        from swarm_coordinator.durability.run_files import read_database
        from swarm_coordinator.storage.history import read_recent

        now = monotonic()
        if moment == self._read_for and now < self._history_due:
            return
        self._read_for, self._history_due = moment, now + HISTORY_SECONDS
        try:
            recent = read_database(folder, lambda c: read_recent(c, MOST_STEPS, MOST_NOTES))
            if recent is None:
                return
            self._steps, self._notes = recent
            if now >= self._contributors_due:
                self._contributors = read_database(folder, contributors) or ()
                took = monotonic() - now
                self._contributors_due = now + max(CONTRIBUTORS_SECONDS, REST_FACTOR * took)
            self._trouble = ""
        except SwarmError as error:
            self._trouble = str(error)


def contributors(connection: Connection) -> tuple[ContributorRow, ...]:
    """A row for each owner, with the stages of all its devices; the most tokens come first."""
    from swarm_coordinator.storage.admission_rows import read_owners
    from swarm_coordinator.storage.contributions import read_contributions

    owners = read_owners(connection)
    sums = ContributionSums()
    for row in read_contributions(connection):
        sums.add(row.peer, row.stage, row.microbatches, row.tokens)
        sums.describe(row.peer, row.name, None, owners.get(row.peer))
    found = (
        ContributorRow(
            peer=one.owner,
            name=one.name,
            devices=len(one.devices),
            stages=one.stages,
            microbatches=one.microbatches,
            tokens=one.tokens,
        )
        for one in sums.by_owner()
    )
    return tuple(sorted(found, key=lambda row: (-row.tokens, row.peer)))


Change = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""Changes the run as a command does, and returns the answer; blocking."""


class RunFolderSource:
    """Reads the folder for as long as the view is open."""

    def __init__(
        self,
        run_dir: Path,
        change: Change,
        reader: RunFolderReader | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._run_dir = run_dir
        self._change = change
        self._reader = reader or RunFolderReader(run_dir)
        self._sleep = sleep

    def now(self) -> float:
        return wall()

    async def act(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return await asyncio.to_thread(self._change, method, arguments)

    async def events(self) -> AsyncIterator[Event[RunDocument]]:
        await asyncio.to_thread(self._reader.prepare)
        while True:
            busy_seconds = 0.0
            try:
                document, trouble, busy_seconds = await asyncio.to_thread(self._reader.read)
            except StorageError as error:
                yield SourceLost(self.now(), str(error))
            else:
                if not trouble and not document.running and not document.finished:
                    trouble = self._not_running(document)
                yield DocumentReceived(document.time or self.now(), document, trouble)
            rest = min(REST_FACTOR * busy_seconds, LONGEST_REST_SECONDS)
            await self._sleep(max(LOOK_SECONDS, rest))

    def _not_running(self, document: RunDocument) -> str:
        from swarm_coordinator.run_dir.folder import quoted

        reason = current_health(document, document.time).sentence.removesuffix(".")
        return f"{reason}; `swarm-coordinator start {quoted(self._run_dir)}` starts it"
