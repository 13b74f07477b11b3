"""Downloads of a stage's state by joining and moving peers: from which source, and the outcome.

Part of the pure core: changes a RunState and queues commands, does no I/O. Which peer is to hold
which stage is decided in `swarm_coordinator.core.rules.membership` and `rebalancing`; a moving peer
fetches its next stage in the same way as a joining peer its first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from swarm_coordinator.core.state.run import (
    PeerPhase,
    PeerState,
    RunPhase,
    RunState,
    StageMove,
    StageSnapshots,
    display,
)
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import (
    AssignStage,
    PeerRecord,
    Ready,
    SaveSnapshot,
    SnapshotReady,
    SyncFailed,
)

SNAPSHOT_HOLDERS = 3
"""Holders requested at once to serve one joining peer: enough home uplinks to fill a home
downlink."""

MAX_SNAPSHOT_HOLDERS = 32
"""Largest number of holders requested at once; below it there are as many as downloading peers."""

MAX_CLOSE_DELAYS = 3
"""Number of closes that one joining peer may delay; its download may never finish."""

SNAPSHOT_GATHER_SECONDS = 2.0
"""Seconds to wait for further snapshots after the first. The other snapshots are as large and take
about as long; a download from a single source is limited to that uplink."""

SNAPSHOT_RETRY_SECONDS = 15.0
"""Seconds after which holders without a snapshot are requested again."""

SYNC_RETRY_SECONDS = 1.0
"""Seconds before a peer whose download failed is sent another source."""

MIN_BANDWIDTH_SAMPLE_BYTES = 1_000_000
"""Smallest download that counts as a measurement of bandwidth; smaller ones are dominated by
latency."""

Download = PeerState | StageMove
"""A download of a stage's state: the peer itself for its own stage, or its move to another one."""

_JOINING_PHASES = (RunPhase.WAITING, RunPhase.COLLECT, RunPhase.EVALUATING)
"""Phases in which the parameters do not change, so that a download can end in time."""


def can_join(run: RunState, stage: StageIndex | None) -> bool:
    """Whether a peer that gets the stage's state now can still take part in this step."""
    return run.phase in _JOINING_PHASES and run.round_of(stage) is None


def delay_close(run: RunState, download: Download, now: float) -> None:
    """Delay the close for this download, at most MAX_CLOSE_DELAYS times; it may never finish."""
    download.close_delays += 1
    if download.close_delays <= MAX_CLOSE_DELAYS:
        download.close_delayed_until = now + run.manifest.limits.join_hold_seconds


def find_sources(run: RunState, now: float) -> None:
    """Send every peer that awaits a stage's state its source, as soon as one is known."""
    queue = _SourceQueue(run)
    # Peers that have failed to finish in time go last: their download may never finish.
    for peer in sorted(run.peers.unsourced.values(), key=lambda peer: peer.close_delays):
        _find_source(run, peer, peer, now, queue)
    for peer in run.peers.movers.values():
        moving = peer.moving
        if moving is not None and not moving.release_first and not moving.source_assigned:
            _find_source(run, peer, moving, now, queue)


class _SourceQueue:
    """Limits the concurrent downloads of a stage's state to the number of its sources.

    State is exact within one step only. If four downloads shared one home uplink, none might finish
    within the step, and all would start over again and again.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._begun: Counter[StageIndex] | None = None
        self._full: set[StageIndex] = set()

    def is_full(self, stage: StageIndex) -> bool:
        return stage in self._full

    def try_start(self, stage: StageIndex, sources: int) -> bool:
        """Whether one more download of the stage may start; if so it is counted."""
        if self._begun is None:
            self._begun = self._count()
        if self._begun[stage] >= sources:
            self._full.add(stage)
            return False
        self._begun[stage] += 1
        return True

    def _count(self) -> Counter[StageIndex]:
        peers, version = self._run.peers, self._run.version
        downloads: list[Download] = list(peers.syncing.values())
        downloads += [p.moving for p in peers.movers.values() if p.moving and not p.moving.ready]
        return Counter(
            download.stage
            for download in downloads
            if download.source_assigned
            and download.version == version
            and download.stage is not None
        )


def _find_source(
    run: RunState, peer: PeerState, download: Download, now: float, queue: _SourceQueue
) -> None:
    """Find a source for one download."""
    if now < download.ask_not_before or not can_join(run, download.stage):
        return  # a state that is ready before the step ends would be refused
    if run.version == 0:
        _assign_from(run, peer, download, "fresh", (), ("", 0, ""), now)
    elif not _from_checkpoint(run, peer, download, now):
        _from_replicas(run, peer, download, now, queue)


def _assign_from(
    run: RunState,
    peer: PeerState,
    download: Download,
    source: Literal["fresh", "snapshot"],
    holders: tuple[PeerRecord, ...],
    item: tuple[str, int, str],
    now: float,
) -> None:
    assert download.stage is not None
    download.source_assigned, download.version, download.asked_at = True, run.version, now
    if download is not peer:
        run.rebalancing.bytes_moved += item[1]
    run.send(
        peer.peer,
        AssignStage(
            stage=download.stage,
            version=run.version,
            source=source,
            item=item[0],
            bytes=item[1],
            sha256=item[2],
            holders=holders,
            prepare=download is not peer,
        ),
    )


def _from_checkpoint(run: RunState, peer: PeerState, download: Download, now: float) -> bool:
    checkpoint = run.checkpoint
    if checkpoint is None or checkpoint.version != run.version:
        return False
    stored = next((s for s in checkpoint.stages if s.stage == download.stage), None)
    if stored is None:
        return False
    item = (stored.item, stored.bytes, stored.sha256)
    _assign_from(run, peer, download, "snapshot", (run.coordinator,), item, now)
    return True


def _from_replicas(
    run: RunState, peer: PeerState, download: Download, now: float, queue: _SourceQueue
) -> None:
    """Request snapshots from holders of the stage, or assign those that are ready."""
    stage = download.stage
    assert stage is not None
    if queue.is_full(stage):
        return
    holders = [p for p in run.ready_peers(stage) if p is not peer]
    if not holders:
        return
    snapshots = run.snapshots.get(stage)
    if (
        snapshots is None
        or snapshots.version != run.version
        or not (snapshots.asked & {p.peer for p in holders})
        or (not snapshots.ready and now - snapshots.asked_at > SNAPSHOT_RETRY_SECONDS)
    ):
        snapshots = run.snapshots[stage] = StageSnapshots(run.version, now)
        waiting = sum(
            p.phase is PeerPhase.SYNCING or p.moving is not None for p in run.peers.bound_for(stage)
        )
        for holder in holders[: min(MAX_SNAPSHOT_HOLDERS, max(SNAPSHOT_HOLDERS, waiting))]:
            snapshots.asked.add(holder.peer)
            run.send(holder.peer, SaveSnapshot(version=run.version, stage=stage))
        return
    present = {h.peer: h for h in holders if h.peer in snapshots.ready}
    outstanding = snapshots.asked & {h.peer for h in holders} - present.keys()
    if not present or (outstanding and now < snapshots.first_at + SNAPSHOT_GATHER_SECONDS):
        return
    if not queue.try_start(stage, len(present)):
        return
    # Replicas are bitwise equal, and so are their files; the majority's hash is fetched.
    item, _ = Counter(snapshots.ready[p] for p in present).most_common(1)[0]
    records = tuple(run.record_of(h) for p, h in present.items() if snapshots.ready[p] == item)
    _assign_from(run, peer, download, "snapshot", records, item, now)


def snapshot_ready(run: RunState, peer: PeerState, message: SnapshotReady, now: float) -> None:
    """Record a holder's snapshot as a source."""
    snapshots = run.snapshots.get(message.stage)
    if (
        snapshots is not None
        and snapshots.version == message.version == run.version
        and peer.peer in snapshots.asked
        and peer.stage == message.stage
    ):
        snapshots.ready[peer.peer] = (message.item, message.bytes, message.sha256)
        snapshots.first_at = min(snapshots.first_at, now)
        find_sources(run, now)


def _has_wrong_fingerprint(run: RunState, peer: PeerState, message: Ready) -> bool:
    """Whether the downloaded state differs from that of the stage's holders; flags the peer."""
    known = run.fingerprints.get(message.stage)
    if known is None or message.version != run.version or message.digest in known:
        return False
    reason = f"its download of stage {message.stage} differs from what its holders have"
    run.flag(peer, Rejection.OTHER_PARAMETERS, reason)
    return True


def ready(run: RunState, peer: PeerState, message: Ready, now: float) -> None:
    """Handle a finished download. If the run has moved on meanwhile, the download starts over."""
    stage, version = message.stage, message.version
    moving = peer.moving
    if moving is not None and moving.stage == stage and _answers_move(moving, version):
        if _has_wrong_fingerprint(run, peer, message):
            start_over(run, moving, now)
            moving.ask_not_before = now + SYNC_RETRY_SECONDS
        elif version == run.version and can_join(run, stage):
            _note_download(peer, moving, run.rebalancing.stages[stage].state_bytes, now)
            moving.ready = True
        else:
            start_over(run, moving, now)
        return
    if peer.stage != stage or not _answers_assignment(peer, version):
        return
    if version != run.version or not can_join(run, stage):
        peer.source_assigned = False
        delay_close(run, peer, now)
        find_sources(run, now)
        return
    if _has_wrong_fingerprint(run, peer, message):
        peer.source_assigned = False
        peer.ask_not_before = now + SYNC_RETRY_SECONDS
        run.snapshots.pop(stage, None)
        return
    if version > 0:
        _note_download(peer, peer, run.rebalancing.stages[stage].state_bytes, now)
    peer.phase = PeerPhase.READY
    run.on_current_history.add(peer.peer)
    run.roster_dirty = True
    run.note(f"{display(peer)} holds stage {stage} at version {version} and takes work", peer.peer)


def version_changed(run: RunState, now: float) -> None:
    """Restart every download of the previous version, at the start of the new version's step."""
    for peer in run.peers.syncing.values():
        if peer.source_assigned and peer.missed_apply is None and peer.version != run.version:
            peer.source_assigned = False
            delay_close(run, peer, now)
    for peer in run.peers.movers.values():
        if peer.moving is not None and peer.moving.source_assigned:
            start_over(run, peer.moving, now)


def _answers_move(moving: StageMove, version: Version) -> bool:
    """Whether a message answers the latest assignment of the move's state."""
    return moving.source_assigned and not moving.ready and moving.version == version


def start_over(run: RunState, moving: StageMove, now: float) -> None:
    """Restart the download of a move's destination, because the run's version has changed."""
    moving.source_assigned = moving.ready = False
    delay_close(run, moving, now)


def drop_move(run: RunState, peer: PeerState, reason: str) -> None:
    """Cancel a peer's move; it stays at its stage."""
    assert peer.moving is not None
    run.note(f"{display(peer)} does not move to stage {peer.moving.stage}: {reason}", peer.peer)
    peer.moving = None
    run.rebalancing.dropped += 1


def drop_failed_moves(run: RunState, peers: Iterable[PeerId]) -> None:
    """Cancel the moves of members of a failed attempt, which may have caused the failure."""
    for peer_id in peers:
        peer = run.peers.get(peer_id)
        if peer is not None and peer.moving is not None:
            drop_move(run, peer, "an attempt to close the step with it failed")


def _note_download(peer: PeerState, download: Download, state_bytes: int, now: float) -> None:
    """Record the rate of a finished download, from which the time of the next one is estimated."""
    if state_bytes >= MIN_BANDWIDTH_SAMPLE_BYTES and now > download.asked_at:
        peer.download_bytes_per_second = state_bytes / (now - download.asked_at)


def _answers_assignment(peer: PeerState, version: Version) -> bool:
    """Whether a message answers the latest assignment of the peer's stage."""
    return (
        peer.phase is PeerPhase.SYNCING
        and peer.source_assigned
        and peer.missed_apply is None
        and peer.version == version
    )


def sync_failed(run: RunState, peer: PeerState, message: SyncFailed, now: float) -> None:
    """Handle a failed download: another source follows after a pause, in which most causes pass."""
    moving = peer.moving
    if moving is not None and moving.stage == message.stage:
        if _answers_move(moving, message.version):
            run.note(f"stage {message.stage} could not be fetched: {message.reason}", peer.peer)
            start_over(run, moving, now)
            moving.ask_not_before = now + SYNC_RETRY_SECONDS
            run.snapshots.pop(message.stage, None)
        return
    if peer.stage != message.stage or not _answers_assignment(peer, message.version):
        return
    run.note(f"stage {message.stage} could not be fetched: {message.reason}", peer.peer)
    peer.source_assigned = False
    peer.ask_not_before = now + SYNC_RETRY_SECONDS
    run.snapshots.pop(message.stage, None)
