"""What the coordinator must never forget: its interface, and the thread that writes it.

Owns the writer thread, durability and what a restart begins from. `SqliteStore` is the store of a
run folder; the other one is in `postgresql_store`. The tables are in `schema`, rows in `records`,
reading for people in `history`.

One thread owns the only writing connection, and with it every write and every WAL checkpoint:
SQLite libraries before 3.51.3 can lose a WAL when several connections write and checkpoint; the
run folder's lock keeps a second coordinator away. Records that wait together are committed
together (group commit); a `write` returns when its commit is on the disk (`synchronous=FULL`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import trio

from swarm_coordinator.admission.book import AdmissionBook
from swarm_coordinator.core.events import CheckpointRecord, Restored
from swarm_coordinator.storage.admission_rows import read_admission, read_seen_since
from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.contributions import (
    StageContribution,
    read_contributions,
    read_teams,
)
from swarm_coordinator.storage.device_owner_rows import read_owners
from swarm_coordinator.storage.records import (
    Record,
    insert,
    insert_generation,
    read_checkpoints,
    read_restored,
)
from swarm_coordinator.storage.sqlite import open_for_writing, translate
from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import StorageError, SwarmError
from swarm_shared.base.types import PeerId

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_MAX_GROUP_RECORDS = 256
"""Records in one commit at most: a commit of so many still takes about a millisecond."""

commit_hook: Callable[[str], None] | None = None
"""For tests that kill the process at a commit's boundaries: told `begin`, `written`, `committed`
and `answered`, in the writer thread. Nothing in production sets it."""


class Store(Protocol):
    """Where a run's durable records go. `write` is for decisions, `post` for everything else."""

    def next_generation(self, above: int = 0) -> int:
        """A number that no earlier start of this run had, above the one given; durable."""

    def restore(self) -> Restored:
        """What the run knows: the pure core begins from it."""

    def checkpoints(self) -> list[CheckpointRecord]:
        """All that belong to the run's history, the newest first."""

    def admission(self) -> AdmissionBook:
        """Tokens, members, the allow-list and bans, as they were written."""

    def seen_since(self, unix_seconds: float) -> dict[PeerId, float]:
        """Peers that were let in at that time or later, and when they were last."""

    def teams(self) -> dict[PeerId, str]:
        """Of those that have named one."""

    def owners(self) -> dict[PeerId, PeerId]:
        """Of those devices that are bound to another key."""

    def contributions(self) -> tuple[StageContribution, ...]:
        """Of everybody, over all steps that belong to the run. Takes long in a long run."""

    async def write(self, record: Record) -> None:
        """Returns when the record is durable; StorageError when it cannot be made so."""

    def post(self, record: Record) -> None:
        """Write soon. Lost when the process dies first; a failure is logged, never raised."""

    def close(self) -> None:
        """Write what was posted and let go of the files."""

    @property
    def renew_seconds(self) -> float | None:
        """How often `renew_lease` is to be called; None where nobody else could lead."""

    async def renew_lease(self) -> None:
        """Go on leading. LeadershipError when another coordinator has taken over."""

    async def ensure_leadership(self) -> None:
        """Returns at once while this coordinator leads for sure; else it asks, as `renew_lease`
        does."""


class Database(Protocol):
    """An open database with room for one transaction at a time; used from one thread only."""

    @property
    def connection(self) -> Connection: ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def roll_back(self) -> None:
        """Nothing of the transaction remains. Raises nothing, and needs none to be open."""

    def explain(self, error: Exception) -> SwarmError:
        """What the database's refusal means to a person."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Job:
    """Work for the writer thread; `done` is called there, exactly once."""

    work: Callable[[Connection], Any]
    done: Callable[[Any, SwarmError | None], None]


class WriterStore:
    """The `Store` over any `Database`. Made before the event loop or inside it."""

    database_errors: ClassVar[tuple[type[Exception], ...]]
    """What the database raises when it refuses a statement."""

    def __init__(self, place: str, open_database: Callable[[], Database], clock: Clock) -> None:
        self._place = place
        self._open_database = open_database
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._generation = 0
        self._closed = False
        self._failures = 0
        self._opened: Future[None] = Future()
        # The last two: a number or a text that the database's binding cannot express.
        self._handled_errors: tuple[type[Exception], ...] = (
            *self.database_errors, SwarmError, OverflowError, ValueError,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)

    def _start(self) -> Self:
        self._thread.start()
        self._opened.result()
        return self

    @property
    def leads(self) -> bool:
        """Whether it was given a generation: no other coordinator has a right to write then."""
        return self._generation > 0

    @property
    def failures(self) -> int:
        """Posted records that could not be written."""
        return self._failures

    def next_generation(self, above: int = 0) -> int:
        now = self._clock()
        self._generation = self._call(lambda connection: insert_generation(connection, now, above))
        return self._generation

    def restore(self) -> Restored:
        return self._call(read_restored)

    def checkpoints(self) -> list[CheckpointRecord]:
        return self._call(read_checkpoints)

    def admission(self) -> AdmissionBook:
        return self._call(read_admission)

    def seen_since(self, unix_seconds: float) -> dict[PeerId, float]:
        return self._call(lambda connection: read_seen_since(connection, unix_seconds))

    def contributions(self) -> tuple[StageContribution, ...]:
        return self._call(read_contributions)

    def teams(self) -> dict[PeerId, str]:
        return self._call(read_teams)

    def owners(self) -> dict[PeerId, PeerId]:
        return self._call(read_owners)

    async def write(self, record: Record) -> None:
        await self._call_async(self._insertion(record))

    def post(self, record: Record) -> None:
        if self._closed:
            return

        def done(_: Any, error: SwarmError | None) -> None:
            if error is not None:
                self._failures += 1
                log.error("a %s could not be stored: %s", type(record).__name__, error)

        self._submit(_Job(self._insertion(record), done))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    @property
    def renew_seconds(self) -> float | None:
        return None

    async def renew_lease(self) -> None:
        return

    async def ensure_leadership(self) -> None:
        return

    def _insertion(self, record: Record) -> Callable[[Connection], None]:
        generation, now = self._generation, self._clock()
        return lambda connection: insert(connection, record, generation, now)

    def _submit(self, job: _Job) -> None:
        if self._closed:
            raise StorageError(f"{self._place} is closed already")
        self._jobs.put(job)

    def _call(self, work: Callable[[Connection], _T]) -> _T:
        answer: Future[_T] = Future()

        def done(result: Any, error: SwarmError | None) -> None:
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self._submit(_Job(work, done))
        return answer.result()

    async def _call_async(self, work: Callable[[Connection], _T]) -> _T:
        token = trio.lowlevel.current_trio_token()
        finished = trio.Event()
        answer: list[_T] = []
        failure: list[SwarmError] = []

        def done(result: Any, error: SwarmError | None) -> None:
            if error is not None:
                failure.append(error)
            else:
                answer.append(result)
            # The loop may have ended while the thread was writing: nobody waits any more.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(finished.set)

        self._submit(_Job(work, done))
        await finished.wait()
        if failure:
            raise failure[0]
        return answer[0]

    # ------------------------------------------------------------ the writer thread

    def _run(self) -> None:
        try:
            database = self._open_database()
        except SwarmError as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        with contextlib.closing(database):
            while self._serve(database):
                pass

    def _serve(self, database: Database) -> bool:
        """Commit what waits, together. False when the store is to be closed."""
        jobs: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) == _MAX_GROUP_RECORDS or self._jobs.empty():
                break
            job = self._jobs.get()
        if jobs and not self._commit(database, jobs) and len(jobs) > 1:
            # One bad record must not take its neighbours down: each on its own now.
            for single in jobs:
                self._commit(database, [single], final=True)
        return job is not None

    def _commit(self, database: Database, jobs: list[_Job], final: bool = False) -> bool:
        """One transaction; its jobs are answered when it succeeded or is not tried again."""
        results: list[Any] = []
        try:
            _call_commit_hook("begin")
            database.begin()
            results = [job.work(database.connection) for job in jobs]
            _call_commit_hook("written")
            database.commit()
            _call_commit_hook("committed")
        except self._handled_errors as error:
            database.roll_back()
            if final or len(jobs) == 1:
                known = error if isinstance(error, SwarmError) else database.explain(error)
                jobs[0].done(None, known)
            return False
        for job, result in zip(jobs, results, strict=True):
            job.done(result, None)
        _call_commit_hook("answered")
        return True


def _call_commit_hook(name: str) -> None:
    if commit_hook is not None:
        commit_hook(name)


# ---------------------------------------------------------------- SQLite


class SqliteDatabase:
    """The file in a run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.connection = open_for_writing(path)

    def begin(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.connection.execute("COMMIT")

    def roll_back(self) -> None:
        if self.connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")

    def explain(self, error: Exception) -> SwarmError:
        return translate(self._path, error)

    def close(self) -> None:
        self.connection.close()


class SqliteStore(WriterStore):
    """The store of a run folder."""

    database_errors = (sqlite3.Error,)

    @classmethod
    def open(cls, path: Path, clock: Clock = wall) -> SqliteStore:
        """The store at `path`, made when it is not there. StorageError when it cannot be had."""
        return cls(str(path), lambda: SqliteDatabase(path), clock)._start()
