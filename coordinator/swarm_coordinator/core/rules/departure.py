"""When a leaving volunteer may go: soon, and without losing state that only it holds.

Part of the pure core. A leaving peer with replicas goes once nothing of the step depends on it; the
last peer of a stage leaves a checkpoint behind. Both waits are bounded.
"""

from __future__ import annotations

from swarm_coordinator.core.rules import checkpoints, membership, stage_recovery
from swarm_coordinator.core.state.peers import PeerPhase, PeerState
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.types import StageIndex

LEAVE_TIMEOUT_SECONDS = 120.0
"""Seconds after which a leaving peer goes even if the step has not ended; its cells are cleared."""


def release_leavers(run: RunState, now: float) -> None:
    """Disconnect every leaving peer that may go now."""
    for peer in list(run.peers.leavers.values()):
        if peer.stage is None or peer.phase is not PeerPhase.READY:
            membership.say_goodbye(run, peer, "left before taking part", now)
        elif not _is_needed(run, peer, now) and _leaves_nothing_open(run, peer.stage, now):
            membership.say_goodbye(run, peer, "left after its work was counted", now)


def must_wait(run: RunState) -> bool:
    """Whether the next step waits for the checkpoint of a stage whose last peer leaves."""
    pending = run.checkpoints.pending
    return pending is not None and pending.version == run.history.version and loses_a_stage(run)


def loses_a_stage(run: RunState) -> bool:
    """Whether every holder of one of the stages is leaving."""
    return any(_all_leave(run, peer.stage) for peer in run.peers.leavers.values())


def _all_leave(run: RunState, stage: StageIndex | None) -> bool:
    """Whether every holder of a stage is leaving."""
    return stage is not None and all(p.leaving for p in run.peers.ready(stage))


def _is_needed(run: RunState, peer: PeerState, now: float) -> bool:
    """Whether this step should end before the peer goes.

    Between steps nothing depends on a peer, unless the next step has begun already.
    """
    if now - peer.leaving_since > LEAVE_TIMEOUT_SECONDS or not run.peers.has_complete_pipeline():
        return False
    if any(
        peer.peer in step.closing.members
        or step.table.holds_any(peer.peer)
        or step.leases.driven_by(peer.peer)
        for step in run.steps.open()
    ):
        return True
    return run.phase is not RunPhase.WAITING and _all_leave(run, peer.stage)


def _leaves_nothing_open(run: RunState, stage: StageIndex, now: float) -> bool:
    """Whether the run's version is kept without the leaving peers of a stage, or they cannot save
    it."""
    if not _all_leave(run, stage) or checkpoints.stored(run) or checkpoints.refused(run):
        return True
    if checkpoints.request(run, now):
        return False
    # No checkpoint is possible while another stage has no peer, which may be re-attaching.
    return stage_recovery.is_lost(run, now)
