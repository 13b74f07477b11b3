"""Cells that are cleared while their peers live, and taken out of the accumulators.

Part of the pure core.
"""

from __future__ import annotations

from swarm_coordinator.core.state.peers import PeerState
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.step_table import CellKey
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex
from swarm_shared.protocol import Drop, Dropped


def clear_cell(run: RunState, step: StepState, cell: CellKey) -> None:
    """Clear a cell of a living peer, which is to take the microbatch out of its accumulator.

    The round of a stage that averages already is aborted first, by the caller of the event.
    """
    entry = step.table.get(cell)
    if entry is None:
        return
    if step is run.steps.current and run.steps.round_of(cell[1]) is not None:
        run.audits.retracted.add(cell)
        return
    del step.table[cell]
    run.statistics.work.cleared += 1
    audit = step.audits.open.get((*cell, entry.peer))
    if audit is not None and not audit.confirms:
        del step.audits.open[audit.key]
    drop(run, step, cell, entry.peer)


def drop(run: RunState, step: StepState, cell: CellKey, peer: PeerId) -> None:
    """Have a peer take a microbatch out of its accumulator; until then its receipt counts no
    more."""
    microbatch, stage = cell
    if (microbatch, stage, peer) not in step.audits.dropping:
        step.audits.dropping.add((microbatch, stage, peer))
        run.send(peer, Drop(step=step.step, stage=stage, microbatches=(microbatch,)))


def dropped(run: RunState, peer: PeerState, message: Dropped) -> None:
    """A peer has taken microbatches out: what it reports from now on is computed anew."""
    step = run.steps.numbered(message.step)
    if step is not None:
        step.lost(peer.peer, message.microbatches)
        step.audits.dropping.difference_update(
            (microbatch, message.stage, peer.peer) for microbatch in message.microbatches
        )


def repeat_drops(run: RunState, peer: PeerId) -> None:
    """Send a returning peer the orders to drop microbatches that it may not have received."""
    for step in run.steps.open():
        by_stage: dict[StageIndex, list[MicrobatchIndex]] = {}
        for microbatch, stage, holder in step.audits.dropping:
            if holder == peer:
                by_stage.setdefault(stage, []).append(microbatch)
        for stage, microbatches in sorted(by_stage.items()):
            run.send(
                peer, Drop(step=step.step, stage=stage, microbatches=tuple(sorted(microbatches)))
            )
