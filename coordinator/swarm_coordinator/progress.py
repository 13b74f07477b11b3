"""The table of one step: which live peer has committed each (microbatch, stage); and leases.

Part of the pure core (design: the life of a step, Collect). A cell is set by the first receipt
of a live peer and cleared when that peer dies, because its accumulated gradient died with it.
Microbatches that lack cells are leased again with a mask of exactly the stages that lack them.
"""

from __future__ import annotations

from swarm_coordinator.events import LeaseResolved
from swarm_coordinator.state import (
    Cell,
    LeaseState,
    PeerState,
    PendingMask,
    RunPhase,
    RunState,
    StepState,
    short,
)
from swarm_shared.credentials import Receipt
from swarm_shared.messages import Lease, LeasedMicrobatch, Mask, MaskRequest
from swarm_shared.types import MicrobatchIndex, PeerId, StageIndex, Step

EXTRA_IN_FLIGHT = 2
"""Microbatches in flight per pipeline beyond one per stage, to hide the links' latency."""

RELEASE_BACKOFF_SECONDS = 0.5
"""Pause before a failed microbatch is leased again: its cause rarely passes sooner."""


LARGEST_LOSS = 1e290
"""Far above any real one, and the sum over a step still fits a float."""


def begin_step(run: RunState, now: float) -> None:
    """Open the next step and lease all of its microbatches to the trainers."""
    run.step = StepState(step=Step(run.version + 1), began_at=now)
    run.phase = RunPhase.COLLECT
    run.training_began = True
    run.waiting_reason = ""
    for peer in run.peers.values():
        receipts, peer.early_receipts = peer.early_receipts, {}
        for receipt in receipts.values():
            commit(run, receipt)
    lease_open_microbatches(run, now)


def begin_evaluation(run: RunState, now: float) -> None:
    run.step = StepState(step=Step(run.version + 1), began_at=now)
    run.phase = RunPhase.EVALUATING
    lease_open_microbatches(run, now)


def window(run: RunState, trainers: int) -> int:
    """Microbatches one trainer keeps in flight so that every stage has work and none overflows."""
    pipelines = max(1, len(run.working_peers(0)))
    depth = run.manifest.stage_count + EXTRA_IN_FLIGHT
    return max(1, -(-pipelines * min(depth, run.manifest.limits.stage_queue) // max(1, trainers)))


def microbatch_count(run: RunState) -> int:
    training = run.manifest.training
    if run.phase is RunPhase.EVALUATING:
        return training.evaluation_microbatches
    return training.microbatches_per_step


def missing_stages(run: RunState, microbatch: MicrobatchIndex) -> tuple[StageIndex, ...]:
    assert run.step is not None
    table = run.step.table
    return tuple(
        StageIndex(stage)
        for stage in run.stage_indices
        if (microbatch, StageIndex(stage)) not in table
    )


def complete(run: RunState) -> bool:
    assert run.step is not None
    return len(run.step.table) == microbatch_count(run) * run.manifest.stage_count


def commit(run: RunState, receipt: Receipt) -> bool:
    """Enter one verified receipt; False when it does not count (stale, unknown, a duplicate)."""
    step, peer = run.step, run.peers.get(receipt.peer)
    if peer is None or not _valid(run, peer, receipt):
        return False
    if step is None:
        # After a restart peers come back one by one, and the step begins when enough are there.
        peer.early_receipts[receipt.microbatch] = receipt
        return False
    if run.phase not in (RunPhase.COLLECT, RunPhase.CLOSING):
        return False
    cell = (receipt.microbatch, receipt.stage)
    if cell in step.table:
        # Somebody else was first. The close tells this peer what it may count.
        return step.table[cell].peer == receipt.peer
    step.table[cell] = Cell(receipt.peer, receipt.tokens, receipt.loss_sum)
    return True


def _valid(run: RunState, peer: PeerState, receipt: Receipt) -> bool:
    """Whether this is a receipt of the step at hand, by a peer that can have earned it."""
    return (
        receipt.step == run.version + 1
        and receipt.generation <= run.generation
        and run.holds_current(peer)
        and peer.stage == receipt.stage
        and 0 <= receipt.microbatch < run.manifest.training.microbatches_per_step
        and receipt.tokens == run.manifest.tokens_per_microbatch
        and (receipt.stage == run.last_stage) == (receipt.loss_sum is not None)
        and abs(receipt.loss_sum or 0.0) <= LARGEST_LOSS
    )


def forget_peer(run: RunState, peer: PeerId, now: float) -> None:
    """Clear what a dead peer had committed and free the leases that it drove."""
    step = run.step
    if step is None:
        return
    for cell in [c for c, held in step.table.items() if held.peer == peer]:
        del step.table[cell]
    for microbatch in [m for m, lease in step.leases.items() if lease.trainer == peer]:
        del step.leases[microbatch]
    # Survivors report what they hold within one receipt interval; masks made sooner would let
    # stages that have the microbatch already count it again.
    step.close_not_before = max(
        step.close_not_before, now + run.manifest.limits.receipt_interval_seconds
    )


def exclude(run: RunState, peer: PeerId, now: float) -> bool:
    """Let the step close without this peer, unless it is the last of its stage."""
    step, state = run.step, run.peers.get(peer)
    if step is None or state is None or state.stage is None or peer in step.excluded:
        return False
    if all(p.peer == peer for p in run.ready_peers(state.stage)):
        return False
    forget_peer(run, peer, now)
    step.excluded.add(peer)
    run.roster_dirty = True
    run.note(f"{short(peer)} keeps step {step.step} from closing and sits it out", peer)
    return True


def readmit(run: RunState) -> None:
    """A peer that sits out is better than none: when the others are gone it is needed again."""
    step = run.step
    if step is None:
        return
    for peer_id in list(step.excluded):
        peer = run.peers.get(peer_id)
        if peer is None:
            step.excluded.discard(peer_id)
        elif peer.stage is not None and not run.ready_peers(peer.stage):
            step.excluded.discard(peer_id)
            step.blame.pop(peer_id, None)
            run.roster_dirty = True


def lease_resolved(run: RunState, event: LeaseResolved, now: float) -> None:
    step = run.step
    if step is None or event.step != step.step:
        return
    for receipt in event.receipts:
        commit(run, receipt)
    lease = step.leases.get(event.microbatch)
    if lease is None or lease.lease != event.lease or lease.trainer != event.peer:
        return
    if run.phase is RunPhase.EVALUATING:
        loss_sum = event.evaluation_loss_sum
        known = loss_sum is not None and abs(loss_sum) <= LARGEST_LOSS
        if event.ok and loss_sum is not None and known and event.evaluation_tokens > 0:
            step.evaluations[event.microbatch] = (loss_sum, event.evaluation_tokens)
        else:
            lease.resolved_at = now
        return
    lease.resolved_at = now
    if not event.ok and missing_stages(run, event.microbatch):
        run.note(
            f"microbatch {event.microbatch} of step {event.step} failed at trainer "
            f"{short(event.peer)} and is leased again: {event.reason}",
            event.peer,
        )


def lease_open_microbatches(run: RunState, now: float) -> None:
    """Lease every microbatch that is incomplete and that nobody is working on any more."""
    step = run.step
    trainers = run.trainers()
    if step is None or not run.staffed():
        return
    load = {t.peer: 0 for t in trainers}
    open_microbatches: list[MicrobatchIndex] = []
    for index in range(microbatch_count(run)):
        microbatch = MicrobatchIndex(index)
        if _is_done(run, microbatch):
            continue
        lease = step.leases.get(microbatch)
        if lease is not None and not _is_due_again(run, lease, now):
            if lease.trainer in load and lease.resolved_at is None:
                load[lease.trainer] += 1
            continue
        if now < step.close_not_before:
            continue
        open_microbatches.append(microbatch)
    _grant(run, step, open_microbatches, load, now)


def _is_done(run: RunState, microbatch: MicrobatchIndex) -> bool:
    assert run.step is not None
    if run.phase is RunPhase.EVALUATING:
        return microbatch in run.step.evaluations
    return not missing_stages(run, microbatch)


def _is_due_again(run: RunState, lease: LeaseState, now: float) -> bool:
    if lease.resolved_at is not None:
        pause = max(RELEASE_BACKOFF_SECONDS, 2 * run.manifest.limits.receipt_interval_seconds)
        return now - lease.resolved_at >= pause
    return now - lease.granted_at >= run.manifest.limits.lease_seconds


def _grant(
    run: RunState,
    step: StepState,
    microbatches: list[MicrobatchIndex],
    load: dict[PeerId, int],
    now: float,
) -> None:
    grants: dict[PeerId, list[LeasedMicrobatch]] = {}
    for microbatch in microbatches:
        trainer = min(load, key=lambda peer: load[peer])
        load[trainer] += 1
        accumulate = () if run.phase is RunPhase.EVALUATING else missing_stages(run, microbatch)
        grants.setdefault(trainer, []).append(
            LeasedMicrobatch(microbatch=microbatch, accumulate=accumulate)
        )
    for trainer, leased in grants.items():
        run.lease_counter += 1
        for item in leased:
            step.leases[item.microbatch] = LeaseState(run.lease_counter, trainer, now)
        run.send(
            trainer,
            Lease(
                step=step.step,
                lease=run.lease_counter,
                mode="evaluate" if run.phase is RunPhase.EVALUATING else "train",
                window=window(run, len(load)),
                microbatches=tuple(leased),
            ),
        )


def ask_mask(run: RunState, peer: PeerState, request: MaskRequest, now: float) -> None:
    """Answer after one reporting interval, so that receipts under way are counted first."""
    wait = 1.2 * run.manifest.limits.receipt_interval_seconds
    run.pending_masks.append(
        PendingMask(now + wait, peer.peer, request.request, request.step, request.microbatch)
    )


def answer_masks(run: RunState, now: float) -> None:
    due = [mask for mask in run.pending_masks if mask.due_at <= now]
    if not due:
        return
    run.pending_masks = [mask for mask in run.pending_masks if mask.due_at > now]
    for mask in due:
        current = (
            run.step is not None and run.step.step == mask.step and run.phase is RunPhase.COLLECT
        )
        accumulate = missing_stages(run, mask.microbatch) if current else ()
        run.send(
            mask.peer,
            Mask(
                request=mask.request,
                step=mask.step,
                microbatch=mask.microbatch,
                accumulate=accumulate,
            ),
        )
