"""Link counters and paths as peers report them in heartbeats: the newest of each.

Owns what is shown of them and what is due to be written to the database. Reports are not verified,
and nothing is decided by them. A heartbeat contains the changes since the previous one of its
session, so each report belongs to a session: a new session of a peer begins without reports.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from swarm_coordinator.core.events import SessionNumber
from swarm_coordinator.status.pacing import batched
from swarm_shared.base.types import PeerId
from swarm_shared.network import Node
from swarm_shared.protocol import MAX_LINKS, MAX_PATHS, Heartbeat, LinkBytes, LinkPath

Links = dict[PeerId, tuple[LinkBytes, ...]]
Paths = dict[PeerId, tuple[LinkPath, ...]]

MAX_REMEMBERED = 100_000
"""Links kept of all reporters together, and paths: tens of megabytes. Each reporter has an equal
share of them and loses what it has not reported for longest, saved or not."""

MIN_REMEMBERED_PER_REPORTER = 8
"""Links and paths kept of a reporter, however many reporters there are."""

MAX_PROTOCOLS = 16
"""Names of protocols that count of one reporter in a session; a volunteer has eight."""

MAX_DETACHED_REPORTERS = 10_000
"""Detached reporters whose links are still shown."""

REPORTERS_AT_ONCE = 50
"""Reporters whose links are written in one commit: a few milliseconds of the writer's thread."""
LINKS_AT_ONCE = 500
"""The coordinator's own links written in one commit."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class ReporterState:
    """Reports of one peer in its newest session, the oldest first."""

    session: SessionNumber
    links: dict[tuple[PeerId, str], LinkBytes] = field(default_factory=dict)
    paths: dict[PeerId, LinkPath] = field(default_factory=dict)
    protocols: set[str] = field(default_factory=set)

    def takes(self, protocol: str) -> bool:
        """Whether links of this protocol count."""
        if len(self.protocols) < MAX_PROTOCOLS:
            self.protocols.add(protocol)
        return protocol in self.protocols


class LinkReports:
    """Reports by peer. The coordinator's own are those of its node.

    Only links and paths to peers of the run count: to the coordinator, to those attached now, and
    to those that have reported and are still remembered. A reporter can name any number of others.
    """

    def __init__(self, node: Node, is_attached: Callable[[PeerId], bool]) -> None:
        self._node = node
        self._is_attached = is_attached
        self._reporters: dict[PeerId, ReporterState] = {}
        self._unsaved: dict[PeerId, dict[tuple[PeerId, str], LinkBytes]] = {}

    def record(self, session: SessionNumber, reporter: PeerId, heartbeat: Heartbeat) -> None:
        """Enter the changes that a heartbeat of a session reports."""
        state = self._reporters.get(reporter)
        if state is None or state.session != session:
            if state is not None:
                if state.session > session:
                    return  # of a session that has been replaced
                del self._reporters[reporter]
            state = self._reporters[reporter] = ReporterState(session)
        if heartbeat.changed_links:
            self._record_links(reporter, state, heartbeat)
        if heartbeat.changed_paths or heartbeat.lost_paths:
            for remote in heartbeat.lost_paths:
                state.paths.pop(remote, None)
            for path in filter(self._is_of_run, heartbeat.changed_paths):
                _set_newest(state.paths, path.remote, path)
            _drop_oldest(state.paths, self._room(MAX_PATHS), self._node.peer_id)

    def _record_links(self, reporter: PeerId, state: ReporterState, heartbeat: Heartbeat) -> None:
        unsaved = self._unsaved.setdefault(reporter, {})
        for link in filter(self._is_of_run, heartbeat.changed_links):
            if not state.takes(link.protocol):
                continue
            key = (link.remote, link.protocol)
            unsaved[key] = link
            _set_newest(state.links, key, link)
        _drop_oldest(state.links, self._room(MAX_LINKS))
        _drop_oldest(unsaved, self._room(MAX_LINKS))
        if not unsaved:
            del self._unsaved[reporter]

    def _is_of_run(self, reported: LinkBytes | LinkPath) -> bool:
        remote = reported.remote
        return (
            remote == self._node.peer_id or remote in self._reporters or self._is_attached(remote)
        )

    def _room(self, limit: int) -> int:
        return min(limit, max(MIN_REMEMBERED_PER_REPORTER, MAX_REMEMBERED // len(self._reporters)))

    def links(self) -> Links:
        """Links by reporter, including the last ones of detached peers."""
        links = {
            peer: tuple(state.links.values())
            for peer, state in self._reporters.items()
            if state.links
        }
        return {**links, self._node.peer_id: self._own_links()}

    def _own_links(self) -> tuple[LinkBytes, ...]:
        """The coordinator's links to peers of the run; strangers can make any number of others."""
        return tuple(filter(self._is_of_run, self._node.link_bytes()))

    def paths(self, attached: Container[PeerId]) -> Paths:
        """Paths of the attached peers. Also forgets detached reporters beyond the limit."""
        gone = [peer for peer in self._reporters if peer not in attached]
        for peer in gone[: max(0, len(gone) - MAX_DETACHED_REPORTERS)]:
            del self._reporters[peer]
        paths = {
            peer: tuple(state.paths.values())
            for peer, state in self._reporters.items()
            if state.paths and peer in attached
        }
        return {**paths, self._node.peer_id: tuple(self._node.paths())}

    def unsaved_links(self) -> Iterator[Links]:
        """Yield the links that are not in the database yet, a few reporters at a time, then the
        coordinator's own. Links that are not taken stay unsaved."""
        for peers in batched(list(self._unsaved), REPORTERS_AT_ONCE):
            yield {peer: tuple(self._unsaved.pop(peer).values()) for peer in peers}
        for links in batched(self._own_links(), LINKS_AT_ONCE):
            yield {self._node.peer_id: tuple(links)}


def _set_newest(table: dict[KeyT, ValueT], key: KeyT, value: ValueT) -> None:
    """Replace the value and make it the newest of all."""
    table.pop(key, None)
    table[key] = value


def _drop_oldest(table: dict[KeyT, ValueT], room: int, kept: KeyT | None = None) -> None:
    """Drop the oldest entries except `kept`: the path to the coordinator is always shown."""
    while len(table) > room:
        del table[next(key for key in table if key != kept)]
