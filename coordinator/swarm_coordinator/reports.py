"""What peers report about their links: bytes and paths, the newest word of each.

Owns what is shown and what is due to be written to the database. Reports are words, not proofs:
nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Container

from swarm_shared.messages import Heartbeat, LinkBytes, LinkPath
from swarm_shared.network import Node
from swarm_shared.types import PeerId

Links = dict[PeerId, tuple[LinkBytes, ...]]
Paths = dict[PeerId, tuple[LinkPath, ...]]


class Reports:
    """By reporter. The coordinator reports about itself like everybody."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._links: Links = {}
        self._paths: Paths = {}
        self._unsaved: set[PeerId] = set()

    def heard(self, reporter: PeerId, heartbeat: Heartbeat) -> None:
        self._paths[reporter] = heartbeat.paths
        if heartbeat.links:
            self._links[reporter] = heartbeat.links
            self._unsaved.add(reporter)

    def links(self) -> Links:
        return {**self._links, self._node.peer_id: self._node.link_bytes()}

    def paths(self, attached: Container[PeerId]) -> Paths:
        """Of those that are attached: whoever is not has no paths, and is forgotten."""
        self._paths = {peer: paths for peer, paths in self._paths.items() if peer in attached}
        return {**self._paths, self._node.peer_id: tuple(self._node.paths())}

    def unsaved_links(self, everything: bool = False) -> Links:
        """Those that were heard since this was asked last, or all."""
        links, unsaved = self.links(), {self._node.peer_id, *self._unsaved}
        self._unsaved.clear()
        return links if everything else {peer: links[peer] for peer in unsaved}
