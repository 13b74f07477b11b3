"""Contributions of peers per stage, over all applied steps of the run's history."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_coordinator.storage.connection import Connection
from swarm_shared.base.types import PeerId, StageIndex, Step


@dataclass(frozen=True, slots=True)
class StageContribution:
    """The counted work of one peer in one stage."""

    peer: PeerId
    name: str | None
    stage: StageIndex
    steps: int
    microbatches: int
    tokens: int
    first_step: Step
    last_step: Step


def read_contributions(connection: Connection) -> tuple[StageContribution, ...]:
    """Return all contributions, by stage and then by microbatches, the most first."""
    rows = connection.execute(
        "SELECT p.peer, p.name, s.stage, count(*), "
        "CAST(sum(s.microbatches) AS BIGINT), CAST(sum(s.tokens) AS BIGINT), "
        "min(a.step), max(a.step) "
        "FROM shares s JOIN applied_steps a ON a.id = s.applied_step "
        "JOIN peers p ON p.id = s.peer WHERE a.superseded_by IS NULL "
        "GROUP BY p.id, s.stage ORDER BY s.stage, sum(s.microbatches) DESC, p.id"
    )
    return tuple(
        StageContribution(
            PeerId(peer),
            name,
            StageIndex(stage),
            steps,
            microbatches,
            tokens,
            Step(first),
            Step(last),
        )
        for peer, name, stage, steps, microbatches, tokens, first, last in rows
    )


def read_teams(connection: Connection) -> dict[PeerId, str]:
    """Return the teams of the peers that are in one."""
    rows = connection.execute(
        "SELECT p.peer, t.team FROM teams t JOIN peers p ON p.id = t.peer WHERE t.team <> ''"
    )
    return {PeerId(peer): team for peer, team in rows if team}
