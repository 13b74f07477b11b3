"""Leases: which trainer drives which microbatch, and when one is leased again.

Part of the pure core. Microbatches that lack cells are leased again with a mask of exactly the
stages that lack them. A delivered microbatch may lack cells of peers that are yet to count it: it
is leased again only when such a peer is lost, gives it up, or takes as long as a lease.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from swarm_coordinator.core.events import LeaseResolved
from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.state.leases import LeaseState
from swarm_coordinator.core.state.peers import short
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import MicrobatchIndex, PeerId
from swarm_shared.protocol import Lease, LeasedMicrobatch
from swarm_shared.scheduling.claimed_rates import MAX_RATE_OVER_MEDIAN

EXTRA_IN_FLIGHT = 2
"""Microbatches in flight per pipeline beyond one per stage, to hide the latency of the links."""

LEASE_RETRY_SECONDS = 0.5
"""Pause in seconds before a failed microbatch is leased again; its cause rarely passes sooner."""

MAX_NOT_FINITE_RETRY_SECONDS = 30.0
"""Longest pause before a microbatch that was not finite is leased again."""

NOT_FINITE_RETRIES = 4
"""Number of retries of such a microbatch at the usual pause; the pause doubles with each further
one."""


def pipeline_windows(stages: int, stage_queue: int, pipelines: int) -> tuple[int, int]:
    """Smallest and largest number of microbatches in flight for each pipeline: enough that every
    stage has work despite the latency of the links, and few enough that no queue overflows. Among
    several peers one holds more than the mean in proportion to its rate, so the mean is at most a
    queue over the largest rate that any peer is believed to have (decision 0037)."""
    smallest = min(stages + EXTRA_IN_FLIGHT, stage_queue)
    fastest_share = 2 if pipelines == 1 else int(MAX_RATE_OVER_MEDIAN)
    return smallest, max(smallest, stage_queue // fastest_share)


def inflight_windows(run: RunState, trainers: int) -> tuple[int, int]:
    """Smallest and largest number of microbatches that one trainer keeps in flight."""
    pipelines = max(1, len(run.peers.working(0)))
    windows = pipeline_windows(run.manifest.stage_count, run.manifest.limits.stage_queue, pipelines)
    smallest, largest = (-(-pipelines * window // max(1, trainers)) for window in windows)
    return smallest, largest


def lease_open_microbatches(run: RunState, step: StepState, now: float) -> None:
    """Lease every microbatch that is incomplete and not being driven by a trainer."""
    if step.table.reopened:
        step.unsettled |= step.table.reopened
        step.table.reopened.clear()
    while step.lease_alarms and step.lease_alarms[0][0] <= now:
        step.unsettled.add(heapq.heappop(step.lease_alarms)[1])
    if not step.unsettled or now < step.close_not_before or not run.peers.has_complete_pipeline():
        return
    open_microbatches: list[MicrobatchIndex] = []
    for microbatch in sorted(step.unsettled):
        if cells.is_done(run, step, microbatch):
            continue
        due_at = _due_at(run, step, microbatch)
        if now >= due_at:
            open_microbatches.append(microbatch)
        else:
            heapq.heappush(step.lease_alarms, (due_at, microbatch))
    step.unsettled.clear()
    if open_microbatches:
        _lease_to_trainers(run, step, open_microbatches, now)


def _due_at(run: RunState, step: StepState, microbatch: MicrobatchIndex) -> float:
    """When a microbatch may be leased again if it is not done by then; -inf without a lease.

    A trainer that keeps delivering keeps its other leases, however long its step takes.
    """
    lease, limits = step.leases.get(microbatch), run.manifest.limits
    if lease is None:
        return -math.inf
    if lease.resolved_at is not None and microbatch in step.owing:
        return lease.resolved_at + limits.lease_seconds
    if lease.resolved_at is not None:
        pause = max(LEASE_RETRY_SECONDS, 2 * limits.receipt_interval_seconds)
        return lease.resolved_at + max(pause, _not_finite_pause(run, step, microbatch))
    trainer = run.peers.get(lease.trainer)
    delivered_at = -math.inf if trainer is None else trainer.delivered_at
    return max(lease.granted_at, delivered_at) + limits.lease_seconds


def _not_finite_pause(run: RunState, step: StepState, microbatch: MicrobatchIndex) -> float:
    """Seconds before a microbatch that has been finite nowhere is leased again: without a bound on
    the rate a model that has diverged would keep every peer busy."""
    if not step.not_finite:
        return 0.0
    reported = (step.not_finite.get((microbatch, stage)) for stage in run.stage_indices)
    times = sum(cell.times for cell in reported if cell is not None)
    pause = LEASE_RETRY_SECONDS * 2.0 ** min(times - NOT_FINITE_RETRIES, 10)
    return min(MAX_NOT_FINITE_RETRY_SECONDS, pause)


def trainer_loads(
    run: RunState, step: StepState, granted: Collection[MicrobatchIndex]
) -> list[tuple[int, int, PeerId]]:
    """Return a heap of trainers by microbatches being driven; ties in the roster's order."""
    trainers = run.peers.trainers()
    again: Counter[PeerId] = Counter()
    for microbatch in granted:
        lease = step.leases.get(microbatch)
        if lease is not None and lease.resolved_at is None:
            again[lease.trainer] += 1
    heap = [
        (len(step.leases.driven_by(trainer.peer)) - again[trainer.peer], place, trainer.peer)
        for place, trainer in enumerate(trainers)
    ]
    heapq.heapify(heap)
    return heap


def _lease_to_trainers(
    run: RunState, step: StepState, microbatches: list[MicrobatchIndex], now: float
) -> None:
    grants: dict[PeerId, list[MicrobatchIndex]] = {}
    driving = trainer_loads(run, step, microbatches)
    for microbatch in microbatches:
        grants.setdefault(_next_trainer(step, microbatch, driving), []).append(microbatch)
    for trainer, granted in grants.items():
        lease = LeaseState(send_lease(run, step, trainer, granted, len(driving)), trainer, now)
        for microbatch in granted:
            step.speculative_leases.pop(microbatch, None)
            _set_lease(run, step, microbatch, lease)


def _next_trainer(
    step: StepState, microbatch: MicrobatchIndex, driving: list[tuple[int, int, PeerId]]
) -> PeerId:
    """Take the trainer with the fewest microbatches among those that have not tried this
    microbatch.

    No trainer gets a microbatch twice before each has had it once. A trainer that fails at once
    always has the fewest, and would otherwise get it again and again.
    """
    previous = step.leases.get(microbatch)
    if previous is None:
        trainer = least_loaded_except(driving, ())
    else:
        tried = step.tried.setdefault(microbatch, set())
        tried.add(previous.trainer)
        trainer = least_loaded_except(driving, tried)
        if trainer is None:
            tried.clear()
            trainer = least_loaded_except(driving, ())
    assert trainer is not None, "a complete pipeline has a trainer"
    return trainer


def least_loaded_except(
    driving: list[tuple[int, int, PeerId]], excluded: Collection[PeerId]
) -> PeerId | None:
    """Return the trainer with the fewest microbatches that is not in `excluded`; None if there is
    none. Its entry in the heap `driving` counts one microbatch more from then on."""
    aside: list[tuple[int, int, PeerId]] = []
    while driving and driving[0][2] in excluded:
        aside.append(heapq.heappop(driving))
    trainer: PeerId | None = None
    if driving:
        load, place, trainer = driving[0]
        heapq.heapreplace(driving, (load + 1, place, trainer))
    for entry in aside:
        heapq.heappush(driving, entry)
    return trainer


def send_lease(
    run: RunState, step: StepState, trainer: PeerId, microbatches: Sequence[MicrobatchIndex],
    trainers: int,
) -> int:  # fmt: skip
    """Lease microbatches to a trainer; returns the number of the lease."""
    window, max_window = inflight_windows(run, trainers)
    run.steps.last_lease += 1
    run.send(
        trainer,
        Lease(
            step=step.step,
            lease=run.steps.last_lease,
            window=window,
            max_window=max_window,
            microbatches=tuple(
                LeasedMicrobatch(
                    microbatch=microbatch,
                    accumulate=cells.missing_stages(run, step, microbatch),
                    is_copy=microbatch in step.leases,
                )
                for microbatch in microbatches
            ),
        ),
    )
    return run.steps.last_lease


def lease_resolved(run: RunState, event: LeaseResolved, now: float) -> None:
    """Handle a trainer's result of one leased microbatch."""
    step = run.steps.numbered(event.step)
    if step is None:
        return
    for receipt in event.receipts:
        if receipt.peer == event.peer:
            cells.commit(run, receipt, now)
        else:
            cells.commit_relayed(run, receipt, now)
    lease = step.leases.get(event.microbatch)
    speculative = step.speculative_leases.get(event.microbatch)
    resolved = (event.lease, event.peer)
    if speculative is not None and (speculative.lease, speculative.trainer) == resolved:
        del step.speculative_leases[event.microbatch]
        return  # the first lease is still in flight, and its result decides
    if lease is None or (lease.lease, lease.trainer) != resolved:
        return
    if not event.ok and _promote_speculative_lease(run, step, event.microbatch):
        return
    owing = set(_still_owing(run, step, event))
    if owing:
        step.owing[event.microbatch] = owing
    _set_lease(run, step, event.microbatch, replace(lease, resolved_at=now))
    if not event.ok and event.reason and cells.missing_stages(run, step, event.microbatch):
        run.note(
            f"microbatch {event.microbatch} of step {event.step} failed at trainer "
            f"{short(event.peer)} and is leased again: {event.reason}",
            event.peer,
        )


def _still_owing(run: RunState, step: StepState, event: LeaseResolved) -> Iterator[PeerId]:
    """Yield the peers that a trainer reports as owing a cell, as far as the cell is missing."""
    for owing in event.owing if event.ok else ():
        peer = run.peers.get(owing)
        if peer is not None and peer.stage in cells.missing_stages(run, step, event.microbatch):
            yield owing


def _promote_speculative_lease(run: RunState, step: StepState, microbatch: MicrobatchIndex) -> bool:
    """Replace a failed first lease by the speculative one; False without one."""
    speculative = step.speculative_leases.pop(microbatch, None)
    if speculative is None:
        return False
    _set_lease(run, step, microbatch, speculative)
    return True


def _set_lease(
    run: RunState, step: StepState, microbatch: MicrobatchIndex, lease: LeaseState
) -> None:
    step.leases[microbatch] = lease
    heapq.heappush(step.lease_alarms, (_due_at(run, step, microbatch), microbatch))


def clear_work(run: RunState, peer: PeerId, now: float) -> None:
    """Clear the cells that a peer has counted, except in an average that stands, and free its
    leases."""
    for step in run.steps.open():
        for microbatch in list(step.owing):
            cells.owes_no_more(step, microbatch, peer)
        # A decided step has all of its averages, also of a stage that the peer has moved away from.
        if run.phase is not RunPhase.APPLYING or step is run.steps.ahead:
            kept = step.closing.kept_stages(peer)
            cells.clear_counted(run, step, peer, [s for s in run.stage_indices if s not in kept])
        _free_leases(run, step, peer, now)


def _free_leases(run: RunState, step: StepState, peer: PeerId, now: float) -> None:
    for microbatch in [
        m for m, speculative in step.speculative_leases.items() if speculative.trainer == peer
    ]:
        del step.speculative_leases[microbatch]
    for microbatch in sorted(step.leases.leased_to(peer)):
        if not _promote_speculative_lease(run, step, microbatch):
            del step.leases[microbatch]
            step.unsettled.add(microbatch)
    # The other peers report their cells within one receipt interval. Masks made sooner would let
    # stages that hold the microbatch already count it again.
    step.close_not_before = max(
        step.close_not_before, now + run.manifest.limits.receipt_interval_seconds
    )
