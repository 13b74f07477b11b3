"""Return to a checkpoint: after the loss of every holder of a stage, and after a late verdict.

Part of the pure core (design: durability). Changes a RunState and queues commands, does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection

from swarm_coordinator.core.events import Persist, RolledBack
from swarm_coordinator.core.rules import membership, round_membership, state_transfer
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.state.peers import PeerState, StageTransfer
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState, enter_phase
from swarm_coordinator.core.state.waiting import stage_names
from swarm_shared.base.types import PeerId, StageIndex, Step

REATTACH_GRACE_SECONDS = 10.0
"""Seconds that a stage may be without a peer before the run falls back to a checkpoint. Peers that
lost their connection re-attach within this time and still hold newer state."""

_RETURNING = frozenset({RunPhase.WAITING, RunPhase.COLLECT, RunPhase.CLOSING, RunPhase.EVALUATING})
"""Phases in which the run can return to a checkpoint; an apply ends first."""

RESTART_GRACE_SECONDS = 20.0
"""Seconds after a start of the coordinator before the run falls back to a checkpoint: clients retry
every twelve seconds while it is away."""


def recover_lost_stages(run: RunState, now: float) -> None:
    """Assign a peer to a stage without one; roll back to a checkpoint if its state is lost.

    The roll-back waits until every stage has a peer, and for a grace period in which peers that
    only lost the coordinator return with newer state.
    """
    if run.phase not in (RunPhase.WAITING, RunPhase.COLLECT, RunPhase.EVALUATING):
        return
    unheld = run.peers.unheld()
    if not unheld and not run.history.lost_since:
        return
    _note_changes(run, unheld)
    run.history.lost_since = {
        stage: run.history.lost_since.get(stage, now) for stage in sorted(unheld)
    }
    returning = {t.stage for t in run.peers.syncing.values() if _catches_up(run, t)}
    overdue = [s for s in run.history.lost_since if s not in returning and _overdue(run, s, now)]
    if not overdue:
        return
    for stage_index in overdue:
        _staff(run, stage_index, now)
    if run.checkpoints.stored_version == run.history.version:
        # Joining peers get the stage from the seed or the checkpoint; nothing is lost. Whatever its
        # holders have reported, no other state is left.
        for stage_index in overdue:
            run.history.fingerprints.pop(stage_index, None)
        return
    held = {p.stage for p in run.peers.values() if p.stage is not None}
    if all(stage in held for stage in run.stage_indices):
        _roll_back(run, f"every peer of {stage_names(overdue)} is gone", now)


def answer_late_verdict(run: RunState, now: float) -> None:
    """Return to the checkpoint before the unverified steps of an owner that has lost an audit.

    No step is computed a third time for a verdict: the run never goes back before the version that
    an earlier roll-back has left.
    """
    since = run.audits.unverified_since
    if since is None or run.phase not in _RETURNING:
        return
    run.audits.unverified_since = None
    version = run.history.version
    checkpoint = run.checkpoints.before(since, run.history.recomputed)
    steps = f"the steps since {since} have unverified work of an owner that lost an audit"
    if checkpoint is None and not run.history.recomputed:
        _roll_back(run, steps, now)
    elif checkpoint is not None and checkpoint.version < version:
        run.checkpoints.return_to(checkpoint)
        rest = "" if checkpoint.version < since else ", and so has the oldest checkpoint"
        _roll_back(run, steps + rest, now)
    else:
        run.note(f"{steps}, and no checkpoint is left to which the run may go back")


def _note_changes(run: RunState, unheld: Collection[StageIndex]) -> None:
    """Note the stages that have lost their last holder, and those that are held again."""
    if not run.steps.began:
        return  # before training a stage without a peer is not a loss
    for stage in sorted(set(unheld) - run.history.lost_since.keys()):
        run.note(f"stage {stage} has lost every peer: the run waits for a peer to hold it")
    for stage in sorted(run.history.lost_since.keys() - set(unheld)):
        run.note(f"stage {stage} is held again")


def is_lost(run: RunState, now: float) -> bool:
    """Whether a stage has been without a peer for longer than the grace period."""
    return any(_overdue(run, stage, now) for stage in run.history.lost_since)


def _overdue(run: RunState, stage: StageIndex, now: float) -> bool:
    return (
        now - run.history.lost_since[stage] >= REATTACH_GRACE_SECONDS
        and now - run.start.at >= RESTART_GRACE_SECONDS
    )


def _staff(run: RunState, stage: StageIndex, now: float) -> None:
    """Move a peer to a stage without one, from the stage that can best spare one.

    A stage can spare a peer if another one stays there. The peer need not hold the stage: one that
    still downloads, or is excluded from this step, may wait for a state that never comes while this
    stage is empty, and moving it costs nothing.
    """
    if any(not p.leaving for p in run.peers.at(stage)):
        return
    needed = run.manifest.stages[stage].memory
    donors: list[tuple[int, bool, PeerId]] = []
    for other in run.stage_indices:
        peers = [p for p in run.peers.at(other) if not p.leaving and not p.paused]
        holders = [p for p in peers if _holds(run, p)]
        donors.extend(
            (len(peers), not _holds(run, peer), peer.peer)
            for peer in (peers if len(peers) > 1 else ())
            # The last copy of a stage's state is not given up for another stage.
            if holders != [peer]
            and peer.profile.wanted_stage is None
            and peer.profile.memory.holds(needed)
        )
    if donors:
        *_, donor = max(donors)
        membership.reassign(run, run.peers[donor], stage, "no peer holds this stage any more", now)


def _holds(run: RunState, peer: PeerState) -> bool:
    """Whether the peer has its stage's state at the run's version, or is about to."""
    transfer = peer.transfer
    return run.peers.holds_current(peer) or (transfer is not None and _catches_up(run, transfer))


def _catches_up(run: RunState, transfer: StageTransfer) -> bool:
    """Whether a peer has returned with the averaged step that leads to the run's version."""
    return transfer.missed_apply == Step(run.history.version)


def _roll_back(run: RunState, reason: str, now: float) -> None:
    """Continue from the checkpoint's version, and have every holder fetch that state."""
    before, version = run.history.version, run.checkpoints.stored_version
    run.note(f"{reason}: the run goes back from step {before} to its checkpoint at {version}")
    round_membership.abort_all(run, reason, now)
    run.commands.append(Persist(RolledBack(version, reason)))
    run.history.roll_back(version)
    run.audits.standings.roll_back(version)
    run.persist_standings()
    run.checkpoints.roll_back()
    run.steps.ahead = None
    enter_phase(run, RunPhase.WAITING)
    for peer in list(run.peers.values()):
        stage = peer.stage
        if stage is not None:
            release(run, peer, Release.STAGE, now)
            membership.begin_sync(run, peer, stage, "back to the checkpoint", now)
    state_transfer.find_sources(run, now)
