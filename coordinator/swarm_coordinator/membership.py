"""Who takes part and with which stage: attaching, losing, assigning, syncing, leaving.

Part of the pure core: changes a RunState and queues commands, does no I/O.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from swarm_coordinator import progress, roster
from swarm_coordinator.events import CloseSession, PeerAttached
from swarm_coordinator.figures import Rejection
from swarm_coordinator.state import (
    Moving,
    PeerPhase,
    PeerState,
    RunPhase,
    RunState,
    Snapshots,
    display,
)
from swarm_shared.errors import CapacityError
from swarm_shared.messages import (
    Apply,
    AssignStage,
    Goodbye,
    NotFinite,
    PeerRecord,
    Ready,
    Refused,
    SaveSnapshot,
    SnapshotReady,
    SyncFailed,
    Welcome,
)
from swarm_shared.placement import most_underserved_stage
from swarm_shared.types import Generation, PeerId, StageIndex, Version

SNAPSHOT_HOLDERS = 3
"""Peers asked to serve a newcomer at once: enough to fill a home downlink from home uplinks."""

MOST_SNAPSHOT_HOLDERS = 32
"""When many want the same stage, there are as many holders as of them, up to so many."""

MAXIMUM_HOLDS = 3
"""Closes that wait for the same newcomer, so that one that never manages cannot stop the run."""

ASK_AGAIN_SECONDS = 15.0
"""Holders that have not saved a snapshot by then are asked again, or others are."""

SYNC_RETRY_SECONDS = 1.0

TELLING_BYTES = 1_000_000
"""Downloads below this say more about waiting than about the line."""

JOINING_PHASES = (RunPhase.WAITING, RunPhase.COLLECT, RunPhase.EVALUATING)
"""Phases in which parameters stand still, so that a download can end in time."""


def attach(run: RunState, event: PeerAttached, now: float) -> None:
    """Take a client in, whether new, restarted, or back with the stage it holds."""
    hello = event.hello
    assert event.peer not in run.peers, "an older attachment is removed first"
    peer = PeerState(
        peer=event.peer,
        session=event.session,
        certificate=event.certificate,
        name=hello.name,
        addresses=hello.addresses,
        carrier=hello.carrier,
        device=hello.device,
        memory_bytes=hello.memory_bytes,
        trainer=hello.trainer,
        wanted_stage=hello.wanted_stage,
        last_heard=now,
        reachability=hello.reachability,
        offers_relay=hello.offers_relay,
    )
    roster.attached(run, event.peer)
    run.peers[event.peer] = peer
    current = _still_current(run, event)
    must_apply = _still_has_to_apply(run, event)
    run.send(
        event.peer,
        Welcome(
            generation=Generation(run.generation),
            certificate=event.certificate,
            manifest=run.manifest_envelope,
            stages=run.stage_rows(),
            directory=_directory(run),
            keep=current or must_apply,
            heartbeat_seconds=roster.heartbeat_seconds(run),
        ),
    )
    if must_apply:
        _send_missed_apply(run, peer, hello.stage, now)
    elif current:
        peer.stage, peer.version, peer.phase = hello.stage, hello.version, PeerPhase.READY
        run.roster_dirty = True
        run.note(f"{display(peer)} is back with stage {peer.stage}", peer.peer)
        for receipt in event.receipts:
            if receipt.peer == event.peer:
                progress.commit(run, receipt)
    else:
        run.note(f"{display(peer)} was admitted ({hello.device})", peer.peer)


def _still_current(run: RunState, event: PeerAttached) -> bool:
    """A peer that lost its link, or the coordinator its memory, and that holds a stage as it is."""
    hello = event.hello
    return (
        hello.stage is not None
        and 0 <= hello.stage < run.manifest.stage_count
        and hello.version == run.version
        # After a roll-back the same number can mean the state of the history that was given up.
        and (not run.rolled_back or event.peer in run.on_branch)
    )


def _still_has_to_apply(run: RunState, event: PeerAttached) -> bool:
    """A peer that averaged the last applied step and lost the coordinator before it was told."""
    hello, last = event.hello, run.last_applied
    return (
        last is not None
        and Version(last.step) == run.version
        and hello.stage is not None
        and 0 <= hello.stage < run.manifest.stage_count
        and hello.version == run.version - 1
        and hello.averaged_attempt == last.attempt
    )


def _send_missed_apply(
    run: RunState, peer: PeerState, stage: StageIndex | None, now: float
) -> None:
    last = run.last_applied
    assert last is not None
    assert stage is not None
    peer.stage, peer.version, peer.phase = stage, Version(run.version - 1), PeerPhase.SYNCING
    peer.source_asked, peer.catching_up = True, last.step
    _hold(run, peer, now)
    run.send(
        peer.peer,
        Apply(
            step=last.step,
            attempt=last.attempt,
            global_norm=last.global_norm,
            learning_rate=last.learning_rate,
        ),
    )
    run.note(f"{display(peer)} is back and still has to apply step {last.step}", peer.peer)


def _directory(run: RunState) -> tuple[str, ...]:
    """p2pd addresses of some peers, through which a newcomer enters hivemind's DHT."""
    found: list[str] = []
    for peer in run.peers.with_carrier.values():
        if peer.carrier is not None:
            found.extend(f"{a}/p2p/{peer.carrier.peer}" for a in peer.carrier.addresses[:2])
        if len(found) >= 8:
            break
    return tuple(found[:8])


def choose_stage(run: RunState, peer: PeerState, proposal: StageIndex, now: float) -> None:
    """Grant a newcomer's own choice, or correct it: two newcomers may have chosen at once."""
    rows = run.stage_rows()
    if peer.stage is not None or peer.leaving:
        return
    wanted = peer.wanted_stage
    if wanted is not None and not 0 <= wanted < len(rows):
        refuse(run, peer, f"there is no stage {wanted}; the run has stages 0 to {len(rows) - 1}")
        return
    try:
        stage = most_underserved_stage(
            rows if wanted is None else (rows[wanted],), peer.memory_bytes
        )
    except CapacityError as error:
        refuse(run, peer, str(error))
        return
    if wanted is not None:
        reason = "the volunteer chose this stage"
    elif stage == proposal:
        reason = "the most under-served stage that fits"
    else:
        reason = f"stage {proposal} was taken meanwhile; stage {stage} needs a peer more"
    assign(run, peer, stage, reason, now)


def refuse(run: RunState, peer: PeerState, reason: str) -> None:
    run.send(peer.peer, Refused(code="capacity", reason=reason))
    run.commands.append(CloseSession(peer.peer, reason))
    run.note(f"{display(peer)} was refused: {reason}", peer.peer)
    del run.peers[peer.peer]


def assign(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """Give a stage to a peer, and tell it where to get it from if that is known already."""
    give(run, peer, stage, reason, now)
    find_sources(run, now)


def give(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """The stage is the peer's; where its state comes from is settled by `find_sources`."""
    peer.stage, peer.phase, peer.version = stage, PeerPhase.SYNCING, Version(0)
    peer.source_asked, peer.catching_up, peer.holds = False, None, 0
    peer.moving = None
    peer.early_receipts.clear()
    _hold(run, peer, now)
    run.note(f"{display(peer)} takes stage {stage}: {reason}", peer.peer)


def _hold(run: RunState, way: PeerState | Moving, now: float) -> None:
    """Let the close wait for this newcomer, a few times at most: it may never manage."""
    way.holds += 1
    if way.holds <= MAXIMUM_HOLDS:
        way.hold_until = now + run.manifest.limits.join_hold_seconds


def find_sources(run: RunState, now: float) -> None:
    """Tell all who are to get a stage where to get it from, as soon as that is known."""
    for peer in list(run.peers.unsourced.values()):
        _find_source(run, peer, peer, now)
    for peer in run.peers.movers.values():
        moving = peer.moving
        if moving is not None and not moving.gap and not moving.source_asked:
            _find_source(run, peer, moving, now)


def _find_source(run: RunState, peer: PeerState, way: PeerState | Moving, now: float) -> None:
    """`way` is the peer itself, for the stage that is its own, or its way to another one."""
    if now < way.ask_not_before:
        return
    if run.version == 0:
        _assign_from(run, peer, way, "fresh", (), ("", 0, ""), now)
    elif not _from_checkpoint(run, peer, way, now) and run.phase in JOINING_PHASES:
        _from_replicas(run, peer, way, now)


def _assign_from(
    run: RunState,
    peer: PeerState,
    way: PeerState | Moving,
    source: Literal["fresh", "snapshot"],
    holders: tuple[PeerRecord, ...],
    item: tuple[str, int, str],
    now: float,
) -> None:
    assert way.stage is not None
    way.source_asked, way.version, way.asked_at = True, run.version, now
    if way is not peer:
        run.rebalancing.bytes_moved += item[1]
    run.send(
        peer.peer,
        AssignStage(
            stage=way.stage,
            version=run.version,
            source=source,
            item=item[0],
            bytes=item[1],
            sha256=item[2],
            holders=holders,
            prepare=way is not peer,
        ),
    )


def _from_checkpoint(run: RunState, peer: PeerState, way: PeerState | Moving, now: float) -> bool:
    checkpoint = run.checkpoint
    if checkpoint is None or checkpoint.version != run.version:
        return False
    stored = next((s for s in checkpoint.stages if s.stage == way.stage), None)
    if stored is None:
        return False
    item = (stored.item, stored.bytes, stored.sha256)
    _assign_from(run, peer, way, "snapshot", (run.coordinator,), item, now)
    return True


def _from_replicas(run: RunState, peer: PeerState, way: PeerState | Moving, now: float) -> None:
    stage = way.stage
    assert stage is not None
    holders = [p for p in run.ready_peers(stage) if p is not peer]
    if not holders:
        return
    snapshots = run.snapshots.get(stage)
    if (
        snapshots is None
        or snapshots.version != run.version
        or not (snapshots.asked & {p.peer for p in holders})
        or (not snapshots.ready and now - snapshots.asked_at > ASK_AGAIN_SECONDS)
    ):
        snapshots = run.snapshots[stage] = Snapshots(run.version, now)
        waiting = sum(
            p.phase is PeerPhase.SYNCING or p.moving is not None for p in run.peers.bound_for(stage)
        )
        for holder in holders[: min(MOST_SNAPSHOT_HOLDERS, max(SNAPSHOT_HOLDERS, waiting))]:
            snapshots.asked.add(holder.peer)
            run.send(holder.peer, SaveSnapshot(version=run.version, stage=stage))
        return
    present = {h.peer: h for h in holders if h.peer in snapshots.ready}
    outstanding = snapshots.asked & {h.peer for h in holders} - present.keys()
    if not present or (outstanding and now - snapshots.asked_at < 2.0):
        return
    # Replicas are bitwise equal, so their files are too; the majority's hash is the one to fetch.
    item, _ = Counter(snapshots.ready[p] for p in present).most_common(1)[0]
    records = tuple(run.record_of(h) for p, h in present.items() if snapshots.ready[p] == item)
    _assign_from(run, peer, way, "snapshot", records, item, now)


def snapshot_ready(run: RunState, peer: PeerState, message: SnapshotReady, now: float) -> None:
    snapshots = run.snapshots.get(message.stage)
    if (
        snapshots is not None
        and snapshots.version == message.version == run.version
        and peer.peer in snapshots.asked
        and peer.stage == message.stage
    ):
        snapshots.ready[peer.peer] = (message.item, message.bytes, message.sha256)
        find_sources(run, now)


def _differs(run: RunState, peer: PeerState, message: Ready) -> bool:
    """Whether a newcomer holds something else than the stage's holders do, after all checks."""
    known = run.prints.get(message.stage)
    if known is None or message.version != run.version or message.digest in known:
        return False
    reason = f"what it holds of stage {message.stage} is not what the others hold"
    run.mark(peer, Rejection.OTHER_PARAMETERS, reason)
    return True


def ready(run: RunState, peer: PeerState, message: Ready, now: float) -> None:
    """A peer holds its stage. If the run moved on while it was downloading, it starts over."""
    stage, version = message.stage, message.version
    moving = peer.moving
    if moving is not None and moving.stage == stage and _prepared(moving, version):
        if _differs(run, peer, message):
            start_over(run, moving, now)
            moving.ask_not_before = now + SYNC_RETRY_SECONDS
        elif version == run.version and run.phase in JOINING_PHASES:
            _note_download(peer, moving, run.rebalancing.stages[stage].state_bytes, now)
            moving.ready = True
        else:
            start_over(run, moving, now)
        return
    if peer.stage != stage or not _awaited(peer, version):
        return
    if version != run.version or run.phase not in JOINING_PHASES:
        peer.source_asked = False
        _hold(run, peer, now)
        find_sources(run, now)
        return
    if _differs(run, peer, message):
        peer.source_asked = False
        peer.ask_not_before = now + SYNC_RETRY_SECONDS
        run.snapshots.pop(stage, None)
        return
    if version > 0:
        _note_download(peer, peer, run.rebalancing.stages[stage].state_bytes, now)
    peer.phase = PeerPhase.READY
    run.on_branch.add(peer.peer)
    run.roster_dirty = True
    run.note(f"{display(peer)} holds stage {stage} at version {version} and takes work", peer.peer)


def version_changed(run: RunState, now: float) -> None:
    """What is being downloaded is of the version before: all start over at once, with most of the
    new version's time before them."""
    for peer in run.peers.syncing.values():
        if peer.source_asked and peer.catching_up is None and peer.version != run.version:
            peer.source_asked = False
            _hold(run, peer, now)
    for peer in run.peers.movers.values():
        if peer.moving is not None and peer.moving.source_asked:
            start_over(run, peer.moving, now)


def _prepared(moving: Moving, version: Version) -> bool:
    """Whether this is the answer to the latest word on where to get the next stage from."""
    return moving.source_asked and not moving.ready and moving.version == version


def start_over(run: RunState, moving: Moving, now: float) -> None:
    """The run has gone on to another version: the next stage's state is to be had anew."""
    moving.source_asked = moving.ready = False
    _hold(run, moving, now)


def _note_download(peer: PeerState, way: PeerState | Moving, state_bytes: int, now: float) -> None:
    """How fast a stage's state came, all in all: what the next one will take follows from it."""
    if state_bytes >= TELLING_BYTES and now > way.asked_at:
        peer.download_bytes_per_second = state_bytes / (now - way.asked_at)


def _awaited(peer: PeerState, version: Version) -> bool:
    """Whether this is the answer to the latest assignment, not to one that was taken back."""
    return (
        peer.phase is PeerPhase.SYNCING
        and peer.source_asked
        and peer.catching_up is None
        and peer.version == version
    )


def sync_failed(run: RunState, peer: PeerState, message: SyncFailed, now: float) -> None:
    """Another source is named, after a pause: most causes take a moment to pass."""
    moving = peer.moving
    if moving is not None and moving.stage == message.stage:
        if _prepared(moving, message.version):
            run.note(f"stage {message.stage} could not be fetched: {message.reason}", peer.peer)
            start_over(run, moving, now)
            moving.ask_not_before = now + SYNC_RETRY_SECONDS
            run.snapshots.pop(message.stage, None)
        return
    if peer.stage != message.stage or not _awaited(peer, message.version):
        return
    run.note(f"stage {message.stage} could not be fetched: {message.reason}", peer.peer)
    peer.source_asked = False
    peer.ask_not_before = now + SYNC_RETRY_SECONDS
    run.snapshots.pop(message.stage, None)


def remove(
    run: RunState, peer_id: PeerId, reason: str, now: float, *, announce: bool = True
) -> None:
    """A peer is gone: what it had accumulated died with it, its leases go to others."""
    peer = run.peers.get(peer_id)
    if peer is None:
        return
    del run.peers[peer_id]
    run.roster_dirty = True
    if announce:
        stage = "no stage" if peer.stage is None else f"stage {peer.stage}"
        run.note(f"{display(peer)} ({stage}) is gone: {reason}", peer_id)
    run.pending_masks = [m for m in run.pending_masks if m.peer != peer_id]
    progress.forget_peer(run, peer_id, now)
    progress.readmit(run)


def resync(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    """A replica that differs is replaced from the others, never silently kept."""
    assert peer.stage is not None
    move(run, peer, peer.stage, reason, now)


def replace_state(run: RunState, peer: PeerState, reason: str, now: float) -> bool:
    """Mark a peer that computes wrongly and sync it anew; False when it is its stage's last.

    The last one's state is all there is: what it counted is cleared by the caller, and it tries
    again.
    """
    assert peer.stage is not None
    run.mark(peer, Rejection.NOT_FINITE, reason)
    if all(p is peer for p in run.ready_peers(peer.stage)):
        return False
    resync(run, peer, reason, now)
    return True


def not_finite(run: RunState, peer: PeerState, message: NotFinite, now: float) -> None:
    """A peer got no numbers out of a microbatch. The first one is to blame for it, and if another
    one gets none either, it is the model's doing."""
    step = run.step
    if step is None or message.step != step.step or peer.stage is None:
        return
    if run.phase is not RunPhase.COLLECT or not run.holds_current(peer):
        return
    cell = (message.microbatch, peer.stage)
    first = step.not_finite.setdefault(cell, peer.peer)
    if first != peer.peer:
        run.reject(Rejection.NOT_FINITE)
        run.note(
            f"microbatch {message.microbatch} of step {message.step} is not finite in stage "
            f"{peer.stage} at two peers: it is the model's doing or the data's",
            peer.peer,
        )
        return
    replace_state(run, peer, "what it computed was not finite", now)


def move(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """Give a peer another stage, or the same one anew: what it has accumulated goes with it."""
    progress.forget_peer(run, peer.peer, now)
    run.roster_dirty = True
    assign(run, peer, stage, reason, now)
    progress.readmit(run)


def say_goodbye(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    run.send(peer.peer, Goodbye(reason=reason))
    run.commands.append(CloseSession(peer.peer, reason))
    remove(run, peer.peer, reason, now)
