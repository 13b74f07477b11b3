"""The coordinator as a state machine: `transition(state, event, now)` returns commands.

The phases of a run, those that may follow each, and what leads there. `core.state.phases.ALLOWED`
is the same table as data, and `enter_phase` refuses everything else:

    WAITING     COLLECT     every stage has a ready peer
                EVALUATING  the same, after the last step
                FINISHED    the last step is evaluated, its checkpoint is stored or given up
                WAITING     a stage has lost its state with its last holder, or an owner with
                            unverified steps an audit: the run goes back to a checkpoint's version
                STOPPING    the organiser stops the run; a checkpoint is stored, or takes too long
    COLLECT     CLOSING     the table is complete, and no joining peer, move or failed attempt
                            delays the close; stages that were complete before average already
                WAITING     back to the checkpoint, as above
                STOPPING    as above
    CLOSING     APPLYING    every member of every round has averaged, the sums are those of what the
                            members put in, and the decision is durable
                COLLECT     a member fails, lies, or leaves before the sums of its round are
                            checked; the other rounds stand
                STOPPING    as above, if the close takes too long
    APPLYING    WAITING     every remaining member has applied, or the time limit has passed; a
                            member that has not applied is synced anew
                STOPPING    as above, if the apply takes too long
    EVALUATING  WAITING     every held-out microbatch is counted, and no audit delays the end; or
                            back to the checkpoint
                STOPPING    as above

No I/O, no clock, no randomness: the same events at the same times give the same commands. The
simulator (`swarm_coordinator.simulator`) and the tests rely on that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

from swarm_coordinator.core.events import (
    AuditAnswered,
    Broadcast,
    CertificateIssued,
    CheckpointFailed,
    CheckpointStored,
    CloseSession,
    Command,
    EvaluationRecord,
    Event,
    HeartbeatsReceived,
    LeaseResolved,
    MessageReceived,
    PeerAttached,
    PeersReinstated,
    PeersRevoked,
    Persist,
    ReceiptsVerified,
    Restored,
    RunFinished,
    Send,
    SessionLost,
    ShutDown,
    StopRequested,
    SumsStated,
    Tick,
)
from swarm_coordinator.core.rules import (
    checkpoints,
    departure,
    held_up,
    membership,
    not_finite,
    rebalancing,
    roster,
    round_membership,
    stage_recovery,
    state_transfer,
    step_close,
    step_start,
)
from swarm_coordinator.core.rules.auditing import answers, cleared_cells, deadlines, verdicts
from swarm_coordinator.core.rules.closing import time_limits, whole_audits
from swarm_coordinator.core.rules.microbatches import (
    cells,
    heartbeats,
    leases,
    masks,
    speculation,
    steps,
)
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.state.checkpoints import CheckpointState
from swarm_coordinator.core.state.held_time import restored_held_time
from swarm_coordinator.core.state.history import RunHistory, restored_digests
from swarm_coordinator.core.state.moves import RebalancingSettings
from swarm_coordinator.core.state.peer_table import PeerTable
from swarm_coordinator.core.state.peers import PeerState, display
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.roster import RosterState
from swarm_coordinator.core.state.run import CoordinatorStart, RunState, enter_phase
from swarm_coordinator.core.state.statistics import RunStatistics
from swarm_coordinator.core.state.steps import StepsInProgress, StepState
from swarm_coordinator.core.state.utilisation import UtilisationStats
from swarm_coordinator.core.trust.arithmetic_classes import restored_classes
from swarm_coordinator.core.trust.audits import AuditBook, no_audits
from swarm_coordinator.core.trust.standing import restored_standings
from swarm_shared.base.types import Generation, PeerId
from swarm_shared.protocol import (
    AddressUpdate,
    Applied,
    Close,
    Dropped,
    Goodbye,
    Lease,
    Leaving,
    Mask,
    MaskRequest,
    NotCounted,
    NotFinite,
    PeerRecord,
    Ready,
    RoundReport,
    SnapshotFailed,
    SnapshotReady,
    StageRequest,
    SyncFailed,
    Welcome,
)
from swarm_shared.run.manifest import Manifest

PeerEvent = (
    SessionLost | ReceiptsVerified | LeaseResolved | AuditAnswered | SumsStated | MessageReceived
)

STOP_TIMEOUT_SECONDS = 30.0
"""Seconds that the checkpoint of a stopping run may take; the one before it is always safe."""

NUMBERS_PER_GENERATION = 2**24
"""Distance between the first attempt and lease numbers of two generations of the coordinator."""


def begin(
    manifest: Manifest,
    manifest_envelope: str,
    coordinator: PeerRecord,
    restored: Restored,
    now: float,
    revoked: Mapping[PeerId, float] | None = None,
    moves: RebalancingSettings | None = None,
    audits: AuditBook | None = None,
    kept_checkpoints: int = 1,
) -> RunState:
    """Return the initial state of a coordinator, from the manifest and what its store has restored.

    A finished run stays in FINISHED until the organiser stops it.
    `moves` configures whether and when peers move between stages; without it they never do.
    `audits` has the settings and draws of audits; without it no cell is drawn. `kept_checkpoints`
    is the number of newest ones that the organiser's folder keeps.
    """
    stored_version = restored.checkpoint.version if restored.checkpoint is not None else 0
    # Messages of earlier generations may still arrive, so numbers are never reused.
    last_number = restored.generation * NUMBERS_PER_GENERATION
    audits = audits or no_audits()
    audits.standings = restored_standings(restored.standings)
    audits.classes = restored_classes(restored.agreements)
    audits.last_audit = last_number
    history = RunHistory(
        version=restored.version,
        last_applied=restored.last_applied,
        # A run whose steps were raised after its end is evaluated again at its new end.
        heldout_loss=restored.heldout_loss if restored.version >= manifest.training.steps else None,
        rolled_back=restored.rolled_back,
        members=set(restored.on_current_history),
        recomputed=restored.recomputed,
        fingerprints=restored_digests(restored.state_digests),
    )
    return RunState(
        manifest=manifest,
        start=CoordinatorStart(restored.generation, now, coordinator, manifest_envelope),
        history=history,
        peers=PeerTable(manifest, history),
        roster=RosterState(revoked=dict(revoked or {})),
        steps=StepsInProgress(last_lease=last_number, last_attempt=last_number),
        checkpoints=CheckpointState(
            stored=restored.checkpoint,
            overdue=restored.version - stored_version > manifest.checkpoint_steps,
            keep=kept_checkpoints,
        ),
        rebalancing=rebalancing.rebalancing_of(manifest, moves or RebalancingSettings()),
        audits=audits,
        held_time=restored_held_time(restored.held_time, now),
        phase=RunPhase.FINISHED if restored.finished else RunPhase.WAITING,
        statistics=RunStatistics(UtilisationStats(manifest.stage_count)),
    )


def transition(run: RunState, event: Event, now: float) -> list[Command]:
    """Advance the run by one event at `now` (monotonic seconds)."""
    phase = run.phase
    _dispatch(run, event, now)
    if run.audits.expelled or run.audits.withholding or run.audits.retracted:
        _carry_out_verdicts(run, now)
    if isinstance(event, ReceiptsVerified | LeaseResolved):
        # Most events report finished microbatches; they change only the table and the leases.
        _advance_step(run, now)
    elif not isinstance(event, HeartbeatsReceived) and not (
        run.phase is phase and _is_intermediate_answer(run, event)
    ):
        _advance(run, now)
    if rosters := roster.publish(run, now):
        # After a Welcome and all records, before the leases, closes and masks that need them.
        relying = (i for i, command in enumerate(run.commands) if _relies_on_roster(command))
        at = next(relying, len(run.commands))
        run.commands[at:at] = rosters
    commands, run.commands = run.commands, []
    return commands


def _is_intermediate_answer(run: RunState, event: Event) -> bool:
    """Whether the event is an answer to a close or an apply that is not the last one awaited.

    All members answer within about a second. No rule depends on an answer before the last one,
    which changes the phase, or before the next tick.
    """
    if run.phase not in (RunPhase.COLLECT, RunPhase.CLOSING, RunPhase.APPLYING):
        return False
    if isinstance(event, SumsStated):
        return True
    message = event.message if isinstance(event, MessageReceived) else None
    return isinstance(message, Applied) or (isinstance(message, RoundReport) and message.ok)


def _relies_on_roster(command: Command) -> bool:
    return isinstance(command, Send | Broadcast) and isinstance(
        command.message, Lease | Close | Mask
    )


def _session_peer(run: RunState, peer: PeerId, session: int) -> PeerState | None:
    """The peer, if the event belongs to its current attachment."""
    state = run.peers.get(peer)
    return state if state is not None and state.session == session else None


def _dispatch(run: RunState, event: Event, now: float) -> None:
    if isinstance(event, Tick):
        _drop_silent_peers(run, now)
        if run.peers.syncing:
            time_limits.give_up_catching_up(run, now)
        if run.steps.current is not None and cells.complete(run, run.steps.current):
            state_transfer.charge_downloads(run, now)
        for refused in held_up.take_refusals(run, now):
            held_up.refuse(run, refused.peer, refused.profile.owner, now)
            _drop(run, refused.peer, "it holds up the run", now)
        roster.drop_expired_revocations(run, now)
        if run.roster.calm_at:
            roster.forget_changes(run, now)
        held_up.store_changed(run, now)
    elif isinstance(event, PeerAttached):
        older = run.peers.get(event.peer)
        if older is not None:
            # What it held is either reported again in this Hello or lost.
            release(run, older, Release.MEMBERSHIP, now)
            step_close.advance_close(run, now)
        if run.phase is RunPhase.FINISHED:
            _attach_after_end(run, event)
        else:
            membership.attach(run, event, now)
    elif isinstance(event, CheckpointStored):
        checkpoints.store_done(run, event, now)
    elif isinstance(event, CheckpointFailed):
        checkpoints.store_failed(run, event.version, event.reason, now)
    elif isinstance(event, PeersRevoked):
        roster.revoke(run, event)
        for revoked in event.peers:
            _drop(run, revoked, event.reason, now)
    elif isinstance(event, PeersReinstated):
        for reinstated in event.peers:
            roster.reinstate(run, reinstated)
    elif isinstance(event, CertificateIssued):
        roster.certificate_issued(run, event, now)
    elif isinstance(event, StopRequested):
        if run.stop_requested_at is None:
            run.stop_requested_at = now
    elif isinstance(event, HeartbeatsReceived):
        for heartbeat in event.heartbeats:
            peer = _session_peer(run, heartbeat.peer, heartbeat.session)
            if peer is not None:
                heartbeats.record_heartbeat(run, peer, heartbeat.message, now)
    elif isinstance(event, PeerEvent):
        peer = _session_peer(run, event.peer, event.session)
        if peer is not None:
            _handle_peer_event(run, peer, event, now)
    else:
        assert_never(event)


def _handle_peer_event(
    run: RunState,
    peer: PeerState,
    event: PeerEvent,
    now: float,
) -> None:
    peer.last_heard = now
    if isinstance(event, SessionLost):
        _drop(run, peer.peer, "it left" if peer.leaving else "its connection ended", now)
    elif isinstance(event, ReceiptsVerified):
        for receipt in event.receipts:
            if receipt.peer == peer.peer:
                cells.commit(run, receipt, now)
    elif isinstance(event, LeaseResolved):
        leases.lease_resolved(run, event, now)
    elif isinstance(event, AuditAnswered):
        answers.answered(run, peer, event, now)
    elif isinstance(event, SumsStated):
        step_close.sums_stated(run, peer, event, now)
    else:
        _handle_message(run, peer, event, now)


def _handle_message(run: RunState, peer: PeerState, event: MessageReceived, now: float) -> None:
    message = event.message
    if isinstance(message, AddressUpdate):
        roster.update_addresses(run, peer, message, now)
    elif isinstance(message, StageRequest):
        membership.choose_stage(run, peer, message, now)
    elif isinstance(message, MaskRequest):
        masks.queue_mask_request(run, peer, message, now)
    elif isinstance(message, NotCounted):
        cells.not_counted(run, peer, message)
    elif isinstance(message, RoundReport):
        step_close.report(run, peer, message, now)
    elif isinstance(message, Applied):
        step_close.applied(run, peer, message, now)
    elif isinstance(message, Ready):
        state_transfer.ready(run, peer, message, now)
    elif isinstance(message, NotFinite):
        not_finite.reported(run, peer, message, now)
    elif isinstance(message, SyncFailed):
        state_transfer.sync_failed(run, peer, message, now)
    elif isinstance(message, SnapshotReady):
        checkpoints.snapshot_ready(run, peer, message, now)
        state_transfer.snapshot_ready(run, peer, message, now)
    elif isinstance(message, SnapshotFailed):
        checkpoints.snapshot_failed(run, peer, message, now)
    elif isinstance(message, Dropped):
        cleared_cells.dropped(run, peer, message)
    elif isinstance(message, Leaving) and not peer.leaving:
        run.peers.set_leaving(peer, now)
        roster.changed(run, peer.peer, now)
        run.note(f"{display(peer)} wants to leave", peer.peer)


def _carry_out_verdicts(run: RunState, now: float) -> None:
    """Abort the averages that contain cells found wrong, remove the peers of owners that have lost
    an audit, and exclude from the step those that withheld inputs from their auditors."""
    round_membership.retract(run, now)
    for peer, reason in verdicts.take_expelled(run):
        held_up.send_refusal(run, peer, run.peers[peer].profile.owner, reason, now)
        _drop(run, peer, "it lost an audit", now)
    for withholding in verdicts.take_withholding(run):
        release(run, withholding, Release.STEP, now)


def _drop(run: RunState, peer_id: PeerId, reason: str, now: float) -> None:
    """Remove a peer that is lost, and continue the close without it."""
    peer = run.peers.get(peer_id)
    if peer is not None:
        membership.dismiss(run, peer, reason, now)
        step_close.advance_close(run, now)


def _drop_silent_peers(run: RunState, now: float) -> None:
    """Close the sessions of peers without a message for `dead_after_seconds`."""
    limit = run.manifest.limits.dead_after_seconds
    for peer in [peer for peer in run.peers.values() if now - peer.last_heard > limit]:
        run.commands.append(CloseSession(peer.peer))
        _drop(run, peer.peer, f"silent for more than {limit:g} s", now)


def _advance(run: RunState, now: float) -> None:
    """Apply the rules of the current phase; called after every event that may change the phase."""
    checkpoints.check(run, now)
    stage_recovery.answer_late_verdict(run, now)
    stage_recovery.recover_lost_stages(run, now)
    if run.peers.movers:
        rebalancing.abandon_stale_moves(run, now)
    rebalancing.consider(run, now)
    state_transfer.find_sources(run, now)
    if run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING):
        departure.release_leavers(run, now)
    time_limits.time_out(run, now)
    step_close.advance_close(run, now)
    deadlines.advance(run, now)
    _advance_step(run, now)
    if run.audits.expelled or run.audits.withholding or run.audits.retracted:
        _carry_out_verdicts(run, now)
    if run.stop_requested_at is not None:
        _continue_stopping(run, run.stop_requested_at, now)
    if run.phase is RunPhase.WAITING:
        departure.release_leavers(run, now)
        _leave_waiting(run, now)


def _advance_step(run: RunState, now: float) -> None:
    """Apply the rules of the steps in progress: masks, leases, and the close or the evaluation."""
    masks.answer_masks(run, now)
    if run.stop_requested_at is not None:
        return
    step, ahead = run.steps.current, run.steps.ahead
    if ahead is not None:
        leases.lease_open_microbatches(run, ahead, now)
    if step is not None and run.phase is RunPhase.COLLECT:
        _advance_collection(run, step, now)
    elif step is not None and run.phase is RunPhase.EVALUATING:
        _advance_evaluation(run, step, now)


def _advance_collection(run: RunState, step: StepState, now: float) -> None:
    """Lease what is missing; once the table is complete, start the close unless it is delayed."""
    if run.manifest.training.staleness and not departure.loses_a_stage(run):
        steps.begin_ahead(run, step, now)  # the last peer of a stage leaves between two steps
    if not cells.complete(run, step):
        leases.lease_open_microbatches(run, step, now)
        speculation.lease_stragglers(run, step, now)
        step_close.close_complete_stages(run, step, now)
        whole_audits.settle_contests(run, step, now)
        return
    if step.complete_at is None:
        step.complete_at = now
    hold_ends = step.complete_at + run.manifest.limits.join_hold_seconds
    delayed = now < hold_ends and bool(state_transfer.delayed_stages(run, now))
    delayed = deadlines.delay_close(run, step, step.complete_at, now) or delayed
    delayed = whole_audits.settle_contests(run, step, now) or delayed
    if now >= step.close_not_before:
        step_close.attribute_relayed(run, step, now)
    if not cells.complete(run, step):
        return
    delayed = whole_audits.renew(run, step, now) or delayed
    if delayed:
        step_close.close_complete_stages(run, step, now)
    elif now >= step.close_not_before:
        step_close.start_close(run, step, now)


def _leave_waiting(run: RunState, now: float) -> None:
    """Go from WAITING to the next step, to the evaluation, or to the end."""
    if run.stop_requested_at is not None:
        return
    at_end = run.history.version >= run.manifest.training.steps
    if at_end or (checkpoints.due(run) and run.checkpoints.pending is None):
        checkpoints.request(run, now)
    if not at_end:
        rebalancing.move_between_steps(run, now)
    step_start.balance_stages(run, now)
    evaluated = (
        run.history.heldout_loss is not None or run.manifest.training.evaluation_microbatches == 0
    )
    if at_end and evaluated:
        _finish(run)
    elif lacking := step_start.unmet_requirement(run, now):
        run.waiting_reason = lacking
    elif departure.must_wait(run):
        run.waiting_reason = "writing a checkpoint before the last peer of a stage leaves"
    elif at_end:
        steps.begin_evaluation(run, now)
    else:
        steps.begin_step(run, now)


def _advance_evaluation(run: RunState, step: StepState, now: float) -> None:
    """Lease what is missing of the held-out microbatches; once all are counted, record the loss."""
    if not cells.complete(run, step):
        leases.lease_open_microbatches(run, step, now)
        speculation.lease_stragglers(run, step, now)
        return
    if step.complete_at is None:
        step.complete_at = now
    if deadlines.delay_close(run, step, step.complete_at, now) or not cells.complete(run, step):
        return
    last_cells = [cell for (_, stage), cell in step.table.items() if stage == run.last_stage]
    tokens = sum(cell.tokens for cell in last_cells)
    loss = math.fsum(cell.loss_sum or 0.0 for cell in last_cells) / tokens
    run.history.heldout_loss = loss
    run.commands.append(Persist(EvaluationRecord(run.history.version, loss, tokens)))
    run.note(f"held-out loss after step {run.history.version}: {loss:.4f}")
    enter_phase(run, RunPhase.WAITING)


def _finish(run: RunState) -> None:
    """End the run once its last checkpoint is stored or given up, and disconnect every peer."""
    if not checkpoints.stored(run) and not checkpoints.refused(run):
        run.waiting_reason = "writing the last checkpoint"
        return
    if checkpoints.stored(run):
        run.commands.append(Persist(RunFinished(run.history.version)))
        run.note(f"the run is finished after {run.history.version} steps")
    else:
        run.note("the run reached its last step, but its last checkpoint could not be stored")
    enter_phase(run, RunPhase.FINISHED)
    for peer in run.peers.values():
        _say_run_is_over(run, peer.peer)
    run.peers.clear()
    run.commands.append(ShutDown())


def _attach_after_end(run: RunState, event: PeerAttached) -> None:
    """Answer a client that attaches to a finished run: it is admitted, so that it can fetch the
    model, and its session ends."""
    run.send(
        event.peer,
        Welcome(
            generation=Generation(run.start.generation), certificate=event.certificate,
            manifest=run.start.manifest_envelope, stages=run.peers.stage_rows(), finished=True,
        ),
    )  # fmt: skip
    _say_run_is_over(run, event.peer)


def _say_run_is_over(run: RunState, peer: PeerId) -> None:
    reason = f"the run has finished after {run.history.version} steps; nothing is left to compute"
    run.send(peer, Goodbye(finished=True, reason=reason))
    run.commands.append(CloseSession(peer))


def _continue_stopping(run: RunState, requested_at: float, now: float) -> None:
    """Do what is due now to stop on the organiser's request: let a close end, store a checkpoint,
    then disconnect the peers."""
    if run.phase is RunPhase.STOPPING:
        return
    if run.phase is RunPhase.FINISHED:  # and was so at the start: nothing is in progress
        run.commands.append(ShutDown())
        return
    late = now - requested_at > STOP_TIMEOUT_SECONDS
    if run.phase in (RunPhase.CLOSING, RunPhase.APPLYING) and not late:
        return
    if not checkpoints.stored(run) and not late and checkpoints.request(run, now):
        return
    enter_phase(run, RunPhase.STOPPING)
    for peer in run.peers.values():
        run.send(peer.peer, Goodbye(reason="the coordinator is stopping"))
        run.commands.append(CloseSession(peer.peer))
    run.note(f"stopped after step {run.history.version}")
    run.commands.append(ShutDown())
