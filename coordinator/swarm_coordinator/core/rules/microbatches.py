"""Microbatches of a step: leases, receipts and masks; and the rates by heartbeats.

Part of the pure core (design: the life of a step, Collect). A cell is set by the first receipt of
an attached peer and cleared when that peer is lost, because its accumulated gradient is lost with
it. Microbatches that lack cells are leased again with a mask of exactly the stages that lack them.
A delivered microbatch may lack cells of peers that are yet to count it: it is leased again only
when such a peer is lost, gives it up, or takes as long as a lease.
The evaluation is a step with held-out microbatches, which are counted and audited like others, and
never averaged.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from swarm_coordinator.core.events import LeaseResolved
from swarm_coordinator.core.rules import roster
from swarm_coordinator.core.rules.auditing import cleared_cells, verdicts
from swarm_coordinator.core.state.leases import LeaseState
from swarm_coordinator.core.state.peers import PeerPhase, PeerState, short
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState, enter_phase
from swarm_coordinator.core.state.step_table import Cell
from swarm_coordinator.core.state.steps import PendingMask, StepState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust import chains
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Heartbeat, Lease, LeasedMicrobatch, Mask, MaskRequest, NotCounted
from swarm_shared.scheduling.claimed_rates import MAX_RATE_OVER_MEDIAN

EXTRA_IN_FLIGHT = 2
"""Microbatches in flight per pipeline beyond one per stage, to hide the latency of the links."""

LEASE_RETRY_SECONDS = 0.5
"""Pause in seconds before a failed microbatch is leased again; its cause rarely passes sooner."""

MAX_NOT_FINITE_RETRY_SECONDS = 30.0
"""Longest pause before a microbatch that was not finite is leased again."""

NOT_FINITE_RETRIES = 4
"""Number of those retries at the usual pause; it doubles with each one after them."""

RATE_SMOOTHING = 0.3
"""Weight of the newest report in a peer's rate: about the last five count, which span a few
seconds."""

RATE_NOISE = 0.1
"""Relative distance of a report from this average up to which it is taken for noise. The plan of a
step (`swarm_shared.scheduling.step_plan`) ends when the peer ends whose rate is the most too high,
so that noise costs more the more peers there are. A larger change counts at once."""

_STEPPING = frozenset({RunPhase.COLLECT, RunPhase.CLOSING, RunPhase.APPLYING})
"""Phases in which a stage without work counts as idle."""

_COUNTING = frozenset({RunPhase.COLLECT, RunPhase.CLOSING, RunPhase.EVALUATING})
"""Phases in which receipts of the current step count."""

MAX_LOSS_SUM = 1e290
"""Largest accepted loss sum: far above any real one, and the sum over a step still fits a float."""


def record_heartbeat(run: RunState, peer: PeerState, message: Heartbeat, now: float) -> None:
    """Update a peer's rates, its queue length, whether it pauses and its class of arithmetic."""
    if peer.paused != message.paused:
        # Senders must learn of it before they send the peer anything else.
        run.peers.set_paused(peer, message.paused)
        if run.peers.holds_current(peer):
            roster.changed(run, peer.peer, now)
    if message.arithmetic is not None:
        peer.arithmetic = message.arithmetic
    rates = peer.rates
    computed, up = message.microbatches_per_second, message.up_bytes_per_second
    if computed is None:
        computed = rates.reported_microbatches_per_second
    else:
        rates.reported_microbatches_per_second = computed
    up_bytes_per_second = rates.up_bytes_per_second if up is None else up or math.inf
    sent, flops_per_second = math.inf, rates.flops_per_second
    uplink_flops_per_second = rates.uplink_flops_per_second
    if peer.phase is PeerPhase.READY and peer.stage is not None:
        stage = run.rebalancing.stages[peer.stage]
        if stage.sent_bytes:
            sent = up_bytes_per_second / stage.sent_bytes
        uplink_flops_per_second = sent * stage.work_flops
        if computed > 0:
            reported = computed * stage.work_flops
            known = flops_per_second or reported
            flops_per_second = known + RATE_SMOOTHING * (reported - known)
            average = flops_per_second / stage.work_flops
            if abs(average - computed) <= RATE_NOISE * computed:
                computed = average
        else:
            computed = flops_per_second / stage.work_flops  # as measured at other stages
    run.peers.record_rates(
        peer, now, message.queued, min(computed, sent), flops_per_second, up_bytes_per_second,
        uplink_flops_per_second,
    )  # fmt: skip
    _record_utilisation(run, peer, message, now)


def _record_utilisation(run: RunState, peer: PeerState, message: Heartbeat, now: float) -> None:
    """Record the time that the peer computed, if it could have had work."""
    counts = (
        run.phase in _STEPPING
        and peer.phase is PeerPhase.READY
        and peer.stage is not None
        and not peer.paused
    )
    if counts and peer.stage is not None and message.busy_seconds is not None:
        most = run.manifest.training.microbatches_per_step
        run.statistics.utilisation.record(
            peer.last_heartbeat, peer.stage, message.busy_seconds, min(message.computed, most), now
        )
    else:
        peer.last_heartbeat.held = None


def begin_step(run: RunState, now: float) -> None:
    """Open the next step and lease all of its microbatches to the trainers."""
    enter_phase(run, RunPhase.COLLECT)
    step = run.steps.ahead or _new_step(run, Step(run.history.version + 1), now)
    step.previous_applied_at = now
    run.steps.current, run.steps.ahead, run.steps.began = step, None, True
    _start(run, step, now)


def begin_ahead(run: RunState, step: StepState, now: float) -> None:
    """Under staleness 1, open the following step once this one no longer fills the pipelines.

    Delayed parameter updates; docs/decisions, number 0024.
    """
    training = run.manifest.training
    if not training.staleness or run.steps.ahead is not None:
        return
    cells = training.microbatches_per_step * run.manifest.stage_count
    carried = len(run.peers.working(0)) * run.manifest.limits.stage_queue // 2
    if (
        step.step >= training.steps
        or run.stop_requested_at is not None
        or cells - len(step.table) > carried * run.manifest.stage_count
    ):
        return
    run.steps.ahead = _new_step(run, Step(step.step + 1), now)
    _start(run, run.steps.ahead, now)


def commit_early_receipts(run: RunState, peer: PeerState, now: float) -> None:
    """Enter receipts that were reported before their step began; keep those of later steps, and all
    while the peer still has to apply the step that it missed."""
    if not run.peers.holds_current(peer):
        return
    early, peer.early_receipts = peer.early_receipts, {}
    for receipt in early.values():
        commit(run, receipt, now)


def begin_evaluation(run: RunState, now: float) -> None:
    """Open the evaluation and lease all held-out microbatches."""
    enter_phase(run, RunPhase.EVALUATING)
    # The step that is computed with the newest parameters.
    number = Step(run.history.version + 1 + run.manifest.training.staleness)
    run.steps.current = _new_step(run, number, now)
    _start(run, run.steps.current, now)


def _new_step(run: RunState, step: Step, now: float) -> StepState:
    microbatches = {MicrobatchIndex(index) for index in indices_of_step(run)}
    return StepState(step=step, began_at=now, previous_applied_at=now, unsettled=microbatches)


def _start(run: RunState, step: StepState, now: float) -> None:
    """Enter what has been reported of a step already, and lease the rest."""
    for peer in run.peers.values():
        commit_early_receipts(run, peer, now)
    lease_open_microbatches(run, step, now)


def pipeline_windows(stages: int, stage_queue: int, pipelines: int) -> tuple[int, int]:
    """Smallest and largest number of microbatches in flight for each pipeline: enough that every
    stage has work despite the latency of the links, and few enough that no queue overflows. Among
    several peers one holds more than the mean in proportion to its rate, so the mean is at most a
    queue over the largest rate that any peer is believed to have (decision 0037)."""
    least = min(stages + EXTRA_IN_FLIGHT, stage_queue)
    of_fastest = 2 if pipelines == 1 else int(MAX_RATE_OVER_MEDIAN)
    return least, max(least, stage_queue // of_fastest)


def inflight_windows(run: RunState, trainers: int) -> tuple[int, int]:
    """Smallest and largest number of microbatches that one trainer keeps in flight."""
    pipelines = max(1, len(run.peers.working(0)))
    windows = pipeline_windows(run.manifest.stage_count, run.manifest.limits.stage_queue, pipelines)
    least, most = (-(-pipelines * window // max(1, trainers)) for window in windows)
    return least, most


def indices_of_step(run: RunState) -> range:
    """Indices of a step's microbatches; after the last step those of the held-out ones, which
    follow the others."""
    training = run.manifest.training
    if run.history.version >= training.steps:
        return training.heldout_microbatches
    return range(training.microbatches_per_step)


def missing_stages(
    run: RunState, step: StepState, microbatch: MicrobatchIndex
) -> tuple[StageIndex, ...]:
    """Stages that have not counted the microbatch, in ascending order: its accumulate mask."""
    table = step.table
    if table.filled(microbatch) == run.manifest.stage_count:
        return ()
    return tuple(stage for stage in run.stage_indices if (microbatch, stage) not in table)


def complete(run: RunState, step: StepState) -> bool:
    """Whether every microbatch of the step is counted in every stage."""
    return len(step.table) == len(indices_of_step(run)) * run.manifest.stage_count


def may_count(run: RunState, sender: PeerId, receipt: Receipt) -> bool:
    """Whether a receipt that `sender` reports could be entered; before its signature is checked."""
    last = run.history.version + 1 + run.manifest.training.staleness
    if not run.history.version < receipt.step <= last or receipt.microbatch not in indices_of_step(
        run
    ):
        return False
    peer = run.peers.get(receipt.peer)
    return receipt.peer == sender or (peer is not None and peer.stage == receipt.stage)


def commit_relayed(run: RunState, receipt: Receipt, now: float) -> None:
    """Enter a verified receipt that another peer reports, if its signer still has the gradient.

    A receipt names no session, and the other peer may have kept it since its signer has lost the
    gradient: in this step, before a roll-back, or before the coordinator started. Such a one counts
    once its signer has reported it itself.
    """
    step = run.steps.numbered(receipt.step)
    if step is None:
        return
    may_be_lost = (
        receipt.peer in step.own_reports_only
        or receipt.generation != run.start.generation
        or (run.history.rolled_back and receipt.step <= _last_abandoned(run))
    )
    if not may_be_lost or receipt.microbatch in step.own_reports.get(receipt.peer, ()):
        _enter(run, receipt, now)


def _last_abandoned(run: RunState) -> int:
    """The last step that may have been begun before a roll-back."""
    return run.history.recomputed + 1 + run.manifest.training.staleness


def commit(run: RunState, receipt: Receipt, now: float) -> None:
    """Enter a verified receipt that its signer reports."""
    step = run.steps.numbered(receipt.step)
    if step is not None and receipt.microbatch in indices_of_step(run):
        step.own_reports.setdefault(receipt.peer, set()).add(receipt.microbatch)
    _enter(run, receipt, now)


def _enter(run: RunState, receipt: Receipt, now: float) -> None:
    """Enter one verified receipt, unless it is stale, unknown, or a duplicate."""
    step, peer = run.steps.numbered(receipt.step), run.peers.get(receipt.peer)
    wrong = _rejection_of(run, peer, receipt)
    if peer is None or wrong is not None:
        # Counted receipts may be reported again after their step.
        if Version(receipt.step) != run.history.version:
            run.statistics.reject(wrong or Rejection.NOT_THE_HOLDER)
        return
    if step is None:
        # After a restart peers re-attach one by one, and the step begins when enough have.
        peer.early_receipts[receipt.step, receipt.microbatch] = receipt
        return
    if step is run.steps.current and run.phase not in _COUNTING:
        return
    cell = (receipt.microbatch, receipt.stage)
    first, last = receipt.stage == 0, receipt.stage == run.last_stage
    if not run.audits.matches_the_data(
        receipt.step, receipt.microbatch, receipt.transcript, first=first, last=last
    ):
        # Its sender chose other data; the peer is to take them out, and may count it again.
        run.statistics.reject(Rejection.OTHER_DATA)
        cleared_cells.drop(run, step, cell, receipt.peer)
        return
    if (*cell, receipt.peer) in step.audits.dropping:
        return  # it is a receipt of the gradient that the peer is taking out
    _owes_no_more(step, receipt.microbatch, receipt.peer)
    if cell in step.table:
        # Another peer was first. Close sends this peer its commit set, without this cell.
        duplicate = (cell, receipt.peer)
        if step.table[cell].peer != receipt.peer and duplicate not in step.duplicates:
            step.duplicates.add(duplicate)
            run.statistics.work.duplicated += 1
        return
    run.statistics.work.counted += 1
    step.table[cell] = Cell(receipt.peer, receipt.tokens, receipt.loss_sum, receipt.transcript)
    lease = step.leases.get(receipt.microbatch)
    if lease is not None and is_done(run, step, receipt.microbatch):
        trainer = run.peers.get(lease.trainer)
        if trainer is not None:
            trainer.delivered_at = now
    verdicts.counted(run, step, cell, now)


def _rejection_of(run: RunState, peer: PeerState | None, receipt: Receipt) -> Rejection | None:
    """Why a receipt is rejected: wrong step, not the holder, or impossible; None if valid."""
    last = run.history.version + 1 + run.manifest.training.staleness
    if not run.history.version < receipt.step <= last or receipt.generation > run.start.generation:
        return Rejection.OTHER_STEP
    ahead = run.steps.ahead is not None and receipt.step == run.steps.ahead.step
    if (
        peer is None
        or peer.stage != receipt.stage
        or not (run.peers.holds_current(peer) or (ahead and applies_current(run, peer)))
    ):
        return Rejection.NOT_THE_HOLDER
    possible = (
        receipt.microbatch in indices_of_step(run)
        and receipt.tokens == run.manifest.tokens_per_microbatch
        and (receipt.stage == run.last_stage) == (receipt.loss_sum is not None)
        and abs(receipt.loss_sum or 0.0) <= MAX_LOSS_SUM
        and chains.complete(
            receipt.transcript, first=receipt.stage == 0, last=receipt.stage == run.last_stage
        )
    )
    return None if possible else Rejection.IMPOSSIBLE


def applies_current(run: RunState, peer: PeerState) -> bool:
    """Whether the peer can have worked on the following step and still has to apply this one: work
    ahead is one version behind by design."""
    return (
        run.phase is RunPhase.APPLYING
        and peer.phase is PeerPhase.READY
        and peer.version == run.history.version - 1
        and peer.peer not in run.peers.excluded
    )


def clear_work(run: RunState, peer: PeerId, now: float) -> None:
    """Clear the cells that a peer has counted, except in an average that stands, and free its
    leases."""
    for step in run.steps.open():
        for microbatch in list(step.owing):
            _owes_no_more(step, microbatch, peer)
        kept = step.closing.kept_stages(peer) if step.closing is not None else frozenset()
        clear_counted(run, step, peer, [s for s in run.stage_indices if s not in kept])
        _free_leases(run, step, peer, now)


def clear_counted(run: RunState, step: StepState, peer: PeerId, stages: Collection[int]) -> None:
    """Clear the peer's cells of the step in these stages."""
    for cell in step.table.held_by(peer):
        if cell[1] in stages:
            del step.table[cell]
            run.statistics.work.cleared += 1


def _free_leases(run: RunState, step: StepState, peer: PeerId, now: float) -> None:
    for microbatch in [
        m for m, second in step.speculative_leases.items() if second.trainer == peer
    ]:
        del step.speculative_leases[microbatch]
    for microbatch in sorted(step.leases.of(peer)):
        if not _promote_speculative_lease(run, step, microbatch):
            del step.leases[microbatch]
            step.unsettled.add(microbatch)
    # The other peers report their cells within one receipt interval. Masks made sooner would let
    # stages that hold the microbatch already count it again.
    step.close_not_before = max(
        step.close_not_before, now + run.manifest.limits.receipt_interval_seconds
    )


def lease_resolved(run: RunState, event: LeaseResolved, now: float) -> None:
    """Handle a trainer's result of one leased microbatch."""
    step = run.steps.numbered(event.step)
    if step is None:
        return
    for receipt in event.receipts:
        if receipt.peer == event.peer:
            commit(run, receipt, now)
        else:
            commit_relayed(run, receipt, now)
    lease, second = step.leases.get(event.microbatch), step.speculative_leases.get(event.microbatch)
    if second is not None and (second.lease, second.trainer) == (event.lease, event.peer):
        del step.speculative_leases[event.microbatch]
        return  # the first lease is still in flight, and its result decides
    if lease is None or (lease.lease, lease.trainer) != (event.lease, event.peer):
        return
    if not event.ok and _promote_speculative_lease(run, step, event.microbatch):
        return
    owing = set(_still_owing(run, step, event))
    if owing:
        step.owing[event.microbatch] = owing
    _set_lease(run, step, event.microbatch, replace(lease, resolved_at=now))
    if not event.ok and event.reason and missing_stages(run, step, event.microbatch):
        run.note(
            f"microbatch {event.microbatch} of step {event.step} failed at trainer "
            f"{short(event.peer)} and is leased again: {event.reason}",
            event.peer,
        )


def _still_owing(run: RunState, step: StepState, event: LeaseResolved) -> Iterator[PeerId]:
    """Yield the peers that a trainer reports as owing a cell, as far as the cell is missing."""
    for owing in event.owing if event.ok else ():
        peer = run.peers.get(owing)
        if peer is not None and peer.stage in missing_stages(run, step, event.microbatch):
            yield owing


def not_counted(run: RunState, peer: PeerState, message: NotCounted) -> None:
    """Handle microbatches that a peer owed and has given up."""
    step = run.steps.numbered(message.step)
    if step is not None:
        for microbatch in message.microbatches:
            _owes_no_more(step, microbatch, peer.peer)


def _owes_no_more(step: StepState, microbatch: MicrobatchIndex, peer: PeerId) -> None:
    owing = step.owing.get(microbatch)
    if owing is not None:
        owing.discard(peer)
        if not owing:
            del step.owing[microbatch]
            step.unsettled.add(microbatch)


def _promote_speculative_lease(run: RunState, step: StepState, microbatch: MicrobatchIndex) -> bool:
    """Replace a failed first lease by the speculative one; False without one."""
    second = step.speculative_leases.pop(microbatch, None)
    if second is None:
        return False
    _set_lease(run, step, microbatch, second)
    return True


def _set_lease(
    run: RunState, step: StepState, microbatch: MicrobatchIndex, lease: LeaseState
) -> None:
    step.leases[microbatch] = lease
    heapq.heappush(step.lease_alarms, (_due_at(run, step, microbatch), microbatch))


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
        if is_done(run, step, microbatch):
            continue
        due_at = _due_at(run, step, microbatch)
        if now >= due_at:
            open_microbatches.append(microbatch)
        else:
            heapq.heappush(step.lease_alarms, (due_at, microbatch))
    step.unsettled.clear()
    if open_microbatches:
        _lease_to_trainers(run, step, open_microbatches, now)


def is_done(run: RunState, step: StepState, microbatch: MicrobatchIndex) -> bool:
    """Whether a microbatch of the step is counted in every stage."""
    return step.table.filled(microbatch) == run.manifest.stage_count


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
    cells = (step.not_finite.get((microbatch, stage)) for stage in run.stage_indices)
    times = max((cell.times for cell in cells if cell is not None), default=0)
    if times <= NOT_FINITE_RETRIES:
        return 0.0
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
    """Take the trainer with the fewest microbatches among those that have not tried this one.

    No trainer gets a microbatch twice before each has had it once. A trainer that fails at once
    always has the fewest, and would otherwise get it again and again.
    """
    before = step.leases.get(microbatch)
    if before is None:
        found = least_loaded_except(driving, ())
    else:
        tried = step.tried.setdefault(microbatch, set())
        tried.add(before.trainer)
        found = least_loaded_except(driving, tried)
        if found is None:
            tried.clear()
            found = least_loaded_except(driving, ())
    assert found is not None, "a complete pipeline has a trainer"
    return found


def least_loaded_except(
    driving: list[tuple[int, int, PeerId]], others: Collection[PeerId]
) -> PeerId | None:
    """Return the trainer with the fewest microbatches that is none of the `others`; None if there
    is none. Its entry in the heap `driving` counts one microbatch more from then on."""
    aside: list[tuple[int, int, PeerId]] = []
    while driving and driving[0][2] in others:
        aside.append(heapq.heappop(driving))
    found: PeerId | None = None
    if driving:
        load, place, found = driving[0]
        heapq.heapreplace(driving, (load + 1, place, found))
    for one in aside:
        heapq.heappush(driving, one)
    return found


def send_lease(
    run: RunState, step: StepState, trainer: PeerId, microbatches: Sequence[MicrobatchIndex],
    trainers: int,
) -> int:  # fmt: skip
    """Lease microbatches to a trainer; returns the number of the lease."""
    least, most = inflight_windows(run, trainers)
    run.steps.last_lease += 1
    run.send(
        trainer,
        Lease(
            step=step.step,
            lease=run.steps.last_lease,
            window=least,
            max_window=most,
            microbatches=tuple(
                LeasedMicrobatch(
                    microbatch=microbatch,
                    accumulate=missing_stages(run, step, microbatch),
                    is_copy=microbatch in step.leases,
                )
                for microbatch in microbatches
            ),
        ),
    )
    return run.steps.last_lease


# ---------------------------------------------------------------- masks


def queue_mask_request(run: RunState, peer: PeerState, request: MaskRequest, now: float) -> None:
    """Queue the answer for one reporting interval, so that receipts under way are counted first."""
    wait = 1.2 * run.manifest.limits.receipt_interval_seconds
    run.steps.masks.append(
        PendingMask(now + wait, peer.peer, request.request, request.step, request.microbatch)
    )


def answer_masks(run: RunState, now: float) -> None:
    """Answer the mask requests that are due."""
    if not run.steps.masks or run.steps.masks[0].due_at > now:
        return  # requests arrive in the order of time, and all wait equally long
    due = [mask for mask in run.steps.masks if mask.due_at <= now]
    run.steps.masks = [mask for mask in run.steps.masks if mask.due_at > now]
    for mask in due:
        step = run.steps.numbered(mask.step)
        leased = run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING)
        counts = step is not None and (step is run.steps.ahead or leased)
        accumulate = missing_stages(run, step, mask.microbatch) if step and counts else ()
        run.send(mask.peer, Mask(request=mask.request, accumulate=accumulate))
