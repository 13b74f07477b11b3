"""Run news: the run's state and leaderboard, sent to the volunteers for their users.

Owns the leaderboard and when news are due: after an applied step, or when the run begins to wait.
Nothing depends on news. A message is encoded once for all peers, and the more peers there are, the
less often one is sent. The summation is `swarm_shared.credit.contributions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from swarm_coordinator.core.events import AppliedStep
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.waiting import waiting_reason
from swarm_coordinator.core.trust.standing import Standing, Standings
from swarm_coordinator.status.document import Evaluation
from swarm_coordinator.storage.contributions import StageContribution
from swarm_shared.base.types import PeerId, Version
from swarm_shared.credit.contributions import ContributionSums, OwnerSums
from swarm_shared.credit.credit import work_shares
from swarm_shared.protocol import EvaluationNews, LeaderboardEntry, RunNews, VerdictNews
from swarm_shared.run.manifest import Manifest

MIN_INTERVAL_SECONDS = 2.0
INTERVAL_SECONDS_PER_PEER = 2e-3
"""Seconds between messages, per peer: a few kilobytes to each of 10,000 peers every twenty seconds
are two megabytes a second."""

LEADERBOARD_ROWS = 50
DEVICES_PER_ROW = 16
"""Devices listed in a row, beside the owner's own key; views show them under the owner's name."""
DECISIONS_PER_MESSAGE = 5
VERDICTS_PER_MESSAGE = 10


class Leaderboard(ContributionSums):
    """Tokens and credit of every owner over all applied steps of the run."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(work_shares([stage.work_flops for stage in manifest.stages]))

    def begin(
        self,
        contributions: Iterable[StageContribution],
        owners: Mapping[PeerId, PeerId] | None = None,
    ) -> None:
        """Take over the database's sums, at a start and after a rollback to a checkpoint."""
        self.clear()
        owners = owners or {}
        for part in contributions:
            self.add(part.peer, part.stage, part.microbatches, part.tokens)
            self.describe(part.peer, part.name, part.team, owners.get(part.peer))

    def add_step(self, step: AppliedStep) -> None:
        """Add the work of an applied step."""
        for share in step.shares:
            self.add(share.peer, share.stage, share.microbatches, share.tokens)

    def rows(
        self, most: int = LEADERBOARD_ROWS, standings: Standings | None = None
    ) -> tuple[LeaderboardEntry, ...]:
        """The owners with the most credit, highest first, each with its standing."""
        standings = standings or Standings()
        return tuple(_entry(sums, standings.get(sums.owner)) for sums in self.ranked(most))


def _entry(sums: OwnerSums, standing: Standing) -> LeaderboardEntry:
    """The row of an owner; its `devices` are those besides the owner's own key."""
    devices = tuple(peer for peer in sums.devices if peer != sums.owner)
    return LeaderboardEntry(
        peer=sums.owner,
        devices=devices[:DEVICES_PER_ROW],
        name=sums.name,
        team=sums.team,
        tokens=sums.tokens,
        credit=sums.credit,
        audits_passed=standing.passed,
        audits_lost=standing.lost,
    )


class NewsPublisher:
    """Decides when news are due, and makes the message."""

    def __init__(self, leaderboard: Leaderboard) -> None:
        self.leaderboard = leaderboard
        self.latest: RunNews | None = None
        """The last message, for peers that attach before the next one."""
        self._published: tuple[Version, str, Evaluation | None] | None = None
        self._next_at = -math.inf

    def due(
        self, run: RunState, now: float, evaluation: Evaluation | None = None
    ) -> RunNews | None:
        """The message to broadcast now; None while nothing is new or it is too soon.

        `evaluation` is the newest one of a checkpoint.
        """
        if now < self._next_at:
            return None
        waits = waiting_reason(run)
        if (run.history.version, waits, evaluation) == self._published:
            return None
        self._published = (run.history.version, waits, evaluation)
        self._next_at = now + max(MIN_INTERVAL_SECONDS, INTERVAL_SECONDS_PER_PEER * len(run.peers))
        self.latest = self._news(run, waits, evaluation)
        return self.latest

    def _news(self, run: RunState, waits: str, evaluation: Evaluation | None) -> RunNews:
        last = run.history.last_applied
        finite = last is not None and math.isfinite(last.loss)
        decisions = [note.text for note in run.rebalancing.decisions][-DECISIONS_PER_MESSAGE:]
        return RunNews(
            version=run.history.version,
            loss=last.loss if last is not None and finite else None,
            tokens_per_second=last.tokens / last.seconds if last and last.seconds > 0 else None,
            evaluation=None
            if evaluation is None
            else EvaluationNews(
                version=Version(evaluation.version),
                heldout_loss=evaluation.heldout_loss,
                sample=evaluation.sample[:500],
            ),
            waiting_for=waits[:500],
            rebalancing=tuple(text[:500] for text in decisions),
            leaderboard=self.leaderboard.rows(standings=run.audits.standings),
            probation_cells=run.audits.settings.probation_cells,
            verdicts=tuple(
                VerdictNews(step=v.step, peer=v.peer, owner=v.owner, reason=v.reason[:500])
                for v in list(run.audits.verdicts)[-VERDICTS_PER_MESSAGE:]
            ),
        )
