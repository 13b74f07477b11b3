"""What volunteers are told about the run as a whole, for the people who look at it.

Owns the sums behind the leaderboard and when it is time to tell. Nothing depends on what is told:
it goes out after a step was applied or when the run begins to wait, encoded once for everybody,
and the more volunteers there are, the less often.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm_coordinator.core.events import AppliedStep
from swarm_coordinator.core.rules.status_view import waiting_for
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.storage.contributions import StageContribution
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.credit.credit import work_shares
from swarm_shared.identity.owners import effective_bindings, owner_display
from swarm_shared.protocol import LeaderboardEntry, RunNews
from swarm_shared.run.manifest import Manifest

MIN_INTERVAL_SECONDS = 2.0
INTERVAL_SECONDS_PER_PEER = 2e-3
"""Some kilobytes to each of 10,000 volunteers every twenty seconds are two megabytes a second."""

LEADERBOARD_ROWS = 50
DEVICES_PER_ROW = 16
"""Told of one row: so many of its peers can be called by its name."""
DECISIONS_PER_MESSAGE = 5


@dataclass(slots=True)
class _Totals:
    tokens: int = 0
    credit: float = 0.0


class Leaderboard:
    """Tokens and credit of everybody, over all applied steps that belong to the run."""

    def __init__(self, manifest: Manifest) -> None:
        self._shares = work_shares([stage.work_flops for stage in manifest.stages])
        self._totals: dict[PeerId, _Totals] = {}
        self._names: dict[PeerId, str | None] = {}
        self._teams: dict[PeerId, str | None] = {}
        self._owners: dict[PeerId, PeerId] = {}

    def begin(
        self,
        contributions: Iterable[StageContribution],
        teams: Mapping[PeerId, str] | None = None,
        owners: Mapping[PeerId, PeerId] | None = None,
    ) -> None:
        """As the database has them: at a start, and after a fall back to a checkpoint."""
        self._totals.clear()
        owners = owners or {}
        for part in contributions:
            self._add(part.peer, part.stage, part.tokens)
            self.name(part.peer, part.name, (teams or {}).get(part.peer), owners.get(part.peer))

    def add(self, step: AppliedStep) -> None:
        for share in step.shares:
            self._add(share.peer, share.stage, share.tokens)

    def name(
        self, peer: PeerId, name: str | None, team: str | None, owner: PeerId | None = None
    ) -> None:
        """The public name that it gives itself now, its team, and whose device it proves to be."""
        self._names[peer], self._teams[peer] = name or None, team or None
        self._owners.pop(peer, None)
        if owner is not None:
            self._owners[peer] = owner

    def _add(self, peer: PeerId, stage: StageIndex, tokens: int) -> None:
        found = self._totals.setdefault(peer, _Totals())
        found.tokens += tokens
        found.credit += tokens * self._shares[stage]

    def rows(self, most: int = LEADERBOARD_ROWS) -> tuple[LeaderboardEntry, ...]:
        """People, the most credit first. Most have one device: only the others are looked up."""
        credits = {peer: one.credit for peer, one in self._totals.items()}
        devices: dict[PeerId, list[PeerId]] = {}
        for device, owner in effective_bindings(self._owners).items():
            if device in credits:
                credits[owner] = credits.get(owner, 0.0) + credits.pop(device)
                devices.setdefault(owner, []).append(device)
        first = heapq.nsmallest(most, credits.items(), key=lambda e: (-e[1], e[0]))
        return tuple(
            self._row(peer, credit, sorted(devices.get(peer, ()))) for peer, credit in first
        )

    def _row(self, person: PeerId, credit: float, devices: list[PeerId]) -> LeaderboardEntry:
        """`devices` are those beside the owner's own key."""
        tokens = (self._totals[one].tokens for one in (person, *devices) if one in self._totals)
        return LeaderboardEntry(
            peer=person,
            devices=tuple(devices[:DEVICES_PER_ROW]),
            name=owner_display(person, devices, self._names),
            team=owner_display(person, devices, self._teams),
            tokens=sum(tokens),
            credit=credit,
        )


class NewsPublisher:
    """Says when there is something to tell, and what."""

    def __init__(self, leaderboard: Leaderboard) -> None:
        self.leaderboard = leaderboard
        self.latest: RunNews | None = None
        """For whoever attaches before there is anything newer."""
        self._published: tuple[Version, str] | None = None
        self._next_at = -math.inf

    def due(self, run: RunState, now: float) -> RunNews | None:
        """What to tell everybody now; None while nothing is new, or it is too soon."""
        if now < self._next_at:
            return None
        waits = waiting_for(run)
        if (run.version, waits) == self._published:
            return None
        self._published = (run.version, waits)
        self._next_at = now + max(MIN_INTERVAL_SECONDS, INTERVAL_SECONDS_PER_PEER * len(run.peers))
        self.latest = self._news(run, waits)
        return self.latest

    def _news(self, run: RunState, waits: str) -> RunNews:
        last = run.last_applied
        finite = last is not None and math.isfinite(last.loss)
        decisions = [note.text for note in run.rebalancing.decisions][-DECISIONS_PER_MESSAGE:]
        return RunNews(
            version=run.version,
            loss=last.loss if last is not None and finite else None,
            tokens_per_second=last.tokens / last.seconds if last and last.seconds > 0 else None,
            waiting_for=waits[:500],
            rebalancing=tuple(text[:500] for text in decisions),
            leaderboard=self.leaderboard.rows(),
        )
