"""The cells of a step: which microbatch is counted in which stage, by the receipts of peers.

Part of the pure core. A cell is set by the first receipt of an attached peer and cleared when that
peer is lost, because its accumulated gradient is lost with it.
"""

from __future__ import annotations

from collections.abc import Collection

from swarm_coordinator.core.rules.auditing import cleared_cells, draws
from swarm_coordinator.core.state.peers import PeerPhase, PeerState
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.step_table import Cell
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust import chains
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import NotCounted

_COUNTING = frozenset({RunPhase.COLLECT, RunPhase.CLOSING, RunPhase.EVALUATING})
"""Phases in which receipts of the current step count."""

MAX_LOSS_SUM = 1e290
"""Largest accepted loss sum: far above any real one, and the sum over a step still fits a float."""


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


def is_done(run: RunState, step: StepState, microbatch: MicrobatchIndex) -> bool:
    """Whether a microbatch of the step is counted in every stage."""
    return step.table.filled(microbatch) == run.manifest.stage_count


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
    gradient. Such a receipt counts once its signer has reported it itself.
    """
    step = run.steps.numbered(receipt.step)
    if step is None:
        return
    reported = receipt.microbatch in step.own_reports.get(receipt.peer, ())
    if reported or receipt.peer not in step.own_reports_only:
        _enter(run, receipt, now)


def commit(run: RunState, receipt: Receipt, now: float) -> None:
    """Enter a verified receipt that its signer reports."""
    step = run.steps.numbered(receipt.step)
    if step is not None and receipt.microbatch in indices_of_step(run):
        step.own_reports.setdefault(receipt.peer, set()).add(receipt.microbatch)
    _enter(run, receipt, now)


def commit_early_receipts(run: RunState, peer: PeerState, now: float) -> None:
    """Enter receipts that were reported before their step began; keep those of later steps, and all
    while the peer still has to apply the step that it missed."""
    if not run.peers.holds_current(peer):
        return
    early, peer.early_receipts = peer.early_receipts, {}
    for receipt in early.values():
        commit(run, receipt, now)


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
    owes_no_more(step, receipt.microbatch, receipt.peer)
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
    draws.counted(run, step, cell, now)


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


def clear_counted(run: RunState, step: StepState, peer: PeerId, stages: Collection[int]) -> None:
    """Clear the peer's cells of the step in these stages."""
    for cell in step.table.held_by(peer):
        if cell[1] in stages:
            del step.table[cell]
            run.statistics.work.cleared += 1


def not_counted(run: RunState, peer: PeerState, message: NotCounted) -> None:
    """Handle microbatches that a peer owed and has given up."""
    step = run.steps.numbered(message.step)
    if step is not None:
        for microbatch in message.microbatches:
            owes_no_more(step, microbatch, peer.peer)


def owes_no_more(step: StepState, microbatch: MicrobatchIndex, peer: PeerId) -> None:
    """Record that a peer has counted, lost or given up a microbatch that it was yet to count."""
    owing = step.owing.get(microbatch)
    if owing is not None:
        owing.discard(peer)
        if not owing:
            del step.owing[microbatch]
            step.unsettled.add(microbatch)
