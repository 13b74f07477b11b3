"""The store on a PostgreSQL server, and the lease that grants one coordinator the right to write.

Owns leadership (docs/decisions, number 0015): one row with a generation and, by the server's clock,
the end of its lease. Every writing transaction of a coordinator locks that row and is refused
unless the row has its own generation; a successor first writes a higher one. A leader that was
frozen or disconnected while a successor took over therefore writes nothing more.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import psycopg

from swarm_coordinator.storage.connection import Connection, PostgresqlLocation
from swarm_coordinator.storage.postgresql import (
    END_FORMER_LEADER,
    LEADER_QUERY,
    PostgresqlConnection,
    connect,
    explain,
    open_for_writing,
)
from swarm_coordinator.storage.records import Record, insert, insert_generation
from swarm_coordinator.storage.store import Store
from swarm_shared.base.clock import Clock, clock_through_sleep, wall
from swarm_shared.base.errors import LeadershipError, SwarmError, UsageError


class PostgresqlStore(Store):
    """The store of a run whose run.toml names a PostgreSQL server. Its transactions check that this
    coordinator still leads."""

    _connection: PostgresqlConnection

    def __init__(
        self, location: PostgresqlLocation, clock: Clock = wall, boot: Clock = clock_through_sleep
    ) -> None:
        super().__init__(str(location), clock)
        self._location = location
        self._boot = boot
        self._leads_until = 0.0

    @classmethod
    def open(cls, location: PostgresqlLocation, clock: Clock = wall) -> PostgresqlStore:
        """Open the store and make missing tables; StorageError when it cannot be opened."""
        return cls(location, clock)._start()

    def next_generation(self, above: int = 0) -> int:
        """Become the leader. LeadershipError while another coordinator holds the lease."""
        now, requested_at = self._clock(), self._boot()
        holder = f"{socket.gethostname()} (process {os.getpid()})"

        def lead(connection: Connection) -> int:
            connection.execute(END_FORMER_LEADER)
            # Waits until the transaction of the former leader has ended.
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
                (generation, holder, self._location.lease_seconds),
            )
            return generation

        self._generation = self.read(lead)
        self._leads_until = requested_at + self._location.lease_seconds
        return self._generation

    async def renew_lease(self) -> None:
        if not self._generation:
            return
        requested_at = self._boot()

        def extend(connection: Connection) -> None:
            connection.execute(
                "UPDATE leadership SET expires_at = clock_timestamp() + ? * interval '1 second' "
                "WHERE generation = ?",
                (self._location.lease_seconds, self._generation),
            )

        await self._call_async(extend)
        self._leads_until = requested_at + self._location.lease_seconds

    async def ensure_leadership(self) -> None:
        if self._generation and self._boot() >= self._leads_until:
            await self.renew_lease()

    @property
    def renew_seconds(self) -> float | None:
        return self._location.lease_seconds / 3

    def _insertion(self, record: Record) -> Callable[[Connection], None]:
        generation, now = self._generation, self._clock()

        def work(connection: Connection) -> None:
            if not generation:
                self._refuse_beside_a_leader(connection)
            insert(connection, record, generation, now)

        return work

    def _refuse_beside_a_leader(self, connection: Connection) -> None:
        """Refuse a command's record that a running coordinator would not notice."""
        connection.execute("SELECT generation FROM leadership FOR UPDATE")
        leader = connection.execute(LEADER_QUERY).fetchone()
        if leader is not None:
            raise UsageError(
                f"the coordinator on {leader[0]} serves this run; give the command there, in the "
                "folder that it was started with"
            )

    # ------------------------------------------------------------ in the writer's thread

    def _open_database(self) -> PostgresqlConnection:
        self._connection = open_for_writing(self._location)
        return self._connection

    def _begin(self) -> None:
        self._connection.execute("BEGIN")
        if self._generation:
            self._check_leadership(self._connection, "FOR SHARE")

    def _check_leadership(self, connection: PostgresqlConnection, lock: str = "") -> None:
        row = connection.execute(f"SELECT generation FROM leadership {lock}").fetchone()
        if row is None or row[0] != self._generation:
            raise LeadershipError(
                "another coordinator has taken over this run while this one (generation "
                f"{self._generation}) was frozen or disconnected; nothing is lost, the run "
                "continues there; start this one again with --standby"
            )

    def _roll_back(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.raw.rollback()

    def _explain(self, error: Exception) -> SwarmError:
        """Return the error; a lost connection is checked for a successor first."""
        if self._generation and self._connection.raw.closed:
            try:
                with contextlib.closing(PostgresqlConnection(connect(self._location))) as again:
                    self._check_leadership(again)
            except LeadershipError as superseded:
                return superseded
            except (SwarmError, psycopg.Error):
                pass  # the server cannot be asked
        return explain(self._location, error)

    def _close_database(self) -> None:
        """Release the lease, so that a standby need not wait for it to expire."""
        with contextlib.suppress(psycopg.Error):
            if self._generation:
                self._connection.execute(
                    "UPDATE leadership SET expires_at = '-infinity' WHERE generation = ?",
                    (self._generation,),
                )
        self._connection.close()
