"""Heartbeats as deltas: only what has changed since the previous one of the session.

Pure. One `HeartbeatDelta` per session. A stream delivers everything in order or ends, and the
session ends with it; so what was sent is known to the coordinator, and a new session starts from
nothing.

The rate of link reports does not grow with the run. In a run of ten thousand each volunteer has
links with hundreds of peers, whose byte counts change in every step. So all volunteers together
report a thousand links per second, and each sends the least recently reported of its own first. In
a run of a few dozen every heartbeat carries all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from swarm_shared.base.types import PeerId
from swarm_shared.protocol import MAX_LINKS, MAX_PATHS, Heartbeat, LinkBytes, LinkPath

LINK_REPORTS_PER_SECOND = 1000.0
"""Link reports per second that all members of a run send together; the same number of path
reports."""

MAX_REPORTED_AT_ONCE = 256
"""Maximum number of links in one heartbeat, whatever the size of the run; about 50 kB."""

RELATIVE_CHANGE = 0.1
"""Relative change of a path's RTT or rate above which the path is reported again."""

RTT_JITTER_SECONDS = 0.002
"""Absolute change of the RTT that is required in addition; short paths jitter."""

RATE_JITTER_BYTES_PER_SECOND = 1000.0
"""Absolute change of the rate that is required in addition."""

SIGNIFICANT_DIGITS = 3
"""Digits to which rates are rounded; they are means of few measurements."""

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class HeartbeatSnapshot:
    """Everything that a heartbeat can carry, as it is now."""

    microbatches_per_second: float
    queued: int
    up_bytes_per_second: float
    links: tuple[LinkBytes, ...]
    paths: tuple[LinkPath, ...]
    paused: bool
    computed: int
    busy_seconds: float
    arithmetic: str | None = None
    """None while no stage is held."""


class HeartbeatDelta:
    """The state that the coordinator has received in this session."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._rate: float | None = None
        self._up: float | None = None
        self._arithmetic: str | None = None
        self._links: dict[tuple[PeerId, str], LinkBytes] = {}
        """Links as last reported, the least recently reported first."""
        self._paths: dict[PeerId, LinkPath] = {}
        self._links_allowed = self._paths_allowed = 1.0

    def heartbeat(self, present: HeartbeatSnapshot, members: int) -> Heartbeat:
        """Return the heartbeat with the changes since the last one, and record them as reported.

        `members`: number of members of the run, which share the rate of link reports.
        """
        share = LINK_REPORTS_PER_SECOND * self._heartbeat_seconds / max(1, members)
        self._links_allowed = min(self._links_allowed + share, max(share, 1.0))
        self._paths_allowed = min(self._paths_allowed + share, max(share, 1.0))
        gone = self._take_closed_paths({path.remote for path in present.paths})
        links, paths = self._new_links(present.links), self._new_paths(present.paths)
        self._links_allowed -= len(links)
        self._paths_allowed -= len(paths)
        rate = rounded(present.microbatches_per_second)
        up = rounded(present.up_bytes_per_second)
        arithmetic = present.arithmetic
        heartbeat = Heartbeat(
            microbatches_per_second=None if rate == self._rate else rate,
            queued=present.queued,
            up_bytes_per_second=None if up == self._up else up,
            changed_links=links,
            changed_paths=paths,
            lost_paths=gone,
            paused=present.paused,
            computed=present.computed,
            busy_seconds=round(present.busy_seconds, 4),
            arithmetic=None if arithmetic == self._arithmetic else arithmetic,
        )
        self._rate, self._up = rate, up
        self._arithmetic = arithmetic or self._arithmetic
        return heartbeat

    def _take_closed_paths(self, connected: set[PeerId]) -> tuple[PeerId, ...]:
        gone = tuple(remote for remote in self._paths if remote not in connected)[:MAX_PATHS]
        for remote in gone:
            del self._paths[remote]
        return gone

    def _new_links(self, links: Iterable[LinkBytes]) -> tuple[LinkBytes, ...]:
        current = {(link.remote, link.protocol): link for link in links}
        changed = {key: link for key, link in current.items() if self._links.get(key) != link}
        return _select_changed(self._links, changed, int(self._links_allowed), MAX_LINKS)

    def _new_paths(self, paths: Iterable[LinkPath]) -> tuple[LinkPath, ...]:
        current = {path.remote: path for path in paths}
        changed = {
            remote: path
            for remote, path in current.items()
            if (reported := self._paths.get(remote)) is None or not alike(reported, path)
        }
        rerouted = {
            remote: path
            for remote, path in changed.items()
            if (reported := self._paths.get(remote)) is None or not _same_route(reported, path)
        }
        # A changed route is worth more than a changed rate.
        return _select_changed(
            self._paths, rerouted or changed, int(self._paths_allowed), MAX_PATHS
        )


def _select_changed(
    reported: dict[KeyT, ValueT], changed: dict[KeyT, ValueT], allowed: int, capacity: int
) -> tuple[ValueT, ...]:
    """Select up to `allowed` changed entries, never reported ones first, and move them to the end
    of `reported`."""
    room = max(0, min(allowed, MAX_REPORTED_AT_ONCE, capacity))
    never = [key for key in changed if key not in reported]
    chosen = never[: max(0, min(room, capacity - len(reported)))]
    if len(chosen) < room:
        again = [key for key in reported if key in changed]
        chosen += again[: room - len(chosen)]
    for key in chosen:
        reported.pop(key, None)
        reported[key] = changed[key]
    return tuple(changed[key] for key in chosen)


def alike(reported: LinkPath, current: LinkPath) -> bool:
    """Whether the two reports differ by no more than jitter."""
    return (
        _same_route(reported, current)
        and _within_jitter(reported.rtt_seconds, current.rtt_seconds, RTT_JITTER_SECONDS)
        and _within_jitter(
            reported.bytes_per_second, current.bytes_per_second, RATE_JITTER_BYTES_PER_SECOND
        )
    )


def _same_route(reported: LinkPath, current: LinkPath) -> bool:
    return (reported.kind, reported.relay) == (current.kind, current.relay)


def _within_jitter(reported: float, current: float, jitter: float) -> bool:
    return abs(reported - current) <= max(jitter, RELATIVE_CHANGE * max(reported, current))


def rounded(value: float) -> float:
    """A value with SIGNIFICANT_DIGITS digits."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
