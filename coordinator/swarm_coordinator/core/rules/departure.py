"""When a leaving volunteer may go: soon, and without losing state that only it holds.

Part of the pure core. A leaving peer with replicas goes once nothing of the step depends on it; the
last peer of a stage leaves a checkpoint behind. Both waits are bounded.
"""

from __future__ import annotations

from swarm_coordinator.core.rules import checkpoints, membership, stage_recovery
from swarm_coordinator.core.state.run import PeerPhase, PeerState, RunPhase, RunState

LEAVE_TIMEOUT_SECONDS = 120.0
"""Seconds after which a leaving peer goes even if the step has not ended; its cells are cleared."""


def release_leavers(run: RunState, now: float) -> None:
    """Disconnect every leaving peer that may go now."""
    for peer in list(run.peers.leavers.values()):
        if peer.stage is None or peer.phase is not PeerPhase.READY:
            membership.say_goodbye(run, peer, "left before taking part", now)
        elif not _is_needed(run, peer, now) and _leaves_nothing_open(run, peer, now):
            membership.say_goodbye(run, peer, "left after its work was counted", now)


def must_wait(run: RunState) -> bool:
    """Whether the next step waits for the checkpoint of a stage whose last peer leaves."""
    pending = run.pending_checkpoint
    return (
        pending is not None
        and pending.version == run.version
        and any(_is_last(run, peer) for peer in run.peers.leavers.values())
    )


def _is_last(run: RunState, peer: PeerState) -> bool:
    """Whether every holder of its stage is leaving."""
    assert peer.stage is not None
    return all(p.leaving for p in run.ready_peers(peer.stage))


def _is_needed(run: RunState, peer: PeerState, now: float) -> bool:
    """Whether this step should end before the peer goes.

    Between steps nothing depends on a peer, unless the next step has begun already.
    """
    if now - peer.leaving_since > LEAVE_TIMEOUT_SECONDS or not run.has_complete_pipeline():
        return False
    closing = run.step.closing if run.step is not None else None
    if closing is not None and peer.peer in closing.members:
        return True
    steps = [step for step in (run.step, run.ahead) if step is not None]
    if any(step.table.holds_any(peer.peer) or step.leases.driven_by(peer.peer) for step in steps):
        return True
    return run.phase is not RunPhase.WAITING and bool(steps) and _is_last(run, peer)


def _leaves_nothing_open(run: RunState, peer: PeerState, now: float) -> bool:
    """Whether the run's version outlives this peer, or cannot be saved by it."""
    if not _is_last(run, peer) or checkpoints.stored(run) or checkpoints.refused(run):
        return True
    if checkpoints.request(run, now):
        return False
    # No checkpoint is possible while another stage has no peer, which may be re-attaching.
    return stage_recovery.is_lost(run, now)
