"""The simulated network: links to the coordinator, edges between peers, groups of an all-reduce.

Streams deliver in order or end. What is lost, cut, late or doubled is a fault of the world
(`kits.swarm_world.faults`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kits.swarm_world.facts import Cell
from kits.swarm_world.sums import Exchange, put_in, taken_out
from swarm_coordinator.core.events import Event, SessionNumber
from swarm_shared.base.types import PeerId, StageIndex

if TYPE_CHECKING:
    from kits.swarm_world.downstream import Downstream
    from kits.swarm_world.peer import SimPeer
    from kits.swarm_world.server import Serving
    from kits.swarm_world.world import World


@dataclass(eq=False, slots=True)
class Link:
    """One session of a peer, as seen by both ends."""

    number: SessionNumber
    peer: SimPeer
    open: bool = True
    deaf: bool = False
    """It loses everything, and neither end knows."""
    lag_seconds: float = 0.0
    up_at: float = 0.0
    down_at: float = 0.0
    sent: deque[Event] = field(default_factory=lambda: deque(maxlen=20))
    """The newest events that the peer has sent."""


class Edge:
    """One stream of microbatches, from a sender to the server of a stage."""

    def __init__(self, sender: Downstream, receiver: SimPeer) -> None:
        self.sender, self.receiver = sender, receiver
        self.stage: StageIndex = sender.stage
        self.open = self.opening = True
        self.requests: dict[int, tuple[int, tuple[StageIndex, ...]]] = {}
        """Sent and not answered: the delivery and the mask of each."""
        self.tasks: dict[int, list[Serving]] = {}
        """What the receiver has, by request; a request may arrive twice."""
        self._times = [0.0, 0.0]
        for end in (sender.peer, receiver):
            end.edges[self] = None

    def forth(self, kind: str, detail: object, action: Callable[[], None]) -> None:
        self._pass(self.sender.peer, self.receiver, 0, kind, detail, action)

    def back(self, kind: str, detail: object, action: Callable[[], None]) -> None:
        self._pass(self.receiver, self.sender.peer, 1, kind, detail, action)

    def _pass(
        self, source: SimPeer, target: SimPeer, way: int, kind: str, detail: object,
        action: Callable[[], None],
    ) -> None:  # fmt: skip
        world = source.world
        if not self.open or frozenset((source.id, target.id)) in world.silent:
            return

        def arrive() -> None:
            if self.open:
                world.trace.append((world.now, source.id, target.id, kind, detail))
                action()

        at = self._times[way] = max(self._times[way] + 1e-6, world.now + world.delay())
        target.later(at - world.now, arrive)
        if source.echoes:
            target.later(at - world.now + 2.0 * world.rng.random(), arrive)

    def end(self) -> None:
        """The stream breaks: each end notices after a delay of its own."""
        if self.open:
            self.open = False
            sender, receiver = self.sender.peer, self.receiver
            for end in (sender, receiver):
                end.edges.pop(self, None)
            delay = sender.world.delay
            sender.later(delay(), lambda: self.sender.edge_ended(self))
            receiver.later(delay(), self.cancel_tasks)

    def cancel_tasks(self) -> None:
        for tasks in list(self.tasks.values()):
            for task in list(tasks):
                task.cancel()


@dataclass(frozen=True, slots=True)
class RoundFailure:
    culprit: PeerId | None
    carrier_failed: bool = False
    aborted_by: PeerId | None = None
    """The member that has seen it, for those that hear of it."""


Gradient = Counter[Cell]
Averaged = Callable[[Exchange | RoundFailure], None]


@dataclass(eq=False, slots=True)
class Round:
    """One all-reduce: complete when all members have arrived, failed for all when one is lost."""

    members: tuple[PeerId, ...]
    arrived: dict[PeerId, tuple[Gradient, Averaged]] = field(default_factory=dict)
    arrived_at: dict[PeerId, float] = field(default_factory=dict)


class AllReduces:
    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[object, Round] = {}
        self._failed: dict[object, RoundFailure] = {}

    def join(
        self, peer: SimPeer, key: object, members: tuple[PeerId, ...], own: Gradient, done: Averaged
    ) -> None:
        world = self._world
        failure = self._failed.get(key)
        if failure is not None:
            peer.later(world.delay(), lambda: done(failure))
            return
        group = self._open.setdefault(key, Round(members))
        group.arrived[peer.id] = (put_in(peer, own), done)
        group.arrived_at[peer.id] = world.now
        blocked = next(
            (m for m in members if frozenset((m, peer.id)) in world.blocked and m != peer.id), None
        )
        if len(members) > 1 and world.broken_carriers.intersection(members):
            # The next attempt takes another route.
            world.broken_carriers.difference_update(members)
            self._fail(key, RoundFailure(None, carrier_failed=True))
        elif blocked is not None:
            self._fail(key, RoundFailure(blocked))
        elif len(group.arrived) == len(members):
            world.later(0.1 + 0.2 * world.rng.random(), lambda: self._end(key))
        else:
            peer.later(world.manifest.limits.round_stall_seconds, lambda: self._stalled(key))

    def leave(self, peer: PeerId, key: object) -> None:
        """A member stops averaging: the group fails for the others at once."""
        group = self._open.get(key)
        if group is not None and group.arrived.pop(peer, None) is not None:
            self._fail(key, RoundFailure(peer))

    def lose(self, peer: PeerId) -> None:
        """A member is lost: all its groups fail for the others."""
        for key in [key for key, group in self._open.items() if peer in group.members]:
            self._open[key].arrived.pop(peer, None)
            self._fail(key, RoundFailure(peer))

    def _stalled(self, key: object) -> None:
        group = self._open.get(key)
        absent = [m for m in group.members if m not in group.arrived] if group is not None else ()
        if group is not None and absent:
            # Who has waited for more than half of the limit has seen it as well.
            half_ago = self._world.now - self._world.manifest.limits.round_stall_seconds / 2
            observers = {member for member, at in group.arrived_at.items() if at < half_ago}
            self._fail(key, RoundFailure(absent[0]), observers)

    def _end(self, key: object) -> None:
        group = self._open.pop(key, None)
        if group is not None:
            parts = {member: own for member, (own, _) in group.arrived.items()}
            total: Gradient = Counter()
            for own in parts.values():
                total.update(own)
            self._give(
                group,
                lambda member: Exchange(
                    group.members, parts, taken_out(self._world, group.members, total, member)
                ),
            )

    def _fail(self, key: object, failure: RoundFailure, observers: Collection[PeerId] = ()) -> None:
        """The member that came first and the observers see the failure; the others hear of it."""
        group = self._open.pop(key)
        first = next((m for m in group.arrived if m != failure.culprit), None)
        heard = self._failed[key] = replace(failure, aborted_by=first)
        seen_by = {first, *observers}
        self._give(group, lambda member: failure if member in seen_by else heard)

    def _give(self, group: Round, result: Callable[[PeerId], Exchange | RoundFailure]) -> None:
        for member, (_, done) in group.arrived.items():
            give = partial(done, result(member))
            self._world.peers[member].later(self._world.delay(), give)
