"""The participants of a round, and the time limits on their silence and on the waiting for them
(rules 4 and 5 of `swarm_client.averaging.all_reduce.reduce`).

A member that is alive can hold up a round: it keeps a piece or a sum back, sends it by the byte,
reads nothing, or never says goodbye. So each end counts how long it waits for each other one, and
allows for what has come from it. A reducer sees whose piece is missing. A member sees only that a
sum is, which may be for the sake of a third one: it waits twice as long, so that an honest reducer
has named that one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.member_link import MemberLink
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_shared.base.types import PeerId

STUCK_STALLS = 4
"""Stall limits that a round waits for a member that is alive, beyond what its data explains."""
LEAST_ELEMENTS_PER_SECOND = 4096
"""Elements that explain a second of waiting, over all links of a member: an uplink of 16 KiB/s in
float32, below which no round ends in useful time."""
REDUCER_FACTOR = 2
"""Multiple of this time that a reducer has for its sums."""


@dataclass(slots=True, eq=False)
class Attendance:
    """The participants of a round so far, as one member sees them."""

    links: list[MemberLink] = field(default_factory=list)
    to_accept: set[PeerId] = field(default_factory=set)
    """Reducers that have not accepted our stream yet."""
    to_connect: set[PeerId] = field(default_factory=set)
    """Members whose stream to us has not arrived yet."""
    begun_at: float = field(default_factory=anyio.current_time)

    def is_silent(self, peer: PeerId, stall_seconds: float, join_seconds: float) -> bool:
        """Whether nothing has come from a member for more than half of the time that it is
        allowed."""
        now = anyio.current_time()
        if peer in self.to_accept or peer in self.to_connect:
            return now - self.begun_at > join_seconds / 2
        return any(
            link.peer == peer and not link.finished
            and now - link.last_received_at > stall_seconds / 2
            for link in self.links
        )  # fmt: skip


async def enforce_timeouts(
    spec: RoundSpec,
    attendance: Attendance,
    fail: Callable[[RoundFailed], None],
    stall_seconds: float,
    join_seconds: float,
) -> None:
    """Send heartbeats until a time limit is exceeded, then fail the round."""
    interval = stall_seconds / 8
    heartbeat_ticks = 0
    while True:
        before = anyio.current_time()
        await anyio.sleep(interval)
        now = anyio.current_time()
        late = now - before - interval
        if late > interval:
            # This process itself was stopped or starved; what arrived meanwhile is unread.
            attendance.begun_at += late
            for link in attendance.links:
                link.last_received_at += late
                if link.awaited_since is not None:
                    link.awaited_since += late
            continue
        heartbeat_ticks += 1
        if heartbeat_ticks % 2 == 0:
            for link in attendance.links:
                link.queue_heartbeat()
        failure = _overdue(spec, attendance, now, stall_seconds, join_seconds)
        if failure is not None:
            fail(failure)
            return


def _overdue(
    spec: RoundSpec,
    attendance: Attendance,
    now: float,
    stall_seconds: float,
    join_seconds: float,
) -> RoundFailed | None:
    for link in attendance.links:
        if link.accepted and not link.finished and now - link.last_received_at > stall_seconds:
            return link.stalled(stall_seconds)
    absent = [p for p in spec.members if p in attendance.to_accept or p in attendance.to_connect]
    if absent and now - attendance.begun_at > join_seconds:
        return RoundFailed(
            f"member {absent[0]} did not join within {join_seconds:g} s"
            + (f" ({len(absent)} are missing)" if len(absent) > 1 else ""),
            absent[0],
            failure=RoundFailure.STALLED,
        )
    # A reducer may have its sums wait until the last member has joined.
    free_seconds = max(STUCK_STALLS * stall_seconds, join_seconds)
    least_rate = LEAST_ELEMENTS_PER_SECOND / (len(spec.members) - 1)
    for link in attendance.links:
        allowed_seconds = free_seconds + link.received_elements / least_rate
        if link.to_reducer:
            allowed_seconds *= REDUCER_FACTOR
        if link.awaited_since is not None and link.awaited_seconds(now) > allowed_seconds:
            return link.too_slow(link.awaited_seconds(now))
    return None
