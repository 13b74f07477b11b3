"""Checkpoints: when they are made, and from which peers; the shell fetches and writes them.

Part of the pure core (design: durability). Several peers per stage save their state at one version
while training goes on; which of their files is fetched is decided in
`swarm_coordinator.core.rules.snapshots`.
"""

from __future__ import annotations

from swarm_coordinator.core.events import CheckpointRecord, CheckpointStored, FetchSnapshot, Persist
from swarm_coordinator.core.rules import membership, snapshots
from swarm_coordinator.core.state.checkpoints import (
    CheckpointFailures,
    PendingCheckpoint,
    SnapshotFile,
    StageSnapshots,
)
from swarm_coordinator.core.state.peers import PeerState
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.protocol import SnapshotFailed, SnapshotReady

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
    """Request snapshots of every stage; True while there is something to wait for.

    A pending checkpoint of an older version is given up.
    """
    if stored(run) or refused(run):
        return False
    pending = run.checkpoints.pending
    if pending is not None and pending.version == run.history.version:
        return True
    failed = run.checkpoints.failed
    if failed is not None and failed.version == run.history.version and now < failed.retry_at:
        return True
    holders = {stage: _holders(run, stage) for stage in run.stage_indices}
    if not all(holders.values()):
        return False
    version = run.history.version
    pending = run.checkpoints.pending = PendingCheckpoint(version, now)
    for stage, stage_holders in holders.items():
        pending.stages[stage] = snapshots.request(run, stage, version, stage_holders, now)
    return True


def _holders(run: RunState, stage: StageIndex) -> list[PeerState]:
    ready = sorted(
        run.peers.ready(stage), key=lambda p: (p.leaving, p.paused, p.rates.queued, p.peer)
    )
    # After a failure the next holders are asked: the failure may be due to the holders.
    failures = run.checkpoints.failures_of(run.history.version)
    start = failures % len(ready) if ready else 0
    ordered = snapshots.voters_first(run, ready[start:] + ready[:start])
    return ordered[: snapshots.SNAPSHOT_HOLDERS]


def snapshot_ready(run: RunState, peer: PeerState, message: SnapshotReady, now: float) -> None:
    """Record a holder's snapshot; `check` has the shell fetch the one that counts."""
    pending = run.checkpoints.pending
    snapshot_set = pending.stages.get(message.stage) if pending is not None else None
    if (
        pending is not None
        and snapshot_set is not None
        and peer.stage == message.stage
        and not snapshots.announced(run, snapshot_set, peer, message, now)
    ):
        reason = f"a snapshot of stage {message.stage} does not have the size of its state"
        _remove_holder(run, pending, snapshot_set, peer, reason, now)


def snapshot_failed(run: RunState, peer: PeerState, message: SnapshotFailed, now: float) -> None:
    """Handle a holder's message that it has no snapshot."""
    pending = run.checkpoints.pending
    snapshot_set = pending.stages.get(message.stage) if pending is not None else None
    if (
        pending is not None
        and snapshot_set is not None
        and snapshots.is_answer(snapshot_set, peer, message.version)
    ):
        _remove_holder(run, pending, snapshot_set, peer, message.reason, now)


def _remove_holder(
    run: RunState, pending: PendingCheckpoint, snapshot_set: StageSnapshots, peer: PeerState,
    reason: str, now: float,
) -> None:  # fmt: skip
    """Remove a holder without a snapshot; if no holder is left, the checkpoint has failed."""
    if snapshot_set.stage in pending.fetched:
        return
    snapshots.failed(snapshot_set, peer)
    if not snapshot_set.asked:
        store_failed(run, pending.version, reason, now)


def _fetch_when_chosen(
    run: RunState, pending: PendingCheckpoint, snapshot_set: StageSnapshots, now: float
) -> None:
    choice = snapshots.chosen(run, snapshot_set, now, run.manifest.limits.lease_seconds)
    if choice is None or snapshot_set.stage in pending.fetched:
        return
    file, holders = choice
    # A holder may have attached again since, without a stage.
    present = [p for p in map(run.peers.get, holders) if p is not None and p.stage is not None]
    if not present:
        return
    pending.fetched[snapshot_set.stage] = file.sha256
    records = tuple(run.peers.record_of(peer) for peer in present)
    run.commands.append(FetchSnapshot(pending.version, snapshot_set.stage, records, *file))
    _resync_others(run, snapshot_set, file, now)


def _resync_others(
    run: RunState, snapshot_set: StageSnapshots, file: SnapshotFile, now: float
) -> None:
    """Flag and sync anew the holders whose file differs from the one of the majority.

    Unlike devices may hold different states. A peer whose state has been equal to the majority's
    before is like it, so that a later difference is attributed to this peer alone.
    """
    decision = snapshots.decided(run, snapshot_set)
    if decision is None or decision.value != file or not decision.has_majority:
        return
    for peer_id, announced in list(snapshot_set.ready.items()):
        peer = run.peers.get(peer_id)
        if announced == file or peer is None or not peer.matched_majority:
            continue
        if peer.session == snapshot_set.asked[peer_id] and peer.stage == snapshot_set.stage:
            reason = f"its snapshot of stage {snapshot_set.stage} differs from the majority's"
            run.flag(peer, Rejection.OTHER_PARAMETERS, reason)
            membership.resync(run, peer, reason, now)


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
    run.checkpoints.store(record)
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
    """Have the shell fetch what is known by now, replace holders that were lost before any
    answered, and give up after the timeout."""
    pending = run.checkpoints.pending
    if pending is None:
        return
    if now - pending.asked_at > CHECKPOINT_TIMEOUT_SECONDS:
        store_failed(run, pending.version, "it took too long", now)
        return
    for stage, snapshot_set in pending.stages.items():
        if stage in pending.fetched:
            continue
        _fetch_when_chosen(run, pending, snapshot_set, now)
        if stage in pending.fetched or snapshots.outstanding(run, snapshot_set):
            continue
        holders = _holders(run, stage) if pending.version == run.history.version else []
        if not holders:
            reason = f"every holder of stage {stage} that was asked is gone"
            store_failed(run, pending.version, reason, now)
            return
        pending.stages[stage] = snapshots.request(run, stage, pending.version, holders, now)
