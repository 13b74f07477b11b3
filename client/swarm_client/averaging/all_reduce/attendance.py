"""The participants of a round and the time limits on their silence (rule 4 of
`swarm_client.averaging.all_reduce.reduce`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.member_link import MemberLink, RoundState
from swarm_shared.base.types import PeerId

STUCK_STALLS = 4
"""A round in which no data moves for this many stall limits fails, even if all members are
alive."""


@dataclass(slots=True, eq=False)
class Attendance:
    """The participants of a round so far, as one member sees them."""

    links: list[MemberLink] = field(default_factory=list)
    to_accept: set[PeerId] = field(default_factory=set)
    """Reducers that have not accepted our stream yet."""
    to_connect: set[PeerId] = field(default_factory=set)
    """Members whose stream to us has not arrived yet."""
    waiting_for: PeerId | None = None
    """The member whose next piece the sum needs."""
    begun_at: float = field(default_factory=anyio.current_time)

    def is_silent(self, peer: PeerId, stall_seconds: float, join_seconds: float) -> bool:
        """Whether nothing has come from a member for more than half of what is allowed."""
        now = anyio.current_time()
        if peer in self.to_accept or peer in self.to_connect:
            return now - self.begun_at > join_seconds / 2
        return any(
            link.peer == peer and not link.finished
            and now - link.last_received_at > stall_seconds / 2
            for link in self.links
        )  # fmt: skip


async def enforce_timeouts(
    state: RoundState,
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
            state.last_progress += late
            for link in attendance.links:
                link.last_received_at += late
            continue
        heartbeat_ticks += 1
        if heartbeat_ticks % 2 == 0:
            for link in attendance.links:
                link.queue_heartbeat()
        failure = _overdue(state, attendance, now, stall_seconds, join_seconds)
        if failure is not None:
            fail(failure)
            return


def _overdue(
    state: RoundState,
    attendance: Attendance,
    now: float,
    stall_seconds: float,
    join_seconds: float,
) -> RoundFailed | None:
    for link in attendance.links:
        if link.accepted and not link.finished and now - link.last_received_at > stall_seconds:
            return link.stalled(stall_seconds)
    absent = [
        p for p in state.spec.members if p in attendance.to_accept or p in attendance.to_connect
    ]
    if absent and now - attendance.begun_at > join_seconds:
        return RoundFailed(
            f"member {absent[0]} did not join within {join_seconds:g} s"
            + (f" ({len(absent)} are missing)" if len(absent) > 1 else ""),
            absent[0],
            failure=RoundFailure.STALLED,
        )
    if now - state.last_progress > max(STUCK_STALLS * stall_seconds, join_seconds):
        return RoundFailed(
            f"nothing moved for {STUCK_STALLS * stall_seconds:g} s",
            attendance.waiting_for,
            failure=RoundFailure.STALLED,
        )
    return None
