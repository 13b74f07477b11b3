"""Waiting for the lease of a run whose database several coordinators can reach.

Owns the wait, and what is said meanwhile. The lease itself is `postgresql_store`'s. While it waits
a coordinator listens nowhere: volunteers that try its address are refused at once and try the next.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import anyio.to_thread
import trio

from swarm_coordinator.storage.location import PostgresqlLocation, postgresql_driver
from swarm_shared.base.errors import LeadershipError, StorageError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""Between two looks at the lease; one costs the server a fraction of a millisecond."""
LEASE_MARGIN_SECONDS = 2.0
"""So much longer than a lease a start waits for that of a coordinator that was killed."""


async def wait_for_leadership(
    place: PostgresqlLocation, report: Callable[[str], None], *, stand_by: bool
) -> None:
    """Returns when nobody leads. LeadershipError, unless standing by, when somebody goes on to.

    Standing by outlasts a server that is away: a coordinator that has lost its server ends, and
    somebody must be there when it is back.
    """
    deadline = trio.current_time() + place.lease_seconds + LEASE_MARGIN_SECONDS
    watch = postgresql_driver().LeaderWatch(place)
    said = ""
    try:
        while True:
            try:
                leader = await anyio.to_thread.run_sync(watch.leader)
                line = f"standing by: the coordinator on {leader} serves this run"
            except StorageError as error:
                if not stand_by:
                    raise
                leader, line = "nobody knows whom", f"standing by: {error}"
            if leader is None:
                return
            if not stand_by and trio.current_time() > deadline:
                raise LeadershipError(
                    f"the coordinator on {leader} serves this run; start this one with --standby, "
                    "and it takes over when that one ends"
                )
            if stand_by and line != said:
                report(line)
                said = line
            await trio.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(StorageError):
            watch.close()
