"""Downloads of a stage's state by joining and moving peers: from which source, and the outcome.

Part of the pure core: changes a RunState and queues commands, does no I/O. Which peer is to hold
which stage is decided in `swarm_coordinator.core.rules.membership` and `rebalancing`; a moving peer
fetches its next stage in the same way as a joining peer its first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

from swarm_coordinator.core.rules import held_up, snapshots
from swarm_coordinator.core.state.checkpoints import StageSnapshots
from swarm_coordinator.core.state.peers import PeerState, StageTransfer, display, owner_of
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import (
    AssignStage,
    PeerRecord,
    Ready,
    SnapshotReady,
    SyncFailed,
)
from swarm_shared.run.manifest import initial_item

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

_JOINING_PHASES = (RunPhase.WAITING, RunPhase.COLLECT, RunPhase.EVALUATING)
"""Phases in which the parameters do not change, so that a download can end in time."""


def can_join(run: RunState, stage: StageIndex | None) -> bool:
    """Whether a peer that gets the stage's state now can still take part in this step."""
    return run.phase in _JOINING_PHASES and run.steps.round_of(stage) is None


def delay_close(run: RunState, transfer: StageTransfer, now: float) -> None:
    """Delay the close for this transfer, at most MAX_CLOSE_DELAYS times; it may never finish."""
    transfer.close_delays += 1
    if transfer.close_delays <= MAX_CLOSE_DELAYS:
        transfer.close_delayed_until = now + run.manifest.limits.join_hold_seconds


def delayed_stages(run: RunState, now: float) -> set[StageIndex]:
    """Return the stages whose close a download delays now: stages that a peer joins, and both
    stages of a move."""
    delayed = chain(_joins(run, now), _moves(run, now))
    stages = {stage for peer, transfer in delayed for stage in (peer.stage, transfer.stage)}
    return {stage for stage in stages if stage is not None}


def charge_downloads(run: RunState, now: float) -> None:
    """Charge the delay of a close to the peers whose downloads delay it.

    Called at every tick while the table of the step is complete.
    """
    step = run.steps.current
    if run.phase is not RunPhase.COLLECT or step is None or step.complete_at is None:
        return
    hold_seconds = run.manifest.limits.join_hold_seconds
    since = max(step.complete_at, step.close_not_before)
    if not since < now < step.complete_at + hold_seconds:
        return
    for peer, transfer in list(chain(_joins(run, now), _moves(run, now))):
        begun_at = transfer.close_delayed_until - hold_seconds
        held_up.charge(run, peer, max(since, begun_at), now, now)


def _joins(run: RunState, now: float) -> Iterator[tuple[PeerState, StageTransfer]]:
    """Peers that download the current version."""
    for peer_id, transfer in run.peers.syncing.items():
        peer = run.peers[peer_id]
        if (
            not peer.leaving
            and now < transfer.close_delayed_until
            and run.steps.round_of(transfer.stage) is None
            and _is_waited_for(run, peer, transfer, now)
        ):
            yield peer, transfer


def _moves(run: RunState, now: float) -> Iterator[tuple[PeerState, StageTransfer]]:
    """Moving peers that had to start over."""
    for peer_id, moving in run.peers.movers.items():
        peer = run.peers[peer_id]
        if (
            not moving.ready
            and now < moving.close_delayed_until
            and run.steps.round_of(peer.stage) is None
            and run.steps.round_of(moving.stage) is None
            and _is_waited_for(run, peer, moving, now)
        ):
            yield peer, moving


def _is_waited_for(run: RunState, peer: PeerState, transfer: StageTransfer, now: float) -> bool:
    return not held_up.is_spent(run, peer, now) and not held_up.kept_apart(
        run, peer, transfer.stage, now
    )


def find_sources(run: RunState, now: float) -> None:
    """Send every peer that awaits a stage's state its source, as soon as one is known."""
    queue = _SourceQueue(run)
    # Peers that have failed to finish in time go last: their download may never finish.
    joins = sorted(run.peers.unsourced.items(), key=lambda entry: entry[1].close_delays)
    for peer, transfer in (*joins, *run.peers.movers.items()):
        # A state that is ready before the step ends would be refused.
        if (
            not transfer.release_first
            and not transfer.source_assigned
            and run.peers.has_partner(peer, transfer)
            and now >= transfer.ask_not_before
            and can_join(run, transfer.stage)
            and not held_up.kept_apart(run, run.peers[peer], transfer.stage, now)
        ):
            _find_source(run, run.peers[peer], transfer, now, queue)


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
        """Count one more download of the stage; False if it may not start yet."""
        if self._begun is None:
            self._begun = self._count()
        if self._begun[stage] >= sources:
            self._full.add(stage)
            return False
        self._begun[stage] += 1
        return True

    def _count(self) -> Counter[StageIndex]:
        peers, version = self._run.peers, self._run.history.version
        return Counter(
            transfer.stage
            for transfer in chain(peers.syncing.values(), peers.movers.values())
            if transfer.source_assigned and not transfer.ready and transfer.version == version
        )


def _find_source(
    run: RunState, peer: PeerState, transfer: StageTransfer, now: float, queue: _SourceQueue
) -> None:
    """Find a source for one transfer."""
    if run.history.version == 0:
        _from_initialisation(run, peer, transfer, now)
    elif not _from_checkpoint(run, peer, transfer, now):
        _from_replicas(run, peer, transfer, now, queue)


def _assign_from(
    run: RunState,
    peer: PeerState,
    transfer: StageTransfer,
    source: Literal["fresh", "snapshot"],
    holders: tuple[PeerRecord, ...],
    item: tuple[str, int, str],
    now: float,
) -> None:
    run.peers.assign_source(peer, transfer, now)
    moves = peer.moving is not None
    if moves:
        run.rebalancing.bytes_moved += item[1]
    run.send(
        peer.peer,
        AssignStage(
            stage=transfer.stage,
            version=run.history.version,
            source=source,
            item=item[0],
            bytes=item[1],
            sha256=item[2],
            holders=holders,
            prepare=moves,
        ),
    )


def _from_initialisation(
    run: RunState, peer: PeerState, transfer: StageTransfer, now: float
) -> None:
    """Assign the source of version 0: the seed, or the file that the manifest names. Adapters
    always come from the seed; the file has the frozen parameters."""
    if not run.manifest.initial or run.manifest.model.has_adapters:
        _assign_from(run, peer, transfer, "fresh", (), ("", 0, ""), now)
        return
    state = run.manifest.initial[transfer.stage]
    item = (initial_item(transfer.stage), state.bytes, state.sha256)
    _assign_from(run, peer, transfer, "snapshot", (run.start.record,), item, now)


def _from_checkpoint(run: RunState, peer: PeerState, transfer: StageTransfer, now: float) -> bool:
    checkpoint = run.checkpoints.stored
    if checkpoint is None or checkpoint.version != run.history.version:
        return False
    stored = next((s for s in checkpoint.stages if s.stage == transfer.stage), None)
    if stored is None:
        return False
    item = (stored.item, stored.bytes, stored.sha256)
    _assign_from(run, peer, transfer, "snapshot", (run.start.record,), item, now)
    return True


def _from_replicas(
    run: RunState, peer: PeerState, transfer: StageTransfer, now: float, queue: _SourceQueue
) -> None:
    """Request snapshots from holders of the stage, or assign those that are ready."""
    stage = transfer.stage
    if queue.is_full(stage):
        return
    snapshot_set = run.checkpoints.snapshots.get(stage)
    if (
        snapshot_set is None
        or snapshot_set.version != run.history.version
        or not (asked_holders := _asked_holders(run, snapshot_set))
        or (not snapshot_set.ready and now - snapshot_set.asked_at > SNAPSHOT_RETRY_SECONDS)
    ):
        if holders := snapshots.voters_first(run, run.peers.ready(stage)):
            waiting = sum(p.transfer is not None for p in run.peers.bound_for(stage))
            limit = min(MAX_SNAPSHOT_HOLDERS, max(snapshots.SNAPSHOT_HOLDERS, waiting))
            run.checkpoints.snapshots[stage] = snapshots.request(
                run, stage, run.history.version, holders[:limit], now
            )
        return
    gathering = now < snapshot_set.first_at + SNAPSHOT_GATHER_SECONDS
    choice = snapshots.chosen(run, snapshot_set, now, SNAPSHOT_GATHER_SECONDS)
    if choice is None or (gathering and snapshots.outstanding(run, snapshot_set)):
        return
    file, announcers = choice
    records = tuple(run.peers.record_of(h) for h in asked_holders if h.peer in announcers)
    if records and queue.try_start(stage, len(records)):
        transfer.sources = announcers
        _assign_from(run, peer, transfer, "snapshot", records, file, now)


def _asked_holders(run: RunState, snapshot_set: StageSnapshots) -> list[PeerState]:
    """The peers that were asked for a snapshot, hold the stage and take part in this step."""
    return [
        holder
        for peer_id in snapshot_set.asked
        if (holder := run.peers.get(peer_id)) is not None
        and holder.stage == snapshot_set.stage
        and run.peers.holds_current(holder)
    ]


def snapshot_ready(run: RunState, peer: PeerState, message: SnapshotReady, now: float) -> None:
    """Record a holder's snapshot, from which `find_sources` takes the source of a download."""
    snapshot_set = run.checkpoints.snapshots.get(message.stage)
    if (
        snapshot_set is not None
        and snapshot_set.version == run.history.version
        and peer.stage == message.stage
    ):
        snapshots.announced(run, snapshot_set, peer, message, now)


def _has_wrong_fingerprint(run: RunState, message: Ready) -> bool:
    """Whether the downloaded state differs from that of the stage's holders."""
    current = message.version == run.history.version
    return current and not run.history.may_be(message.stage, message.digest)


def _reject_download(run: RunState, peer: PeerState, transfer: StageTransfer, now: float) -> None:
    """Flag the ends of a download with a wrong fingerprint, and discard the file if all its sources
    have one owner.

    A file that several owners announced is the stage's state, so the peer misreports what it has
    loaded. With a single source nothing shows which end is at fault.
    """
    snapshot_set = run.checkpoints.snapshots.get(transfer.stage)
    sources = [source for p in transfer.sources if (source := run.peers.get(p)) is not None]
    ends = [peer]
    if len({owner_of(source) for source in sources}) == 1:
        ends += sources
    for end in ends:
        reason = f"a download of stage {transfer.stage} differs from what the stage's holders have"
        run.flag(end, Rejection.OTHER_PARAMETERS, reason)
        if snapshot_set is not None:
            snapshots.failed(snapshot_set, end)
    _retry_later(run, peer, transfer, now)


def _answered(peer: PeerState, stage: StageIndex, version: Version) -> StageTransfer | None:
    """The peer's transfer, if a message about this state answers its latest assignment."""
    transfer = peer.transfer
    if transfer is None or transfer.stage != stage or not transfer.awaits(version):
        return None
    return transfer


def ready(run: RunState, peer: PeerState, message: Ready, now: float) -> None:
    """Handle a finished download. If the run has moved on meanwhile, the download starts over."""
    stage, version = message.stage, message.version
    transfer = _answered(peer, stage, version)
    if transfer is None:
        return
    moves = peer.moving is not None
    if version != run.history.version or not can_join(run, stage):
        _start_over(run, peer, transfer, now)
        if not moves:
            find_sources(run, now)
    elif _has_wrong_fingerprint(run, message):
        _reject_download(run, peer, transfer, now)
    else:
        if version > 0:
            _note_download(run, peer, transfer, now)
        if moves:
            transfer.ready = True
            return
        run.hold(peer, stage, version)
        run.history.members.add(peer.peer)
        run.roster.dirty = True
        run.note(
            f"{display(peer)} holds stage {stage} at version {version} and takes work", peer.peer
        )


def sync_failed(run: RunState, peer: PeerState, message: SyncFailed, now: float) -> None:
    """Handle a failed download: another source follows after a pause, in which most causes pass."""
    transfer = _answered(peer, message.stage, message.version)
    if transfer is not None:
        run.note(f"stage {message.stage} could not be fetched: {message.reason}", peer.peer)
        _fail(run, peer, transfer, now)


def version_changed(run: RunState, now: float) -> None:
    """Restart every download of the previous version, at the start of the new version's step."""
    for peer, transfer in chain(list(run.peers.syncing.items()), list(run.peers.movers.items())):
        if transfer.source_assigned and transfer.missed_apply is None:
            _start_over(run, run.peers[peer], transfer, now)


def _start_over(run: RunState, peer: PeerState, transfer: StageTransfer, now: float) -> None:
    """Restart a download, because the run's version has changed."""
    run.peers.lose_source(peer, transfer)
    delay_close(run, transfer, now)


def _fail(run: RunState, peer: PeerState, transfer: StageTransfer, now: float) -> None:
    """Restart a download from other snapshots after a pause, because its source was at fault."""
    run.checkpoints.snapshots.pop(transfer.stage, None)
    _retry_later(run, peer, transfer, now)


def _retry_later(run: RunState, peer: PeerState, transfer: StageTransfer, now: float) -> None:
    """Restart a download after a pause."""
    run.peers.lose_source(peer, transfer)
    transfer.ask_not_before = now + SYNC_RETRY_SECONDS
    if peer.moving is not None:
        delay_close(run, transfer, now)  # a move that fails again and again is given up


def drop_move(run: RunState, peer: PeerState, reason: str) -> None:
    """Cancel a peer's move; it stays at its stage."""
    run.note(f"{display(peer)} does not move to stage {peer.goes_to}: {reason}", peer.peer)
    run.peers.cancel_move(peer)
    run.rebalancing.dropped += 1


def drop_failed_moves(run: RunState, peers: Iterable[PeerId]) -> None:
    """Cancel the moves of members of a failed attempt, which may have caused the failure."""
    for peer_id in peers:
        drop_move(run, run.peers[peer_id], "an attempt to close the step with it failed")


def _note_download(run: RunState, peer: PeerState, transfer: StageTransfer, now: float) -> None:
    """Record the rate of a finished download, from which the time of the next one is estimated."""
    state_bytes = run.rebalancing.stages[transfer.stage].state_bytes
    if state_bytes >= MIN_BANDWIDTH_SAMPLE_BYTES and now > transfer.asked_at:
        peer.rates.download_bytes_per_second = state_bytes / (now - transfer.asked_at)
