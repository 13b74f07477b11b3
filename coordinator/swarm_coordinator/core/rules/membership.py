"""Membership: attaching, losing and assigning peers.

Part of the pure core: changes a RunState and queues commands, does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_coordinator.core.events import AppliedStep, CloseSession, PeerAttached
from swarm_coordinator.core.rules import (
    held_up,
    roster,
    round_membership,
    state_transfer,
)
from swarm_coordinator.core.rules.auditing import cleared_cells
from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.state.peers import (
    PeerProfile,
    PeerState,
    StageTransfer,
    display,
    owner_of,
)
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import MAX_ADDRESS_CHARACTERS, Generation, StageIndex, Version
from swarm_shared.protocol import (
    Apply,
    Goodbye,
    Hello,
    Refused,
    StageRequest,
    StageRow,
    Welcome,
)
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.scheduling.placement.stage_sizes import streamed_work

MAX_STAGE_PEERS = 1000
"""Number of peers that a stage takes, below the 1,024 members that an all-reduce carries; some more
may average for the last time before they move away."""


def attach(run: RunState, event: PeerAttached, now: float) -> None:
    """Admit a client, whether new, restarted, or returning with the stage that it holds."""
    hello = event.hello
    assert event.peer not in run.peers, "an older attachment is removed first"
    if hello.self_tested:
        held_up.lift_refusal(run, event.peer, event.owner, now)
    if held_up.refuse(run, event.peer, event.owner, now):
        return
    peer = PeerState(
        peer=event.peer,
        session=event.session,
        profile=PeerProfile.of(hello, event.owner),
        contact=hello.announced,
        certificate=event.certificate,
        last_heard=now,
    )
    roster.attached(run, event.peer)
    run.audits.standings.takes_part(owner_of(peer))
    run.peers[event.peer] = peer
    held = hello.stage if hello.stage in run.stage_indices else None
    missed = None if held is None else _missed_step(run, held, hello)
    if missed is None and held is not None and not _is_current(run, event, held):
        held = None
    if held is not None and (held_up.kept_apart(run, peer, held, now) or is_full(run, held)):
        held = missed = None
    run.send(
        event.peer,
        Welcome(
            generation=Generation(run.start.generation),
            certificate=event.certificate,
            manifest=run.start.manifest_envelope,
            stages=run.peers.stage_rows(),
            directory=_dht_entry_points(run, peer),
            site=peer.contact.site,
            keep=held is not None,
            heartbeat_seconds=roster.heartbeat_seconds(run),
        ),
    )
    cleared_cells.repeat_drops(run, event.peer)
    if held is not None and missed is not None:
        _send_missed_apply(run, peer, held, missed, now)
        peer.early_receipts = {
            (receipt.step, receipt.microbatch): receipt
            for receipt in event.receipts
            if receipt.peer == event.peer
        }
    elif held is not None:
        run.hold(peer, held, hello.version)
        run.peers.claim(peer, hello.digest)
        roster.changed(run, peer.peer, now)
        run.note(f"{display(peer)} is back with stage {held}", peer.peer)
        round_membership.rejoin(run, peer.peer, held, hello.averaged_attempt)
        for receipt in event.receipts:
            if receipt.peer == event.peer:
                cells.commit(run, receipt, now)
    else:
        run.note(f"{display(peer)} was admitted ({hello.device})", peer.peer)


def _is_current(run: RunState, event: PeerAttached, stage: StageIndex) -> bool:
    """Whether a returning peer holds the stage's state at the run's version.

    The digest proves it, where holders have reported theirs since the coordinator's start.
    """
    # After a roll-back the same version number may denote a state of the abandoned history.
    same_history = not run.history.rolled_back or event.peer in run.history.members
    return (
        event.hello.version == run.history.version
        and same_history
        and run.history.may_be(stage, event.hello.digest)
    )


def _missed_step(run: RunState, stage: StageIndex, hello: Hello) -> AppliedStep | None:
    """The last applied step, if the peer averaged it and lost the connection before its Apply."""
    last = run.history.last_applied
    missed = (
        last is not None
        and Version(last.step) == run.history.version
        and hello.version == run.history.version - 1
        and hello.averaged_attempt == last.attempt_of(stage)
    )
    return last if missed else None


def _send_missed_apply(
    run: RunState, peer: PeerState, stage: StageIndex, missed: AppliedStep, now: float
) -> None:
    """Send a returning peer the Apply that it missed."""
    transfer = StageTransfer(
        stage, now, source_assigned=True, asked_at=now, missed_apply=missed.step
    )
    state_transfer.delay_close(run, transfer, now)
    run.peers.begin_transfer(peer, transfer)
    run.send(
        peer.peer,
        Apply(
            step=missed.step,
            attempt=missed.attempt_of(stage),
            global_norm=missed.global_norm,
            learning_rate=missed.learning_rate,
        ),
    )
    run.note(f"{display(peer)} is back and still has to apply step {missed.step}", peer.peer)


def _dht_entry_points(run: RunState, joining: PeerState) -> tuple[str, ...]:
    """p2pd addresses of a few other peers, for a joining peer to enter hivemind's DHT."""
    addresses: list[str] = []
    for peer in run.peers.with_carrier.values():
        # A peer that attaches again is listed itself, and cannot enter through itself.
        carrier = peer.contact.carrier
        if peer is not joining and carrier is not None:
            is_near = peer.contact.site == joining.contact.site
            dialable = (*carrier.addresses, *(carrier.local if is_near else ()))
            room = MAX_ADDRESS_CHARACTERS - len(f"/p2p/{carrier.peer}")
            addresses += [f"{a}/p2p/{carrier.peer}" for a in dialable[:2] if len(a) <= room]
        if len(addresses) >= 8:
            break
    return tuple(addresses[:8])


def choose_stage(run: RunState, peer: PeerState, request: StageRequest, now: float) -> None:
    """Grant or correct a joining peer's choice of a stage: two peers may have chosen at once."""
    rows = run.peers.stage_rows()
    if peer.stage is not None or peer.leaving:
        return
    wanted, memory = peer.profile.wanted_stage, peer.profile.memory
    if wanted is not None and not 0 <= wanted < len(rows):
        refuse(run, peer, f"there is no stage {wanted}; the run has stages 0 to {len(rows) - 1}")
        return
    if wanted is not None and is_full(run, wanted):
        limit = stage_limit(run, wanted)
        refuse(
            run, peer,
            f"stage {wanted} has {limit} peers, and no more can average together; "
            f"choose another stage, or leave the choice to the run",
        )  # fmt: skip
        return
    open_rows = [row for row in rows if not is_full(run, row.stage)]
    if not open_rows:
        reason = "every stage has as many peers as can average together; try again later"
        held_up.refuse_for_now(run, peer.peer, reason)
        del run.peers[peer.peer]
        return
    if wanted is not None:
        allowed = [wanted]
    elif deserted := _deserted(run, open_rows, memory):
        allowed = deserted
    else:
        preferred = _without_conflicts(run, peer, open_rows, now)
        allowed = [row.stage for row in preferred or open_rows]
    try:
        work = streamed_work(run.manifest.model, run.manifest.training)
        stage = most_underserved_stage(rows, memory, work, request.up_bytes_per_second, allowed)
    except CapacityError as error:
        refuse(run, peer, str(error))
        return
    if wanted is not None:
        reason = "the volunteer chose this stage"
    elif stage == request.stage:
        reason = "the most under-served stage that fits"
    else:
        reason = f"stage {request.stage} was taken meanwhile; stage {stage} needs a peer more"
    assign(run, peer, stage, reason, now)


def _without_conflicts(
    run: RunState, peer: PeerState, rows: Sequence[StageRow], now: float
) -> list[StageRow]:
    """Stages that fit the peer's memory and have no holder with which its averages have failed."""
    return [
        row
        for row in rows
        if peer.profile.memory.holds(row.memory)
        and not held_up.is_at_odds_in(run, peer, row.stage, now)
    ]


def stage_limit(run: RunState, stage: StageIndex) -> int:
    """Number of peers that a stage takes; both ends of a tied model also average together."""
    return MAX_STAGE_PEERS // 2 if stage in run.tied_stages() else MAX_STAGE_PEERS


def is_full(run: RunState, stage: StageIndex) -> bool:
    """Whether a stage takes no further peer, as its close could not carry one."""
    return run.peers.group_size(stage) >= stage_limit(run, stage)


def _deserted(run: RunState, rows: Sequence[StageRow], memory: MemoryOffer) -> list[StageIndex]:
    """Stages that fit the memory and have no staying peer, not even a paused one.

    `rows` do not count paused peers, and count a mover at its destination. A paused peer still
    holds its stage and resumes; a mover cannot download a stage that no peer holds.
    """
    return [
        row.stage
        for row in rows
        if memory.holds(row.memory) and all(peer.leaving for peer in run.peers.at(row.stage))
    ]


def refuse(run: RunState, peer: PeerState, reason: str) -> None:
    """Refuse a client and end its session."""
    run.send(peer.peer, Refused(code="capacity", reason=reason))
    run.commands.append(CloseSession(peer.peer))
    run.note(f"{display(peer)} was refused: {reason}", peer.peer)
    del run.peers[peer.peer]


def assign(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """Assign a stage to a peer without one, and send it a source for the state if one is known."""
    begin_sync(run, peer, stage, reason, now)
    state_transfer.find_sources(run, now)


def begin_sync(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """Assign a stage to a peer without one; `state_transfer` chooses the source of its state."""
    transfer = StageTransfer(stage, now)
    state_transfer.delay_close(run, transfer, now)
    run.peers.begin_transfer(peer, transfer)
    run.note(f"{display(peer)} takes stage {stage}: {reason}", peer.peer)


def reassign(run: RunState, peer: PeerState, stage: StageIndex, reason: str, now: float) -> None:
    """Assign a peer another stage, or the same one anew."""
    release(run, peer, Release.STAGE, now)
    assign(run, peer, stage, reason, now)


def resync(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    """Replace a replica that differs, is outdated or cannot apply by downloading its state anew."""
    if peer.stage is not None:
        reassign(run, peer, peer.stage, reason, now)


def dismiss(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    """Remove a peer that is lost or leaves."""
    stage = "no stage" if peer.stage is None else f"stage {peer.stage}"
    run.note(f"{display(peer)} ({stage}) is gone: {reason}", peer.peer)
    release(run, peer, Release.MEMBERSHIP, now)


def say_goodbye(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    """Release a peer with a Goodbye and remove it."""
    run.send(peer.peer, Goodbye(reason=reason))
    run.commands.append(CloseSession(peer.peer))
    dismiss(run, peer, reason, now)
