"""Contributions summed over applied steps: by peer and stage, and by owner.

Owns the one summation of a run's shares. The coordinator's leaderboard, the dashboard, the terminal
view and the ledger feed it and read it, so all of them report the same numbers. Tokens are integers
summed by stage; credit follows from these sums exactly, in whatever order the shares arrive.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swarm_shared.base.types import PeerId
from swarm_shared.credit.credit import RecentCredit, credit_of
from swarm_shared.identity.owners import effective_bindings, group_by_owner, owner_display


@dataclass(slots=True)
class PeerSums:
    """One peer's contribution over all steps added."""

    steps: int = 0
    microbatches: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    """By stage."""
    recent: RecentCredit = field(default_factory=RecentCredit)
    _last_step: int | None = None


@dataclass(frozen=True, slots=True)
class OwnerSums:
    """The contribution of all devices of one owner; most owners have one device."""

    owner: PeerId
    devices: tuple[PeerId, ...]
    """The peers with counted work, sorted; the owner's own key is among them if it has any."""
    parts: tuple[PeerSums, ...]
    """The contribution of each device, in the order of `devices`."""
    name: str | None
    team: str | None
    work_shares: Sequence[float]

    @property
    def credit(self) -> float:
        """The owner's credit over all applied steps."""
        parts = (share for part in self.parts for share in part.tokens.items())
        return credit_of(parts, self.work_shares)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({stage for part in self.parts for stage in part.tokens}))

    @property
    def steps(self) -> int:
        """Number of steps in which the device with the most steps counted."""
        return max(part.steps for part in self.parts)

    @property
    def microbatches(self) -> int:
        return sum(part.microbatches for part in self.parts)

    @property
    def tokens(self) -> int:
        return sum(sum(part.tokens.values()) for part in self.parts)

    def credit_per_day(self, now: float) -> float:
        """The owner's recent credit per day; `now` in Unix seconds."""
        return math.fsum(part.recent.per_day(now) for part in self.parts)


MAX_IDLE_DESCRIPTIONS = 10_000
"""Peers without a share whose names are kept: in mode `open` one machine makes any number."""


class ContributionSums:
    """The shares of applied steps, summed as they are added. Removes nothing: after a rollback the
    sums are made anew."""

    def __init__(self, work_shares: Sequence[float] = ()) -> None:
        """`work_shares` of the stages are needed for credit only."""
        self._work_shares = work_shares
        self.peers: dict[PeerId, PeerSums] = {}
        self.owners: dict[PeerId, PeerId] = {}
        """The owner that each device is bound to; an owner may itself be bound to another one."""
        self._names: dict[PeerId, str | None] = {}
        self._teams: dict[PeerId, str | None] = {}

    def add(
        self,
        peer: PeerId,
        stage: int,
        microbatches: int,
        tokens: int,
        *,
        step: int | None = None,
        applied_at: float | None = None,
    ) -> None:
        """Add a share of a step, or a total over several steps.

        `step` counts the peer's steps; the shares of one step are added one after the other.
        `applied_at` enters the share into the recent credit.
        """
        sums = self.peers.get(peer)
        if sums is None:
            sums = self.peers[peer] = PeerSums()
        if step is not None and step != sums._last_step:
            sums.steps += 1
            sums._last_step = step
        sums.microbatches += microbatches
        sums.tokens[stage] = sums.tokens.get(stage, 0) + tokens
        if applied_at is not None:
            credit = tokens * self._work_shares[stage]
            sums.recent = sums.recent.with_credit(credit, applied_at)

    def clear(self) -> None:
        """Forget the sums. Names and owners stay: a rollback does not change them."""
        self.peers = {}

    def describe(
        self, peer: PeerId, name: str | None, team: str | None, owner: PeerId | None
    ) -> None:
        """Set what a peer states about itself now, and the owner that it is bound to."""
        for table in (self._names, self._teams, self.owners):
            table.pop(peer, None)  # the newest comes last
        self._names[peer], self._teams[peer] = name or None, team or None
        if owner is not None:
            self.owners[peer] = owner
        if len(self._names) > len(self.peers) + 2 * MAX_IDLE_DESCRIPTIONS:
            self._forget_oldest_idle()

    def _forget_oldest_idle(self) -> None:
        """Forget descriptions of peers that counted in no step and own no device that did."""
        owners = {self.owners.get(device) for device in self.peers}
        idle = [peer for peer in self._names if peer not in self.peers and peer not in owners]
        for peer in idle[: max(0, len(idle) - MAX_IDLE_DESCRIPTIONS)]:
            del self._names[peer], self._teams[peer]
            self.owners.pop(peer, None)

    def by_owner(self) -> Iterator[OwnerSums]:
        """The sums of every owner, in no particular order."""
        bindings = effective_bindings(self.owners)
        for owner, devices in group_by_owner(self.peers, bindings).items():
            yield self._owner_sums(owner, devices)

    def ranked(self, most: int | None = None) -> list[OwnerSums]:
        """The owners with the most credit, the first `most` of them or all.

        Most peers have no owner but themselves: only the bound ones are looked up.
        """
        credits = {peer: self._credit(sums) for peer, sums in self.peers.items()}
        bound = {
            device: owner
            for device, owner in effective_bindings(self.owners).items()
            if device in self.peers
        }
        groups = group_by_owner(
            {*bound, *(owner for owner in bound.values() if owner in self.peers)}, bound
        )
        for device in bound:
            del credits[device]
        for owner, devices in groups.items():
            credits[owner] = self._owner_sums(owner, devices).credit

        def rank(owner: PeerId) -> tuple[float, PeerId]:
            return -credits[owner], owner

        first = sorted(credits, key=rank) if most is None else heapq.nsmallest(most, credits, rank)
        return [self._owner_sums(owner, groups.get(owner, [owner])) for owner in first]

    def _credit(self, sums: PeerSums) -> float:
        if len(sums.tokens) == 1:
            # The sum of one product, ten times as fast: most peers hold one stage.
            [(stage, tokens)] = sums.tokens.items()
            return tokens * self._work_shares[stage]
        return credit_of(sums.tokens.items(), self._work_shares)

    def _owner_sums(self, owner: PeerId, devices: Sequence[PeerId]) -> OwnerSums:
        return OwnerSums(
            owner=owner,
            devices=tuple(devices),
            parts=tuple(self.peers[device] for device in devices),
            name=owner_display(owner, devices, self._names),
            team=owner_display(owner, devices, self._teams),
            work_shares=self._work_shares,
        )
