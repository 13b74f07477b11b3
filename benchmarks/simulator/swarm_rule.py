"""SWARM's own rebalancing, for comparison (Ryabinin et al. 2023, arXiv 2301.11913, 3.2).

Every period peers publish the length of their queues; the peer with the shortest queue of the stage
with the least load moves to the stage with the most. One move per period, regardless of rates,
bytes, and memory except whether the stage fits. A stage's load is the sum of its peers' queues.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swarm_shared.base.types import StageIndex
from swarm_shared.scheduling.placement import (
    Move,
    MoveDecision,
    MovePolicy,
    PeerLoad,
    StageLoad,
    stage_rates,
)


def choose_swarm_moves(
    stages: Sequence[StageLoad],
    peers: Sequence[PeerLoad],
    policy: MovePolicy,
    resting: Collection[StageIndex] = (),
) -> MoveDecision:
    """Return at most one move. `resting` is ignored: the rule keeps no record of earlier moves."""
    rates = stage_rates(stages, peers)
    load, count = [0] * len(stages), [0] * len(stages)
    for peer in peers:
        load[peer.stage] += peer.queued
        count[peer.stage] += 1
    most = max(range(len(stages)), key=lambda stage: (load[stage], -stage))
    least = min(range(len(stages)), key=lambda stage: (load[stage], stage))
    there, here = stages[most], stages[least]
    if load[most] == load[least]:
        return MoveDecision((), "all stages are loaded alike")
    candidates = [
        peer
        for peer in peers
        if peer.stage == least and peer.may_move and peer.memory.holds(there.memory)
    ]
    if count[least] <= policy.minimum_replicas or not candidates:
        return MoveDecision((), f"stage {least} has no peer to spare")

    peer = min(candidates, key=lambda one: (one.queued, one.peer))
    source_rate = rates[least] - peer.rate_at(here)
    others = [rate for stage, rate in enumerate(rates) if stage not in (most, least)]
    move = Move(
        peer=peer.peer,
        source=StageIndex(least),
        destination=StageIndex(most),
        rate=peer.rate_at(there),
        source_rate=source_rate,
        destination_rate=rates[most],
        pipeline_rate=min(rates),
        planned_rate=min([source_rate, rates[most] + peer.rate_at(there), *others]),
        planned_moves=1,
        state_bytes=there.state_bytes,
        download_seconds=peer.download_seconds(there),
        payback_seconds=0.0,
        release_first=not peer.memory.holds(here.memory + there.memory),
    )
    return MoveDecision((move,), "")
