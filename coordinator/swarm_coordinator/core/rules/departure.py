"""When a volunteer that wants to stop may go: soon, and without taking anything with it.

Part of the pure core. A leaver with replicas goes when nothing of the step depends on it; the last
one of a stage leaves a checkpoint behind. Nobody is kept for long, whatever the others do.
"""

from __future__ import annotations

from swarm_coordinator.core.rules import checkpoints, membership, stage_recovery
from swarm_coordinator.core.state.run import PeerPhase, PeerState, RunPhase, RunState

LEAVE_TIMEOUT_SECONDS = 120.0
"""A step that has not ended by then goes on without the leaver's part of it."""


def release_leavers(run: RunState, now: float) -> None:
    """Say goodbye to every leaver that may go now."""
    for peer in list(run.peers.leavers.values()):
        if peer.stage is None or peer.phase is not PeerPhase.READY:
            membership.say_goodbye(run, peer, "left before taking part", now)
        elif not _is_needed(run, peer, now) and _leaves_nothing_open(run, peer, now):
            membership.say_goodbye(run, peer, "left after its work was counted", now)


def must_wait(run: RunState) -> bool:
    """Whether the next step waits for the checkpoint that the last one of a stage leaves behind."""
    pending = run.pending_checkpoint
    return (
        pending is not None
        and pending.version == run.version
        and any(_is_last(run, peer) for peer in run.peers.leavers.values())
    )


def _is_last(run: RunState, peer: PeerState) -> bool:
    """Whether everybody who holds its stage is about to leave."""
    assert peer.stage is not None
    return all(p.leaving for p in run.ready_peers(peer.stage))


def _is_needed(run: RunState, peer: PeerState, now: float) -> bool:
    """Whether this step should end first. Between steps nothing depends on anybody, unless the
    next one has begun already."""
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
    """Whether the run's version outlives this peer, or is lost without its doing."""
    if not _is_last(run, peer) or checkpoints.stored(run) or checkpoints.refused(run):
        return True
    if checkpoints.request(run, now):
        return False
    # No checkpoint can be had while another stage has nobody; it may only be re-attaching.
    return stage_recovery.is_lost(run, now)
