"""Traffic between peers of the simulated world: microbatches, all-reduces, downloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kits.swarm_world.facts import COORDINATOR
from kits.swarm_world.peer_base import (
    REQUEST_SECONDS,
    Answer,
    Parcel,
    PeerBase,
    Round,
    RoundFailure,
)
from swarm_shared.base.types import PeerId


class Network:
    # ---- between peers

    def download(
        self, holder: PeerId, item: str, version: int, stage: int
    ) -> tuple[str, tuple[tuple[int, int], ...]] | None:
        """A stage's file by its name, from a peer or from the coordinator's folder."""
        if holder == COORDINATOR.peer:
            return self.disk[version].get(stage) if self.run_state is not None else None
        peer = self.peers[holder]
        return peer.snapshots.get(item) if peer.alive and not peer.hung else None

    def request(
        self,
        sender: PeerBase,
        target: PeerId,
        stage: int,
        parcel: Parcel,
        answered: Callable[[Answer], None],
    ) -> None:
        """One microbatch over one edge; exactly one answer, whatever happens to the target."""
        open_request = [True]

        def answer(value: Answer) -> None:
            if open_request[0]:
                open_request[0] = False
                answered(value)

        def reply(value: Answer) -> None:
            sender.later(self.delay(), lambda: answer(value))

        receiver = self.peers[target]
        if frozenset((sender.id, target)) in self.blocked or not receiver.alive:
            reply(Answer("dead"))
            return
        receiver.later(self.delay(), lambda: receiver.serve(sender, stage, parcel, reply))
        sender.later(REQUEST_SECONDS, lambda: answer(Answer("dead")))

    def join_round(
        self,
        peer: PeerBase,
        key: object,
        members: tuple[PeerId, ...],
        own: Counter[tuple[int, int]],
        done: Callable[[Counter[tuple[int, int]] | RoundFailure], None],
    ) -> Round:
        group = self.rounds.setdefault(key, Round(members))
        if group.failure is not None:
            peer.later(self.delay(), lambda: done(group.failure or RoundFailure(None)))
            return group
        group.arrived[peer.id] = (own, done)
        blocked = next(
            (m for m in members if frozenset((m, peer.id)) in self.blocked and m != peer.id), None
        )
        if len(members) > 1 and self.broken_carriers.intersection(members):
            # The next attempt takes another route.
            self.broken_carriers.difference_update(members)
            self._fail_round(group, RoundFailure(None, carrier_failed=True))
        elif blocked is not None:
            self._fail_round(group, RoundFailure(blocked))
        elif len(group.arrived) == len(members):
            self.later(0.1 + 0.2 * self.rng.random(), lambda: self._end_round(group))
        else:
            stall = self.manifest.limits.round_stall_seconds
            peer.later(stall, lambda: self._stalled(group))
        return group

    def _stalled(self, group: Round) -> None:
        absent = [m for m in group.members if m not in group.arrived]
        if absent and not group.done:
            self._fail_round(group, RoundFailure(absent[0]))

    def _end_round(self, group: Round) -> None:
        if group.failure is not None:
            return
        group.done = True
        total: Counter[tuple[int, int]] = Counter()
        for own, _ in group.arrived.values():
            total.update(own)
        for member, (_, done) in group.arrived.items():
            self.peers[member].later(self.delay(), lambda done=done: done(Counter(total)))

    def _fail_round(self, group: Round, failure: RoundFailure) -> None:
        group.failure = failure
        for member, (_, done) in group.arrived.items():
            self.peers[member].later(self.delay(), lambda done=done: done(failure))

    def end_rounds_of(self, peer: PeerBase) -> None:
        """A member is lost: its rounds fail for the other members at once."""
        for group in self.rounds.values():
            if peer.id in group.members and group.failure is None and not group.done:
                group.arrived.pop(peer.id, None)
                self._fail_round(group, RoundFailure(peer.id))
