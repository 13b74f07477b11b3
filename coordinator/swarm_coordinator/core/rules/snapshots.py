"""Snapshots of a stage's state: which holders save one, and which announced file is the right one.

Part of the pure core. A snapshot becomes the state of joining peers, a checkpoint, and in the end
the exported model, so it must not depend on one peer's statement. Equal states make equal files:
several holders save the same version, each announces the size and hash of its file, and the file
that most of their owners announced is used. The size of a state follows from the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm_coordinator.core.state.checkpoints import SnapshotFile, StageSnapshots
from swarm_coordinator.core.state.peers import PeerPhase, PeerState, owner_of
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust.majority import Decision, Statement
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import SaveSnapshot, SnapshotReady
from swarm_shared.scheduling.placement.stage_sizes import is_size_of_state_file

SNAPSHOT_HOLDERS = 3
"""Holders that save a snapshot at once: the fewest of which two outvote one, and enough home
uplinks to fill a home downlink."""


def voters_first(run: RunState, holders: Sequence[PeerState]) -> list[PeerState]:
    """The holders in the same order, but first one holder of each owner that votes."""
    remaining_voters = set(run.audits.voters({owner_of(holder) for holder in holders}))
    first: list[PeerState] = []
    for holder in holders:
        if owner_of(holder) in remaining_voters:
            remaining_voters.discard(owner_of(holder))
            first.append(holder)
    chosen = {holder.peer for holder in first}
    return first + [holder for holder in holders if holder.peer not in chosen]


def request(
    run: RunState, stage: StageIndex, version: Version, holders: Iterable[PeerState], now: float
) -> StageSnapshots:
    """Request a snapshot of the stage from each of the holders."""
    snapshots = StageSnapshots(stage, version, now)
    for holder in holders:
        snapshots.asked[holder.peer] = holder.session
        snapshots.owners[holder.peer] = owner_of(holder)
        run.send(holder.peer, SaveSnapshot(version=version, stage=stage))
    return snapshots


def is_answer(snapshots: StageSnapshots, peer: PeerState, version: Version) -> bool:
    """Whether a peer's message about a snapshot of this version answers the request."""
    return version == snapshots.version and snapshots.asked.get(peer.peer) == peer.session


def announced(
    run: RunState, snapshots: StageSnapshots, peer: PeerState, message: SnapshotReady, now: float
) -> bool:
    """Record a holder's announcement of its file, if it answers the request.

    A holder whose file does not have the size of the state is flagged; then the result is False.
    """
    if not is_answer(snapshots, peer, message.version):
        return True
    load = run.rebalancing.stages[snapshots.stage]
    state_bytes = load.state_bytes - load.frozen_bytes
    if not is_size_of_state_file(message.bytes, state_bytes):
        reason = (
            f"its snapshot of stage {snapshots.stage} has {message.bytes} bytes, the state "
            f"has {state_bytes}"
        )
        run.flag(peer, Rejection.OTHER_PARAMETERS, reason)
        return False
    snapshots.ready[peer.peer] = SnapshotFile(message.item, message.bytes, message.sha256)
    snapshots.first_at = min(snapshots.first_at, now)
    return True


def failed(snapshots: StageSnapshots, peer: PeerState) -> None:
    """Remove a holder that has no such snapshot, or a wrong one."""
    snapshots.asked.pop(peer.peer, None)
    snapshots.ready.pop(peer.peer, None)


def outstanding(run: RunState, snapshots: StageSnapshots) -> bool:
    """Whether a holder that has not answered may still do so: it is attached as when it was asked.

    The request is lost with the session.
    """
    return any(
        peer.session == session and peer.stage == snapshots.stage and peer.phase is PeerPhase.READY
        for peer_id, session in snapshots.asked.items()
        if peer_id not in snapshots.ready and (peer := run.peers.get(peer_id)) is not None
    )


def chosen(
    run: RunState, snapshots: StageSnapshots, now: float, patience_seconds: float
) -> tuple[SnapshotFile, tuple[PeerId, ...]] | None:
    """Return the file that counts, and the holders that announced it; None while that is open.

    It is open while nothing is announced and, for `patience_seconds` after the first announcement,
    while the owners of silent holders could still outvote the file.
    """
    decision = decided(run, snapshots)
    if decision is None:
        return None
    voters = run.audits.voters({snapshots.owners[peer] for peer in snapshots.asked})
    majority = 2 * len(decision.owners & voters) > len(voters)
    in_time = now < snapshots.first_at + patience_seconds
    if not majority and in_time and outstanding(run, snapshots):
        return None
    return decision.value, tuple(
        sorted(p for p, f in snapshots.ready.items() if f == decision.value)
    )


def decided(run: RunState, snapshots: StageSnapshots) -> Decision[SnapshotFile] | None:
    """The file that counts among those announced so far; None if none is announced."""
    return run.audits.decide(
        Statement(peer, snapshots.owners[peer], snapshots.asked[peer], file)
        for peer, file in snapshots.ready.items()
    )
