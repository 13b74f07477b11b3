"""Waiting for the lease of a run whose database several coordinators can reach.

Owns the waiting and the messages that it prints. The lease itself belongs to
`storage.postgresql_store`. A waiting coordinator listens on no port: volunteers that try its
address are refused at once and try the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import anyio.to_thread
import trio

from swarm_coordinator.storage.connection import PostgresqlLocation
from swarm_coordinator.storage.database import postgresql_driver
from swarm_shared.base.errors import LeadershipError, StorageError

POLL_SECONDS = 0.25
"""Seconds between two queries of the lease; one costs the server a fraction of a millisecond."""
LEASE_MARGIN_SECONDS = 2.0
"""Seconds beyond a lease that a start waits for the lease of a killed coordinator to expire."""


async def wait_for_leadership(
    location: PostgresqlLocation, report: Callable[[str], None], *, stand_by: bool
) -> None:
    """Return when no coordinator leads. LeadershipError, unless standing by, if one keeps leading.

    A standby keeps waiting while the server is unreachable: a leader that loses its server ends,
    and a standby must take over when the server is back.
    """
    deadline = trio.current_time() + location.lease_seconds + LEASE_MARGIN_SECONDS
    watch = postgresql_driver().LeaderWatch(location)
    reported = ""
    try:
        while True:
            try:
                leader = await anyio.to_thread.run_sync(watch.leader)
                line = f"standing by: the coordinator on {leader} serves this run"
            except StorageError as error:
                if not stand_by:
                    raise
                leader, line = "an unknown host", f"standing by: {error}"
            if leader is None:
                return
            if not stand_by and trio.current_time() > deadline:
                raise LeadershipError(
                    f"the coordinator on {leader} serves this run; start this one with --standby, "
                    "and it takes over when that one ends"
                )
            if stand_by and line != reported:
                report(line)
                reported = line
            await trio.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(StorageError):
            watch.close()
