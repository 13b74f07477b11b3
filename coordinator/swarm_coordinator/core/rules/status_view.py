"""What the core says of a run: its status as plain JSON values, and why no step goes on.

Part of the pure core: reads a RunState, changes nothing. `status` writes it to the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_coordinator.core.rules import rebalancing
from swarm_coordinator.core.state import utilisation
from swarm_coordinator.core.state.run import PeerState, RunPhase, RunState
from swarm_shared.base.types import Step


def status_of(run: RunState, now: float) -> dict[str, object]:
    """What `status` shows: plain JSON values only."""
    return {**status_but_peers(run, now), "peers": peer_rows(run, list(run.peers.values()), now)}


def status_but_peers(run: RunState, now: float) -> dict[str, object]:
    step = run.step
    done = len(step.table) if step is not None else 0
    last = run.last_applied
    return {
        "run": run.manifest.name,
        "phase": run.phase.value,
        "waiting_for": waiting_for(run),
        "generation": run.generation,
        "version": run.version,
        "steps": run.manifest.training.steps,
        "step": step.step if step is not None else Step(run.version),
        "cells_done": done,
        "cells_total": run.manifest.training.microbatches_per_step * run.manifest.stage_count,
        "loss": last.loss if last is not None else None,
        "tokens_per_second": last.tokens / last.seconds if last and last.seconds > 0 else None,
        "heldout_loss": run.heldout_loss,
        "work": {
            "counted": run.work.counted,
            "duplicated": run.work.duplicated,
            "cleared": run.work.cleared,
        },
        "checkpoint_version": run.checkpoint.version if run.checkpoint else None,
        "uptime_seconds": now - run.started_at,
        "healthy": all(run.ready_peers(stage) for stage in run.stage_indices),
        "stages": [
            {
                "stage": row.stage,
                "peers": len(run.ready_peers(row.stage)),
                "microbatches_per_second": row.microbatches_per_second,
            }
            for row in run.stage_rows()
        ],
        "figures": utilisation.status_section(run.utilisation),
        "rebalancing": rebalancing.status_section(run, now),
    }


def peer_rows(run: RunState, peers: Sequence[PeerState], now: float) -> list[dict[str, object]]:
    """Some of the rows of `peers`: ten thousand at once keep everybody waiting."""
    return [
        {
            "peer": peer.peer,
            "name": peer.name,
            "stage": peer.stage,
            "phase": peer.phase.value,
            "version": peer.version,
            "leaving": peer.leaving,
            "paused": peer.paused,
            "device": peer.device,
            "reachability": peer.reachability.value,
            "offers_relay": peer.offers_relay,
            "microbatches_per_second": peer.microbatches_per_second,
            "queued": peer.queued,
            "silent_seconds": round(now - peer.last_heard, 1),
            **_flags_of(run, peer),
        }
        for peer in peers
    ]


def _flags_of(run: RunState, peer: PeerState) -> dict[str, object]:
    mark = run.flags.get(peer.peer)
    return {} if mark is None else {"flagged_times": mark.times, "flagged_reason": mark.reason}


def waiting_for(run: RunState) -> str:
    """The reason why no step goes on, for people; empty while one does."""
    if run.phase is RunPhase.WAITING:
        return run.waiting_reason
    if run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING) and run.lost_since:
        names = ", ".join(str(stage) for stage in sorted(run.lost_since))
        return f"a peer to hold stage {names}, which has lost every peer"
    if run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING):
        return paused_reason(run)
    return ""


def paused_reason(run: RunState) -> str:
    """The reason why no step goes on while whole stages have paused; empty if none has."""
    names = ", ".join(str(stage) for stage in run.paused_stages())
    return f"stage {names}, where every peer has paused" if names else ""
