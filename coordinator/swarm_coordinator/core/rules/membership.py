"""Membership: attaching, losing, assigning and releasing peers.

Part of the pure core: changes a RunState and queues commands, does no I/O.
"""

from __future__ import annotations

from swarm_coordinator.core.events import CloseSession, PeerAttached
from swarm_coordinator.core.rules import microbatches, roster, round_membership, state_transfer
from swarm_coordinator.core.state.run import (
    PeerPhase,
    PeerState,
    RunPhase,
    RunState,
    display,
    short,
)
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.types import Generation, PeerId, StageIndex, Version
from swarm_shared.protocol import Apply, Goodbye, NotFinite, Refused, StageRow, Welcome
from swarm_shared.scheduling.placement import most_underserved_stage


def attach(run: RunState, event: PeerAttached, now: float) -> None:
    """Admit a client, whether new, restarted, or returning with the stage that it holds."""
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
            directory=_dht_entry_points(run, peer),
            keep=current or must_apply,
            heartbeat_seconds=roster.heartbeat_seconds(run),
        ),
    )
    if must_apply:
        _send_missed_apply(run, peer, hello.stage, now)
        peer.early_receipts = {
            (receipt.step, receipt.microbatch): receipt
            for receipt in event.receipts
            if receipt.peer == event.peer and receipt.step > run.version
        }
    elif current:
        peer.stage, peer.version, peer.phase = hello.stage, hello.version, PeerPhase.READY
        run.roster_dirty = True
        run.note(f"{display(peer)} is back with stage {peer.stage}", peer.peer)
        if hello.stage is not None:
            round_membership.rejoin(run, peer.peer, hello.stage, hello.averaged_attempt)
        for receipt in event.receipts:
            if receipt.peer == event.peer:
                microbatches.commit(run, receipt)
    else:
        run.note(f"{display(peer)} was admitted ({hello.device})", peer.peer)


def _still_current(run: RunState, event: PeerAttached) -> bool:
    """Whether the peer returns with its stage at the run's version.

    That is so after either side has restarted or lost the connection.
    """
    hello = event.hello
    return (
        hello.stage is not None
        and 0 <= hello.stage < run.manifest.stage_count
        and hello.version == run.version
        # After a roll-back the same version number may denote a state of the abandoned history.
        and (not run.rolled_back or event.peer in run.on_current_history)
    )


def _still_has_to_apply(run: RunState, event: PeerAttached) -> bool:
    """Whether the peer averaged the last applied step and lost the connection before its Apply."""
    hello, last = event.hello, run.last_applied
    return (
        last is not None
        and Version(last.step) == run.version
        and hello.stage is not None
        and 0 <= hello.stage < run.manifest.stage_count
        and hello.version == run.version - 1
        and hello.averaged_attempt == last.attempt_of(hello.stage)
    )


def _send_missed_apply(
    run: RunState, peer: PeerState, stage: StageIndex | None, now: float
) -> None:
    """Send a returning peer the Apply that it missed."""
    last = run.last_applied
    assert last is not None
    assert stage is not None
    peer.stage, peer.version, peer.phase = stage, Version(run.version - 1), PeerPhase.SYNCING
    peer.source_assigned, peer.missed_apply, peer.asked_at = True, last.step, now
    state_transfer.delay_close(run, peer, now)
    run.send(
        peer.peer,
        Apply(
            step=last.step,
            attempt=last.attempt_of(stage),
            global_norm=last.global_norm,
            learning_rate=last.learning_rate,
        ),
    )
    run.note(f"{display(peer)} is back and still has to apply step {last.step}", peer.peer)


def _dht_entry_points(run: RunState, joining: PeerState) -> tuple[str, ...]:
    """p2pd addresses of a few other peers, for a joining peer to enter hivemind's DHT."""
    found: list[str] = []
    for peer in run.peers.with_carrier.values():
        # A peer that attaches again is listed itself, and cannot enter through itself.
        if peer is not joining and peer.carrier is not None:
            found.extend(f"{a}/p2p/{peer.carrier.peer}" for a in peer.carrier.addresses[:2])
        if len(found) >= 8:
            break
    return tuple(found[:8])


def choose_stage(run: RunState, peer: PeerState, proposal: StageIndex, now: float) -> None:
    """Grant or correct a joining peer's choice of a stage: two peers may have chosen at once."""
    rows = run.stage_rows()
    if peer.stage is not None or peer.leaving:
        return
    wanted = peer.wanted_stage
    if wanted is not None and not 0 <= wanted < len(rows):
        refuse(run, peer, f"there is no stage {wanted}; the run has stages 0 to {len(rows) - 1}")
        return
    if wanted is not None:
        rows = (rows[wanted],)
    else:
        rows = _deserted(run, rows, peer.memory_bytes) or rows
    try:
        stage = most_underserved_stage(rows, peer.memory_bytes)
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


def _deserted(run: RunState, rows: tuple[StageRow, ...], memory_bytes: int) -> tuple[StageRow, ...]:
    """Stages that fit and have no staying peer, not even a paused one.

    `rows` do not count paused peers, and count a mover at its destination. A paused peer still
    holds its stage and resumes; a mover cannot download a stage that no peer holds.
    """
    return tuple(
        row
        for row in rows
        if row.memory_bytes <= memory_bytes
        and all(peer.leaving for peer in run.peers.at(row.stage))
    )


def refuse(run: RunState, peer: PeerState, reason: str) -> None:
    """Refuse a client and end its session."""
    run.send(peer.peer, Refused(code="capacity", reason=reason))
    run.commands.append(CloseSession(peer.peer, reason))
    run.note(f"{display(peer)} was refused: {reason}", peer.peer)
    del run.peers[peer.peer]


def assign(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """Assign a stage to a peer, and send it a source for the state if one is known already."""
    give(run, peer, stage, reason, now)
    state_transfer.find_sources(run, now)


def give(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """Assign a stage to a peer; the source of its state is chosen in `state_transfer`."""
    peer.stage, peer.phase, peer.version = stage, PeerPhase.SYNCING, Version(0)
    peer.source_assigned, peer.missed_apply, peer.close_delays = False, None, 0
    peer.moving = None
    peer.early_receipts.clear()
    state_transfer.delay_close(run, peer, now)
    run.note(f"{display(peer)} takes stage {stage}: {reason}", peer.peer)


def remove(
    run: RunState, peer_id: PeerId, reason: str, now: float, *, announce: bool = True
) -> None:
    """Remove a lost peer: what it had accumulated is lost, and its leases go to other trainers."""
    peer = run.peers.get(peer_id)
    if peer is None:
        return
    del run.peers[peer_id]
    run.roster_dirty = True
    if announce:
        stage = "no stage" if peer.stage is None else f"stage {peer.stage}"
        run.note(f"{display(peer)} ({stage}) is gone: {reason}", peer_id)
    run.pending_masks = [m for m in run.pending_masks if m.peer != peer_id]
    round_membership.forget(run, peer_id, f"{short(peer_id)} is gone", now)
    round_membership.readmit(run)


def resync(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    """Replace a replica that differs, is outdated or cannot apply by downloading its state anew."""
    assert peer.stage is not None
    move(run, peer, peer.stage, reason, now)


def replace_state(run: RunState, peer: PeerState, reason: str, now: float) -> bool:
    """Flag a peer that computes wrongly and sync it anew; False if it is the last of its stage.

    The state of the last one has no replacement: the caller clears what it counted, and it retries.
    """
    assert peer.stage is not None
    run.flag(peer, Rejection.NOT_FINITE, reason)
    if all(p is peer for p in run.ready_peers(peer.stage)):
        return False
    resync(run, peer, reason, now)
    return True


def not_finite(run: RunState, peer: PeerState, message: NotFinite, now: float) -> None:
    """Handle a microbatch that is not finite at a peer.

    The first peer is held responsible. If a second peer gets the same result, the model or the data
    are.
    """
    step = run.step_numbered(message.step)
    if step is None or peer.stage is None or not run.holds_current(peer):
        return
    if run.phase is not RunPhase.COLLECT or run.round_of(peer.stage) is not None:
        return  # no peer is synced anew during a close; the result will recur in the next step
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
    """Assign a peer another stage, or the same one anew; what it has accumulated is cleared."""
    round_membership.forget(run, peer.peer, f"{short(peer.peer)} is assigned a stage again", now)
    run.roster_dirty = True
    assign(run, peer, stage, reason, now)
    round_membership.readmit(run)


def say_goodbye(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    """Release a peer with a Goodbye and remove it."""
    run.send(peer.peer, Goodbye(reason=reason))
    run.commands.append(CloseSession(peer.peer, reason))
    remove(run, peer.peer, reason, now)
