"""The store on a PostgreSQL server, and the lease that says which coordinator may write to it.

Owns leadership (docs/decisions, number 0015): one row that names a generation and, by the server's
clock, until when. Every writing transaction of a coordinator locks that row and finds its own
generation in it, or is refused; whoever takes over writes a higher one there first. So a leader
that was frozen, or cut off, and wakes up behind its successor writes nothing any more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

import psycopg

from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.location import PostgresqlLocation
from swarm_coordinator.storage.postgresql import (
    LEADER_QUERY,
    PostgresqlConnection,
    connect,
    explain,
    open_for_writing,
)
from swarm_coordinator.storage.records import Record, insert, insert_generation
from swarm_coordinator.storage.store import WriterStore
from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import LeadershipError, SwarmError, UsageError


def boot_clock() -> float:
    """Goes on while the process is frozen and, unlike the monotonic clock, while the machine is."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class PostgresqlDatabase:
    """A connection, with the fence that every transaction of a leader passes."""

    def __init__(self, place: PostgresqlLocation) -> None:
        self._place = place
        self.connection: PostgresqlConnection = open_for_writing(place)
        self.generation = 0
        """Of this coordinator's leadership; 0: it does not lead."""

    def begin(self) -> None:
        self.connection.raw.execute("BEGIN")
        if self.generation:
            found = self.connection.raw.execute(
                "SELECT generation FROM leadership FOR SHARE"
            ).fetchone()
            if found is None or found[0] != self.generation:
                raise _superseded(self.generation)

    def commit(self) -> None:
        self.connection.raw.execute("COMMIT")

    def roll_back(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self.connection.raw.rollback()

    def explain(self, error: Exception) -> SwarmError:
        """A connection that was ended while this process was frozen tells of a successor."""
        if self.generation and self.connection.raw.closed:
            with contextlib.suppress(SwarmError, psycopg.Error):
                raw = connect(self._place)
                try:
                    found = raw.execute("SELECT generation FROM leadership").fetchone()
                finally:
                    raw.close()
                if found is not None and found[0] != self.generation:
                    return _superseded(self.generation)
        return explain(self._place, error)

    def close(self) -> None:
        """Give the lease back, so that a standby need not wait for its end."""
        with contextlib.suppress(psycopg.Error):
            if self.generation:
                self.connection.raw.execute(
                    "UPDATE leadership SET expires_at = '-infinity' WHERE generation = %s",
                    (self.generation,),
                )
        self.connection.close()


def _superseded(generation: int) -> LeadershipError:
    return LeadershipError(
        f"another coordinator has taken over this run while this one (generation {generation}) was "
        "frozen or cut off; nothing is lost, and it goes on there; start this one again with "
        "--standby"
    )


class PostgresqlStore(WriterStore):
    """The store of a run whose run.toml names a server."""

    database_errors = (psycopg.Error,)

    def __init__(
        self, place: PostgresqlLocation, clock: Clock = wall, boot: Clock = boot_clock
    ) -> None:
        super().__init__(str(place), self._open, clock)
        self._address = place
        self._boot = boot
        self._database: PostgresqlDatabase | None = None
        self._leads_until = 0.0

    def _open(self) -> PostgresqlDatabase:
        self._database = PostgresqlDatabase(self._address)
        return self._database

    @classmethod
    def open(cls, place: PostgresqlLocation, clock: Clock = wall) -> PostgresqlStore:
        """Its tables are made when they are not there. StorageError when it cannot be had."""
        return cls(place, clock)._start()

    def leader(self) -> str | None:
        """Who leads now; None when the place is free."""

        def look(connection: Connection) -> str | None:
            row = connection.execute(LEADER_QUERY).fetchone()
            return None if row is None else str(row[0])

        return self._call(look)

    def next_generation(self, above: int = 0) -> int:
        """Become the leader. LeadershipError while another one holds the lease."""
        now, asked_at = self._clock(), self._boot()
        holder = f"{socket.gethostname()} (process {os.getpid()})"

        def lead(connection: Connection) -> int:
            # Waits for a transaction of the former leader; the server ends a frozen one's session.
            highest = connection.execute("SELECT generation FROM leadership FOR UPDATE").fetchone()
            leader = connection.execute(LEADER_QUERY).fetchone()
            if leader is not None and not self._generation:
                raise LeadershipError(
                    f"the coordinator on {leader[0]} serves this run; start this one with "
                    "--standby, and it takes over when that one ends"
                )
            generation = insert_generation(connection, now, max(above, highest[0]))
            connection.execute(
                "UPDATE leadership SET generation = ?, holder = ?, backend = pg_backend_pid(), "
                "backend_started = (SELECT backend_start FROM pg_stat_activity "
                "WHERE pid = pg_backend_pid()), "
                "expires_at = clock_timestamp() + ? * interval '1 second'",
                (generation, holder, self._address.lease_seconds),
            )
            return generation

        generation = self._call(lead)
        assert self._database is not None
        self._generation = self._database.generation = generation
        self._leads_until = asked_at + self._address.lease_seconds
        return generation

    async def renew_lease(self) -> None:
        if not self._generation:
            return
        asked_at = self._boot()

        def extend(connection: Connection) -> None:
            connection.execute(
                "UPDATE leadership SET expires_at = clock_timestamp() + ? * interval '1 second' "
                "WHERE generation = ?",
                (self._address.lease_seconds, self._generation),
            )

        await self._call_async(extend)
        self._leads_until = asked_at + self._address.lease_seconds

    async def ensure_leadership(self) -> None:
        if self._generation and self._boot() >= self._leads_until:
            await self.renew_lease()

    @property
    def renew_seconds(self) -> float | None:
        return self._address.lease_seconds / 3

    def _insertion(self, record: Record) -> Callable[[Connection], None]:
        generation, now = self._generation, self._clock()

        def work(connection: Connection) -> None:
            if not generation:
                self._refuse_beside_a_leader(connection)
            insert(connection, record, generation, now)

        return work

    def _refuse_beside_a_leader(self, connection: Connection) -> None:
        """A command must not write what the coordinator at work would not hear of."""
        connection.execute("SELECT generation FROM leadership FOR UPDATE")
        leader = connection.execute(LEADER_QUERY).fetchone()
        if leader is not None:
            raise UsageError(
                f"the coordinator on {leader[0]} serves this run; give the command there, in the "
                "folder that it was started with"
            )
