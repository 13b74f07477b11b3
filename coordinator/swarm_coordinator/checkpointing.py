"""When checkpoints are made and of what; fetching and writing them is the shell's part.

Part of the pure core (design: durability). One peer per stage saves its state at one version;
training goes on meanwhile.
"""

from __future__ import annotations

from swarm_coordinator.events import CheckpointRecord, CheckpointStored, FetchSnapshot, Persist
from swarm_coordinator.state import PeerState, PendingCheckpoint, RunState, short
from swarm_shared.messages import SaveSnapshot, SnapshotReady
from swarm_shared.types import PeerId, StageIndex, Version

CHECKPOINT_SECONDS = 600.0
"""A checkpoint that is not stored by then is given up; the next one is tried as usual."""


def due(run: RunState) -> bool:
    """Whether the manifest wants a checkpoint at the run's version."""
    return run.version > 0 and run.version % run.manifest.checkpoint_steps == 0


def stored(run: RunState) -> bool:
    """Whether the run's version is on the organiser's disk (or is the initialisation)."""
    if run.version == 0:
        return True
    return run.checkpoint is not None and run.checkpoint.version == run.version


def request(run: RunState, now: float) -> bool:
    """Ask one peer per stage for a snapshot; False when some stage has none to ask."""
    if stored(run) or run.checkpoint_refused_version == run.version:
        return False
    pending = run.pending_checkpoint
    if pending is not None and pending.version == run.version:
        return True
    holders: dict[StageIndex, PeerId] = {}
    for stage in run.stage_indices:
        ready = run.ready_peers(stage)
        if not ready:
            return False
        holders[StageIndex(stage)] = min(ready, key=lambda p: (p.leaving, p.queued, p.peer)).peer
    run.pending_checkpoint = PendingCheckpoint(run.version, now, holders)
    for stage_index, holder in holders.items():
        run.send(holder, SaveSnapshot(version=run.version, stage=stage_index))
    return True


def snapshot_ready(run: RunState, peer: PeerState, message: SnapshotReady) -> None:
    pending = run.pending_checkpoint
    if (
        pending is None
        or message.version != pending.version
        or pending.holders.get(message.stage) != peer.peer
        or message.stage in pending.fetched
    ):
        return
    pending.fetched.add(message.stage)
    run.commands.append(FetchSnapshot(run.record_of(peer), message))


def store_done(run: RunState, event: CheckpointStored) -> None:
    if run.pending_checkpoint is not None and run.pending_checkpoint.version == event.version:
        run.pending_checkpoint = None
    record = CheckpointRecord(event.version, event.stages)
    run.commands.append(Persist(record))
    run.checkpoint = record
    run.note(f"checkpoint of step {event.version} is stored")


def store_failed(run: RunState, version: Version, reason: str) -> None:
    if run.pending_checkpoint is not None and run.pending_checkpoint.version == version:
        run.pending_checkpoint = None
        run.checkpoint_refused_version = version
        run.note(f"the checkpoint of step {version} could not be stored: {reason}")


def check(run: RunState, now: float) -> None:
    """Replace holders that died before they had answered, and give up in the end."""
    pending = run.pending_checkpoint
    if pending is None:
        return
    if now - pending.asked_at > CHECKPOINT_SECONDS:
        store_failed(run, pending.version, "it took too long")
        return
    for stage, holder in list(pending.holders.items()):
        if stage in pending.fetched or holder in run.peers:
            continue
        ready = run.ready_peers(stage) if pending.version == run.version else []
        if not ready:
            store_failed(run, pending.version, f"{short(holder)} of stage {stage} is gone")
            return
        pending.holders[stage] = ready[0].peer
        run.send(ready[0].peer, SaveSnapshot(version=pending.version, stage=stage))
