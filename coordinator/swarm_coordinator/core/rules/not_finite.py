"""Results that are not finite: whether a peer, its sender, or the model is responsible.

Part of the pure core (docs/decisions, number 0035). A peer with damaged memory or state is synced
anew, a sender of inputs chosen to overflow is excluded, and a model that has diverged is neither's
doing: the step cannot end, and the status says so.
"""

from __future__ import annotations

from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.membership import resync
from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.state.peers import PeerState, owner_of
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import NotFiniteCell, StepState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_shared.base.types import MicrobatchIndex
from swarm_shared.protocol import NotFinite

_LEASED = frozenset({RunPhase.COLLECT, RunPhase.EVALUATING})

MIN_PARTNERS = 3
"""Different receivers whose results were not finite that make the sender responsible."""

MIN_TIMES_ALONE = 3
"""Times that a microbatch is not finite at the only peer of a stage before the run is said to have
diverged: another sender may have been responsible once."""


def replace_state(run: RunState, peer: PeerState, reason: str, now: float) -> None:
    """Flag a peer that computes wrongly, and sync it anew unless it is the last of its stage.

    The state of the last one has no replacement: the caller clears what it counted, and it retries.
    """
    run.flag(peer, Rejection.NOT_FINITE, reason)
    if run.peers.has_others(peer):
        resync(run, peer, reason, now)


def reported(run: RunState, peer: PeerState, message: NotFinite, now: float) -> None:
    """Handle a microbatch that is not finite at a peer.

    If a second peer gets the same result, from another sender, the model is responsible, and
    nothing is done to a peer. Before that the peer is: it is synced anew, and the second time it
    sits the step out. Or the sender of its input is, if it is part of such results with more
    different peers: finite numbers can be chosen to overflow elsewhere.
    """
    step = run.steps.numbered(message.step)
    if step is None or peer.stage is None or not run.peers.holds_current(peer):
        return
    if message.microbatch not in cells.indices_of_step(run):
        return
    if run.phase not in _LEASED or run.steps.round_of(peer.stage) is not None:
        return  # no peer is synced anew during a close; the result will recur in the next step
    sender = run.peers.get(message.sender)
    if sender is peer or peer.stage == 0:
        sender = None  # token IDs cannot be chosen to overflow
    _record_cell(run, step, peer, sender, message.microbatch)
    if step.finite_nowhere() is not None:
        run.statistics.reject(Rejection.NOT_FINITE)
        return
    if sender is not None:
        _record_partners(run, peer, sender, now)
        if _sends_what_overflows(run, peer, sender, now):
            _exclude_sender(run, step, sender, now)
            return
    if peer.peer not in step.blamed:
        step.blamed.add(peer.peer)
        replace_state(run, peer, "what it computed was not finite", now)
    elif not run.peers.has_others(peer):
        run.statistics.reject(Rejection.NOT_FINITE)
    else:
        run.flag(peer, Rejection.NOT_FINITE, "what it computed was not finite, with a fresh state")
        release(run, peer, Release.STEP, now)


def _record_cell(
    run: RunState, step: StepState, peer: PeerState, sender: PeerState | None,
    microbatch: MicrobatchIndex,
) -> None:  # fmt: skip
    """Record a report of a cell, and hold the model responsible for it if no peer can be.

    Note the first such cell of a step.
    """
    assert peer.stage is not None
    cell = step.not_finite.setdefault((microbatch, peer.stage), NotFiniteCell())
    cell.peers.add(peer.peer)
    cell.times += 1
    if sender is not None:
        cell.senders.add(sender.peer)
    several_peers = len(cell.peers) > 1 or (
        cell.times >= MIN_TIMES_ALONE and not run.peers.has_others(peer)
    )
    several_senders = sender is None or len(cell.senders) > 1 or not run.peers.has_others(sender)
    if several_peers and several_senders and not cell.confirmed:
        is_first = step.finite_nowhere() is None
        cell.confirmed = True
        if is_first:
            run.note(diverged_sentence(run))


def _record_partners(run: RunState, receiver: PeerState, sender: PeerState, now: float) -> None:
    """Count a result that is not finite against both ends alike."""
    for peer, other in ((receiver, sender), (sender, receiver)):
        for key in held_up.accounts_of(peer):
            partner = owner_of(other)
            run.held_time.change(key, now).record_not_finite(partner, now)


def _sends_what_overflows(
    run: RunState, receiver: PeerState, sender: PeerState, now: float
) -> bool:
    """Whether the sender had a part in results that were not finite with more different peers than
    the receiver had."""
    of_sender, of_receiver = (
        max(run.held_time.change(key, now).partners(now) for key in held_up.accounts_of(peer))
        for peer in (sender, receiver)
    )
    return of_sender >= MIN_PARTNERS and of_sender > of_receiver


def _exclude_sender(run: RunState, step: StepState, sender: PeerState, now: float) -> None:
    """Flag a peer whose outputs overflow at many others, and let the step go on without it."""
    if sender.peer in run.peers.excluded:
        return
    if sender.peer in step.blamed and not run.peers.has_others(sender):
        run.statistics.reject(Rejection.NOT_FINITE)
        return
    step.blamed.add(sender.peer)
    run.flag(sender, Rejection.NOT_FINITE, "what others computed from its outputs was not finite")
    if run.peers.has_others(sender) and run.steps.round_of(sender.stage) is None:
        release(run, sender, Release.STEP, now)


def diverged_sentence(run: RunState) -> str:
    """Return a sentence about a cell that is finite at no peer, and what the organiser can do; ""
    if there is no such cell."""
    step = run.steps.current
    not_finite = None if step is None else step.finite_nowhere()
    if step is None or not_finite is None:
        return ""
    (microbatch, stage), cell = not_finite
    what = "The evaluation" if run.phase is RunPhase.EVALUATING else f"Step {step.step}"
    if len(cell.peers) > 1:
        where, cause = f"at {len(cell.peers)} peers", "training has diverged"
    else:
        where = "at its only peer"
        cause = "training has diverged, or that peer computes wrongly"
    return (
        f"{what} cannot be computed: microbatch {microbatch} is not finite in stage {stage} "
        f"{where}; {cause}. A new run can continue from an export of this one with a lower "
        "learning rate."
    )
