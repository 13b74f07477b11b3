"""What a heartbeat says: that of a peer's newest state which the coordinator does not know yet.

Pure: what there is to say comes in, what is heartbeat goes out. One `HeartbeatDelta` per session.
A stream
delivers everything in order or ends, and with it the session: so what was heartbeat is known, and
after
any loss a new session begins with nothing heartbeat.

How much is heartbeat of links does not grow with the run. A volunteer of ten thousand speaks with
hundreds, whose counts all change in every step, and the coordinator would read of nothing else:
so everybody together tells it of a thousand links a second, and each volunteer those of its own
first that it has heartbeat nothing of for longest. In a run of a few dozen that is all of them with
every heartbeat.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from swarm_shared.base.types import PeerId
from swarm_shared.protocol import MAX_LINKS, MAX_PATHS, Heartbeat, LinkBytes, LinkPath

LINK_REPORTS_PER_SECOND = 1000.0
"""That all members of a run tell together; and as many paths."""

MAX_REPORTED_AT_ONCE = 256
"""In one heartbeat, however small the run is: some 50 kB."""

RELATIVE_CHANGE = 0.1
"""A path is reported again when its delay or its rate has changed by more than this share."""

RTT_JITTER_SECONDS = 0.002
"""By so much more, too, a delay has to change: over a short way it is never the same."""

RATE_JITTER_BYTES_PER_SECOND = 1000.0

SIGNIFICANT_DIGITS = 3
"""Of rates, which are means of few measurements."""

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class HeartbeatSnapshot:
    """Everything that a heartbeat could say now."""

    microbatches_per_second: float
    queued: int
    up_bytes_per_second: float
    links: tuple[LinkBytes, ...]
    paths: tuple[LinkPath, ...]
    paused: bool
    computed: int
    busy_seconds: float


class HeartbeatDelta:
    """What the coordinator has been reported in this session."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._rate: float | None = None
        self._up: float | None = None
        self._links: dict[tuple[PeerId, str], LinkBytes] = {}
        """As they were reported, what was reported longest ago first."""
        self._paths: dict[PeerId, LinkPath] = {}
        self._links_allowed = self._paths_allowed = 1.0

    def heartbeat(self, present: HeartbeatSnapshot, members: int) -> Heartbeat:
        """What is new, and remembered as reported."""
        share = LINK_REPORTS_PER_SECOND * self._heartbeat_seconds / max(1, members)
        self._links_allowed = min(self._links_allowed + share, max(share, 1.0))
        self._paths_allowed = min(self._paths_allowed + share, max(share, 1.0))
        gone = self._take_closed_paths({path.remote for path in present.paths})
        links, paths = self._new_links(present.links), self._new_paths(present.paths)
        self._links_allowed -= len(links)
        self._paths_allowed -= len(paths)
        rate = rounded(present.microbatches_per_second)
        up = rounded(present.up_bytes_per_second)
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
        )
        self._rate, self._up = rate, up
        return heartbeat

    def _take_closed_paths(self, connected: set[PeerId]) -> tuple[PeerId, ...]:
        gone = tuple(remote for remote in self._paths if remote not in connected)[:MAX_PATHS]
        for remote in gone:
            del self._paths[remote]
        return gone

    def _new_links(self, links: Iterable[LinkBytes]) -> tuple[LinkBytes, ...]:
        now = {(link.remote, link.protocol): link for link in links}
        changed = {key: link for key, link in now.items() if self._links.get(key) != link}
        return _select_changed(self._links, changed, int(self._links_allowed), MAX_LINKS)

    def _new_paths(self, paths: Iterable[LinkPath]) -> tuple[LinkPath, ...]:
        now = {path.remote: path for path in paths}
        changed = {
            remote: path
            for remote, path in now.items()
            if (reported := self._paths.get(remote)) is None or not alike(reported, path)
        }
        rerouted = {
            remote: path
            for remote, path in changed.items()
            if (reported := self._paths.get(remote)) is None or not _same_route(reported, path)
        }
        # That a way is another one is worth more than how fast it is now.
        return _select_changed(
            self._paths, rerouted or changed, int(self._paths_allowed), MAX_PATHS
        )


def _select_changed(
    reported: dict[KeyT, ValueT], changed: dict[KeyT, ValueT], allowed: int, most: int
) -> tuple[ValueT, ...]:
    """As many as are allowed, never reported ones first; they are the newest in `reported` from
    now on."""
    room = max(0, min(allowed, MAX_REPORTED_AT_ONCE, most))
    never = [key for key in changed if key not in reported]
    chosen = never[: max(0, min(room, most - len(reported)))]
    if len(chosen) < room:
        again = [key for key in reported if key in changed]
        chosen += again[: room - len(chosen)]
    for key in chosen:
        reported.pop(key, None)
        reported[key] = changed[key]
    return tuple(changed[key] for key in chosen)


def alike(reported: LinkPath, now: LinkPath) -> bool:
    """Whether a person would learn nothing new."""
    return (
        _same_route(reported, now)
        and _within_jitter(reported.rtt_seconds, now.rtt_seconds, RTT_JITTER_SECONDS)
        and _within_jitter(
            reported.bytes_per_second, now.bytes_per_second, RATE_JITTER_BYTES_PER_SECOND
        )
    )


def _same_route(one: LinkPath, other: LinkPath) -> bool:
    return (one.kind, one.relay) == (other.kind, other.relay)


def _within_jitter(one: float, other: float, jitter: float) -> bool:
    return abs(one - other) <= max(jitter, RELATIVE_CHANGE * max(one, other))


def rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
