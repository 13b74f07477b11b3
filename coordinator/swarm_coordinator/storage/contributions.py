"""Contributions of peers per stage, over all applied steps of the run's history."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_coordinator.storage.connection import Connection
from swarm_shared.base.types import PeerId, StageIndex


@dataclass(frozen=True, slots=True)
class StageContribution:
    """The counted work of one peer in one stage."""

    peer: PeerId
    name: str | None
    stage: StageIndex
    steps: int
    microbatches: int
    tokens: int
    team: str | None = None


def read_contributions(connection: Connection) -> tuple[StageContribution, ...]:
    """Return all contributions, by stage and then by microbatches, the most first."""
    rows = connection.execute(
        "SELECT p.peer, p.name, s.stage, count(*), "
        "CAST(sum(s.microbatches) AS BIGINT), CAST(sum(s.tokens) AS BIGINT), max(t.team) "
        "FROM shares s JOIN applied_steps a ON a.id = s.applied_step "
        "JOIN peers p ON p.id = s.peer LEFT JOIN teams t ON t.peer = p.id "
        "WHERE a.superseded_by IS NULL "
        "GROUP BY p.id, s.stage ORDER BY s.stage, sum(s.microbatches) DESC, p.id"
    )
    return tuple(
        StageContribution(
            PeerId(peer), name, StageIndex(stage), steps, microbatches, tokens, team or None
        )
        for peer, name, stage, steps, microbatches, tokens, team in rows
    )
