"""Contributions of peers per stage, over all applied steps of the run's history."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_coordinator.storage.connection import Connection
from swarm_shared.base.types import PeerId, StageIndex, Step

NOT_VOID = (
    "NOT EXISTS (SELECT 1 FROM verdicts v WHERE a.step > v.void_after AND a.step <= v.step "
    "AND (v.peer = p.peer OR v.owner = p.peer OR v.owner = o.owner))"
)
"""SQL condition: the share of peer `p`, with the row `o` of `owners`, in step `a` is not void."""


@dataclass(frozen=True, slots=True)
class StageContribution:
    """The counted work of one peer in one stage."""

    peer: PeerId
    name: str | None
    stage: StageIndex
    microbatches: int
    tokens: int
    first_step: Step
    last_step: Step
    team: str | None = None


def read_contributions(connection: Connection) -> tuple[StageContribution, ...]:
    """Return all contributions that are not void, by stage and then the most microbatches first."""
    rows = connection.execute(
        "SELECT p.peer, p.name, s.stage, "
        "CAST(sum(s.microbatches) AS BIGINT), CAST(sum(s.tokens) AS BIGINT), "
        "min(a.step), max(a.step), nullif(max(t.team), '') "
        "FROM shares s JOIN applied_steps a ON a.id = s.applied_step "
        "JOIN peers p ON p.id = s.peer LEFT JOIN teams t ON t.peer = p.id "
        "LEFT JOIN owners o ON o.peer = p.id "
        f"WHERE a.superseded_by IS NULL AND {NOT_VOID} "
        "GROUP BY p.id, s.stage ORDER BY s.stage, sum(s.microbatches) DESC, p.id"
    )
    return tuple(StageContribution(*row) for row in rows)
