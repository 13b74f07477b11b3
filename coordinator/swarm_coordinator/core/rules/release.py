"""The release of a peer: the one place where what it does for the run ends.

Part of the pure core. Whatever ends, these end with it, so that no caller has to know which belong
together:

    always        its part in a round of the close: its gradient stays if all others of its round
                  have averaged, else the round is aborted; the cells that it counted, except in an
                  average that stands; its leases; the roster without it
    STEP          further work in this step; it keeps its stage, and is synced after the step
    STAGE         its stage, the state, a transfer under way, and receipts of steps to come
    MEMBERSHIP    its entry, and the mask requests that it awaits

A stage whose last peer is released gets back the peers that are excluded from the step.
"""

from __future__ import annotations

from enum import StrEnum

from swarm_coordinator.core.rules import roster, round_membership
from swarm_coordinator.core.rules.microbatches import leases
from swarm_coordinator.core.state.peers import PeerState, short
from swarm_coordinator.core.state.run import RunState


class Release(StrEnum):
    """How much ends, as the reason that the members of its round are sent."""

    STEP = "is excluded from the step"
    STAGE = "is assigned a stage again"
    MEMBERSHIP = "is gone"


def release(run: RunState, peer: PeerState, ends: Release, now: float) -> None:
    """End what a peer does for the run; see the module docstring."""
    listed = run.peers.holds_current(peer)
    if ends is Release.MEMBERSHIP:
        del run.peers[peer.peer]
        run.steps.masks = [mask for mask in run.steps.masks if mask.peer != peer.peer]
    round_membership.leave(run, peer.peer, f"{short(peer.peer)} {ends}", now)
    leases.clear_work(run, peer.peer, now)
    if ends is not Release.STEP:
        for step in run.steps.open():
            step.lost_all(peer.peer)
    if ends is Release.STEP:
        run.peers.exclude(peer)
    elif ends is Release.STAGE:
        run.peers.release_stage(peer)
        peer.early_receipts.clear()
    if listed:  # a peer that attaches and leaves at once is mostly in no roster
        roster.changed(run, peer.peer, now)
    _readmit(run)


def _readmit(run: RunState) -> None:
    """Readmit excluded peers that are released from their stage, or whose stage has lost all other
    peers."""
    for peer_id in list(run.peers.excluded):
        peer = run.peers[peer_id]
        if peer.stage is None or not run.peers.ready(peer.stage):
            run.peers.readmit(peer)
            run.roster.dirty = True
            if run.steps.current is not None:
                run.steps.current.failure_counts.pop(peer_id, None)
