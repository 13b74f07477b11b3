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
    PeerPhase,
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


def begin_step(run: RunState, now: float) -> None:
    """Open the next step and lease all of its microbatches to the trainers."""
    run.step = StepState(step=Step(run.version + 1), began_at=now)
    run.phase = RunPhase.COLLECT
    run.training_began = True
    run.waiting_reason = ""
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
    if step is None or peer is None or run.phase not in (RunPhase.COLLECT, RunPhase.CLOSING):
        return False
    if (
        receipt.step != step.step
        or receipt.generation > run.generation
        or peer.phase is not PeerPhase.READY
        or peer.stage != receipt.stage
        or not 0 <= receipt.microbatch < run.manifest.training.microbatches_per_step
        or receipt.tokens != run.manifest.tokens_per_microbatch
        or (receipt.stage == run.last_stage) != (receipt.loss_sum is not None)
    ):
        return False
    cell = (receipt.microbatch, receipt.stage)
    if cell in step.table:
        # Somebody else was first. The close tells this peer what it may count.
        return step.table[cell].peer == receipt.peer
    if run.phase is RunPhase.CLOSING:
        return False
    step.table[cell] = Cell(receipt.peer, receipt.tokens, receipt.loss_sum)
    return True


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
        if event.ok and event.evaluation_loss_sum is not None and event.evaluation_tokens > 0:
            step.evaluations[event.microbatch] = (
                event.evaluation_loss_sum,
                event.evaluation_tokens,
            )
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
    if step is None or not trainers:
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
        if lease is None and now < step.close_not_before:
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
