"""The store of a run's durable records: its interface, and the thread that writes it.

Owns the writer thread and durability. `SqliteStore` keeps the database in the run folder;
`storage.postgresql_store` keeps it on a server. The tables are in `storage.schema`, the statements
in `storage.records`, reading for people in `storage.history`.

One thread owns the only writing connection, and with it every write and every WAL checkpoint:
SQLite libraries before 3.51.3 can lose a WAL when several connections write and checkpoint. The
run folder's lock excludes a second coordinator. Records that wait together are committed together
(group commit); `write` returns when its commit is on the disk (`synchronous=FULL`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import trio

from swarm_coordinator.core.events import Restored
from swarm_coordinator.storage.connection import Connection, DatabaseLocation, PostgresqlLocation
from swarm_coordinator.storage.database import postgresql_driver
from swarm_coordinator.storage.records import (
    Record,
    insert,
    insert_generation,
    read_held_time,
    read_restored,
)
from swarm_coordinator.storage.sqlite import open_for_writing, translate
from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import StorageError, SwarmError

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_MAX_GROUP_RECORDS = 256
"""Maximum number of records in one commit; such a commit takes about a millisecond."""

commit_hook: Callable[[str], None] | None = None
"""Hook for tests that kill the process during a commit. Called in the writer thread with `begin`,
`written`, `committed` and `answered`; never set in production."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Work for the writer thread, which answers it exactly once."""

    work: Callable[[Connection], Any]
    answer: Future[Any]


class Store(ABC):
    """The durable records of a run. May be constructed before the event loop runs. `write` is for
    decisions, `post` for everything else."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._generation = 0
        self._closed = False
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)

    def _start(self) -> Self:
        self._thread.start()
        self._opened.result()
        return self

    @property
    def leads(self) -> bool:
        """Whether this store has a generation; no other coordinator may write then."""
        return self._generation > 0

    def next_generation(self, above: int = 0) -> int:
        """Write and return the generation of this start: above all earlier ones and above
        `above`."""
        now = self._clock()
        self._generation = self.read(lambda connection: insert_generation(connection, now, above))
        return self._generation

    def restore(self) -> Restored:
        """Return the progress of the run, from which the pure core begins."""
        now = self._clock()
        return self.read(
            lambda connection: replace(
                read_restored(connection), held_time=read_held_time(connection, now)
            )
        )

    def read(self, read: Callable[[Connection], _T]) -> _T:
        """Read what the store has now, in the writer's thread."""
        return self._submit(read).result()

    async def write(self, record: Record) -> None:
        """Return when the record is durable; StorageError when it cannot be written."""
        await self._call_async(self._insertion(record))

    def post(self, record: Record) -> None:
        """Queue a record. It is lost if the process dies first; a failure is logged, not raised."""
        if self._closed:
            return

        def done(answer: Future[None]) -> None:
            error = answer.exception()
            if error is not None:
                log.error("a %s could not be stored: %s", type(record).__name__, error)

        self._submit(self._insertion(record)).add_done_callback(done)

    def close(self) -> None:
        """Write the queued records and close the database."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    @property
    def renew_seconds(self) -> float | None:
        """Seconds between calls of `renew_lease`; None where no other coordinator could lead."""
        return None

    async def renew_lease(self) -> None:  # noqa: B027 (SQLite has no lease)
        """Extend the lease. LeadershipError when another coordinator has taken over."""

    async def ensure_leadership(self) -> None:  # noqa: B027 (SQLite has no lease)
        """Return at once while the lease is valid; otherwise renew it first."""

    def _insertion(self, record: Record) -> Callable[[Connection], None]:
        generation, now = self._generation, self._clock()
        return lambda connection: insert(connection, record, generation, now)

    def _submit(self, work: Callable[[Connection], _T]) -> Future[_T]:
        if self._closed:
            raise StorageError(f"{self._name} is closed already")
        answer: Future[_T] = Future()
        self._jobs.put(_Job(work, answer))
        return answer

    async def _call_async(self, work: Callable[[Connection], _T]) -> _T:
        token = trio.lowlevel.current_trio_token()
        finished = trio.Event()

        def done(_: Future[_T]) -> None:
            # The event loop may have ended while the thread was writing.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(finished.set)

        answer = self._submit(work)
        answer.add_done_callback(done)
        await finished.wait()
        return answer.result()

    # ------------------------------------------------------------ the writer thread

    @abstractmethod
    def _open_database(self) -> Connection: ...

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _roll_back(self) -> None:
        """Undo the transaction, if one is open. Raises nothing."""

    @abstractmethod
    def _explain(self, error: Exception) -> SwarmError:
        """Return the database's error as one for the organiser."""

    @abstractmethod
    def _close_database(self) -> None: ...

    def _run(self) -> None:
        try:
            connection = self._open_database()
        except Exception as error:  # noqa: BLE001 (as in `_commit`)
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        try:
            while self._serve(connection):
                pass
        finally:
            self._close_database()

    def _serve(self, connection: Connection) -> bool:
        """Commit the queued jobs together. False when the store is to be closed."""
        jobs: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) == _MAX_GROUP_RECORDS or self._jobs.empty():
                break
            job = self._jobs.get()
        if jobs and not self._commit(connection, jobs) and len(jobs) > 1:
            # One bad record must not fail the others of its group: commit each by itself.
            for single in jobs:
                self._commit(connection, [single], final=True)
        return job is not None

    def _commit(self, connection: Connection, jobs: list[_Job], final: bool = False) -> bool:
        """Run one transaction. Its jobs are answered when it succeeded, or failed finally."""
        results: list[Any] = []
        try:
            _call_commit_hook("begin")
            self._begin()
            results = [job.work(connection) for job in jobs]
            _call_commit_hook("written")
            connection.execute("COMMIT")
            _call_commit_hook("committed")
        except Exception as error:  # noqa: BLE001 (a supervisor: each job has to be answered)
            self._roll_back()
            if final or len(jobs) == 1:
                reported = error
                if not isinstance(error, SwarmError):
                    reported = self._explain(error)
                    reported.__cause__ = error
                jobs[0].answer.set_exception(reported)
            return False
        for job, result in zip(jobs, results, strict=True):
            job.answer.set_result(result)
        _call_commit_hook("answered")
        return True


def _call_commit_hook(name: str) -> None:
    if commit_hook is not None:
        commit_hook(name)


class SqliteStore(Store):
    """The store in a run folder."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(str(path), clock)
        self._path = path

    @classmethod
    def open(cls, path: Path, clock: Clock = wall) -> SqliteStore:
        """Open the store at `path` and make missing tables; StorageError when it cannot be
        opened."""
        return cls(path, clock)._start()

    def _open_database(self) -> sqlite3.Connection:
        self._connection = open_for_writing(self._path)
        return self._connection

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _explain(self, error: Exception) -> SwarmError:
        return translate(self._path, error)

    def _close_database(self) -> None:
        self._connection.close()


def open_store(location: DatabaseLocation, clock: Clock = wall) -> Store:
    """Open the store at `location`; StorageError when it cannot be opened."""
    if isinstance(location, PostgresqlLocation):
        postgresql_driver()
        from swarm_coordinator.storage.postgresql_store import PostgresqlStore

        return PostgresqlStore.open(location, clock)
    return SqliteStore.open(location, clock)
