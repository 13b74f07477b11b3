"""What peers report about their links: bytes and paths, the newest word of each.

Owns what is shown and what is due to be written to the database. LinkReports are words, not proofs:
nothing is decided by them. A heartbeat says what has changed since the one before in the same
session, so everything belongs to a session: with the next one a reporter begins anew.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
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
"""Links of all reporters together, and paths: some tens of megabytes. Each has its share of them,
and what a reporter has not spoken of for longest is forgotten first. The database keeps all."""

MIN_REMEMBERED_PER_REPORTER = 8
"""Of one reporter, however many there are."""

MAX_DETACHED_REPORTERS = 10_000
"""Reporters that are not attached any more and whose links are still shown."""

REPORTERS_AT_ONCE = 50
LINKS_AT_ONCE = 500
"""In one commit: some milliseconds of the writer's thread."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class ReporterState:
    """By one reporter, in its newest session; what was said longest ago first."""

    session: SessionNumber
    links: dict[tuple[PeerId, str], LinkBytes] = field(default_factory=dict)
    paths: dict[PeerId, LinkPath] = field(default_factory=dict)


class LinkReports:
    """By reporter. The coordinator reports about itself like everybody."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._of: dict[PeerId, ReporterState] = {}
        self._unsaved: dict[PeerId, dict[tuple[PeerId, str], LinkBytes]] = {}

    def record(self, session: SessionNumber, reporter: PeerId, heartbeat: Heartbeat) -> None:
        of = self._of.get(reporter)
        if of is None or of.session != session:
            if of is not None:
                if of.session > session:
                    return  # of an attachment that has been replaced
                del self._of[reporter]
            of = self._of[reporter] = ReporterState(session)
        if heartbeat.changed_links or heartbeat.links is not None:
            self._record_links(reporter, of, heartbeat)
        if heartbeat.paths is not None:
            of.paths = {}
        if heartbeat.changed_paths or heartbeat.lost_paths or heartbeat.paths:
            for remote in heartbeat.lost_paths:
                of.paths.pop(remote, None)
            for path in (*(heartbeat.paths or ()), *heartbeat.changed_paths):
                _set_newest(of.paths, path.remote, path)
            _drop_oldest(of.paths, self._room(MAX_PATHS), self._node.peer_id)

    def _record_links(self, reporter: PeerId, of: ReporterState, heartbeat: Heartbeat) -> None:
        unsaved = self._unsaved.setdefault(reporter, {})
        for link in (*(heartbeat.links or ()), *heartbeat.changed_links):
            key = (link.remote, link.protocol)
            unsaved[key] = link
            _set_newest(of.links, key, link)
        _drop_oldest(of.links, self._room(MAX_LINKS))
        _drop_oldest(unsaved, MAX_LINKS)

    def _room(self, most: int) -> int:
        return min(most, max(MIN_REMEMBERED_PER_REPORTER, MAX_REMEMBERED // len(self._of)))

    def links(self) -> Links:
        """The last ones of those that have gone, too."""
        found = {peer: tuple(of.links.values()) for peer, of in self._of.items() if of.links}
        return {**found, self._node.peer_id: self._node.link_bytes()}

    def paths(self, attached: Container[PeerId]) -> Paths:
        """Of those that are attached: whoever is not has no paths, and in the end no links."""
        gone = [peer for peer in self._of if peer not in attached]
        for peer in gone[: max(0, len(gone) - MAX_DETACHED_REPORTERS)]:
            del self._of[peer]
        found = {
            peer: tuple(of.paths.values())
            for peer, of in self._of.items()
            if of.paths and peer in attached
        }
        return {**found, self._node.peer_id: tuple(self._node.paths())}

    def unsaved_links(self) -> Iterator[Links]:
        """A few at a time: of everybody whose links were heard and not saved by now, and then the
        coordinator's own. What is not taken stays unsaved."""
        for peers in batched(list(self._unsaved), REPORTERS_AT_ONCE):
            yield {peer: tuple(self._unsaved.pop(peer).values()) for peer in peers}
        for links in batched(self._node.link_bytes(), LINKS_AT_ONCE):
            yield {self._node.peer_id: tuple(links)}


def _set_newest(those: dict[KeyT, ValueT], key: KeyT, value: ValueT) -> None:
    """In place of what was said before, and the newest of all."""
    those.pop(key, None)
    those[key] = value


def _drop_oldest(those: dict[KeyT, ValueT], room: int, but: KeyT | None = None) -> None:
    """The oldest; what a reporter's way to the coordinator is, is always shown."""
    while len(those) > room:
        del those[next(key for key in those if key != but)]
