"""Checkpoints: when they are made, and from which peers; the shell fetches and writes them.

Part of the pure core (design: durability). One peer per stage saves its state at one version while
training goes on.
"""

from __future__ import annotations

from swarm_coordinator.core.events import CheckpointRecord, CheckpointStored, FetchSnapshot, Persist
from swarm_coordinator.core.state.checkpoints import CheckpointFailures, PendingCheckpoint
from swarm_coordinator.core.state.peers import PeerPhase, PeerState, short
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.protocol import SaveSnapshot, SnapshotReady

CHECKPOINT_TIMEOUT_SECONDS = 600.0
"""Seconds after which an unfinished checkpoint is given up; the next one is made as usual."""

CHECKPOINT_RETRY_SECONDS = 5.0
"""Seconds before a failed checkpoint is tried again."""
MAXIMUM_FAILURES = 3
"""Attempts at a checkpoint that a leaving peer waits for."""
MAXIMUM_FAILURES_AT_END = 60
"""Attempts at the last checkpoint of the run: in these five minutes the organiser can free disk
space."""


def due(run: RunState) -> bool:
    """Whether the manifest asks for a checkpoint at this version, or the restored one is too old.

    The latter happens when a coordinator takes over with a folder of its own, and after damage:
    until one is stored, losing every holder of a stage would cost all steps since.
    """
    at_its_time = (
        run.history.version > 0 and run.history.version % run.manifest.checkpoint_steps == 0
    )
    return at_its_time or run.checkpoints.overdue


def stored(run: RunState) -> bool:
    """Whether the run's version is on the organiser's disk, or is the initialisation."""
    return run.checkpoints.stored_version == run.history.version


def refused(run: RunState) -> bool:
    """Whether the checkpoint of the run's version has failed so often that it is given up."""
    at_end = run.history.version >= run.manifest.training.steps
    maximum = MAXIMUM_FAILURES_AT_END if at_end else MAXIMUM_FAILURES
    return run.checkpoints.failures_of(run.history.version) >= maximum


def request(run: RunState, now: float) -> bool:
    """Request a snapshot from one peer per stage; True while there is something to wait for.

    A pending checkpoint of an older version is given up.
    """
    if stored(run) or refused(run):
        return False
    pending = run.checkpoints.pending
    if pending is not None and pending.version == run.history.version:
        return True
    failed, failures = run.checkpoints.failed, run.checkpoints.failures_of(run.history.version)
    if failed is not None and failures and now < failed.retry_at:
        return True
    holders: dict[StageIndex, PeerState] = {}
    for stage in run.stage_indices:
        ready = sorted(
            run.peers.ready(stage), key=lambda p: (p.leaving, p.paused, p.rates.queued, p.peer)
        )
        if not ready:
            return False
        # After a failure the next holder is asked: the failure may be due to the holder.
        holders[StageIndex(stage)] = ready[failures % len(ready)]
    pending = run.checkpoints.pending = PendingCheckpoint(run.history.version, now)
    for stage_index, holder in holders.items():
        _ask(run, pending, stage_index, holder)
    return True


def _ask(run: RunState, pending: PendingCheckpoint, stage: StageIndex, holder: PeerState) -> None:
    pending.holders[stage] = holder.peer
    pending.sessions[stage] = holder.session
    run.send(holder.peer, SaveSnapshot(version=pending.version, stage=stage))


def snapshot_ready(run: RunState, peer: PeerState, message: SnapshotReady) -> None:
    """Have the shell fetch a requested snapshot."""
    pending = run.checkpoints.pending
    if (
        pending is None
        or message.version != pending.version
        or pending.holders.get(message.stage) != peer.peer
        or peer.stage != message.stage
        or message.stage in pending.fetched
    ):
        return
    pending.fetched[message.stage] = message.sha256
    run.commands.append(FetchSnapshot(run.peers.record_of(peer), message))


def store_done(run: RunState, event: CheckpointStored, now: float) -> None:
    """Record a stored checkpoint, if it is the one requested last.

    The run may have been rolled back meanwhile, and the files of a version that was reached twice
    would belong to the abandoned history.
    """
    pending = run.checkpoints.pending
    files = {stage.stage: stage.sha256 for stage in event.stages}
    if pending is None or pending.version != event.version:
        run.note(f"a checkpoint of step {event.version} was stored too late and is not used")
        return
    if pending.fetched != files:
        store_failed(run, event.version, "its files belong to an abandoned history", now)
        return
    run.checkpoints.pending = None
    record = CheckpointRecord(event.version, event.stages)
    run.commands.append(Persist(record))
    run.checkpoints.stored, run.checkpoints.overdue = record, False
    run.note(f"checkpoint of step {event.version} is stored")


def store_failed(run: RunState, version: Version, reason: str, now: float) -> None:
    """Give up the checkpoint. It is tried again only while the run stays at the version."""
    if run.checkpoints.pending is None or run.checkpoints.pending.version != version:
        return
    run.checkpoints.pending = None
    failures = run.checkpoints.failures_of(version) + 1
    run.checkpoints.failed = CheckpointFailures(version, failures, now + CHECKPOINT_RETRY_SECONDS)
    run.note(f"the checkpoint of step {version} could not be stored: {reason}")


def check(run: RunState, now: float) -> None:
    """Replace holders that were lost before they answered, and give up after the timeout."""
    pending = run.checkpoints.pending
    if pending is None:
        return
    if now - pending.asked_at > CHECKPOINT_TIMEOUT_SECONDS:
        store_failed(run, pending.version, "it took too long", now)
        return
    for stage, holder in list(pending.holders.items()):
        if stage in pending.fetched or _can_answer(run, pending, stage):
            continue
        ready = run.peers.ready(stage) if pending.version == run.history.version else ()
        if not ready:
            reason = f"{short(holder)} of stage {stage} is gone"
            store_failed(run, pending.version, reason, now)
            return
        _ask(run, pending, stage, ready[0])


def _can_answer(run: RunState, pending: PendingCheckpoint, stage: StageIndex) -> bool:
    """Whether the holder is still attached in the same session, with the requested state."""
    peer = run.peers.get(pending.holders[stage])
    return (
        peer is not None
        and peer.session == pending.sessions[stage]
        and peer.stage == stage
        and peer.phase is PeerPhase.READY
    )
