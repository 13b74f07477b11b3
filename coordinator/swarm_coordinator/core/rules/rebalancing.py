"""Moves of peers between stages while the run goes on: the decision and its execution.

Part of the pure core (design: placement and rebalancing); which peer moves is computed by
`swarm_shared.scheduling.placement`. A move keeps every guarantee of a step:

    with memory for both stages  The peer fetches the new stage's state while it serves the old
                                 stage. In the next close it averages both stages, contributing
                                 zero to the new one, and holds the new stage once the step is
                                 applied. Its counted microbatches stay counted, and no step
                                 goes without it.
    without                      Between two steps, when it has counted nothing yet, it releases
                                 the old stage and joins the new one like a joining peer. Only a
                                 peer that its old stage can spare is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swarm_coordinator.core.rules import membership, state_transfer
from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.state.close import CloseState
from swarm_coordinator.core.state.moves import (
    DecisionNote,
    RebalancingRule,
    RebalancingSettings,
    RebalancingState,
)
from swarm_coordinator.core.state.peers import PeerState, StageTransfer, display
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement import (
    Move,
    MoveDecision,
    MovePolicy,
    PeerLoad,
    StageLoad,
)
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

MOVE_TIMEOUT_SECONDS = 900.0
"""Seconds after which an unfinished move is abandoned; the fleet has changed since the decision."""

ASSUMED_DOWNLOAD_BYTES_PER_SECOND = 6.25e6
"""Download rate assumed for a peer without a measured download: 50 Mbit/s."""

PEERS_PER_LOSS = 256
"""Number of peers per lost stage holder that triggers an early decision; fewer losses change the
fleet too little."""


def rebalancing_of(manifest: Manifest, settings: RebalancingSettings) -> RebalancingState:
    """Return the initial rebalancing state for a manifest."""
    stages = tuple(
        StageLoad(
            stage=StageIndex(index),
            work_flops=stage.work_flops or 1.0,
            memory=stage.memory,
            state_bytes=sizes.state_bytes + sizes.frozen_bytes,
            frozen_bytes=sizes.frozen_bytes,
            sent_bytes=sizes.sent_bytes,
        )
        for index, (stage, sizes) in enumerate(
            zip(manifest.stages, stage_sizes(manifest), strict=True)
        )
    )
    return RebalancingState(settings, stages)


# ---------------------------------------------------------------- deciding


def consider(run: RunState, now: float) -> None:
    """Decide once per period, while the pipeline runs, whether peers should move."""
    rebalancing = run.rebalancing
    settings = rebalancing.settings
    if settings.rule is RebalancingRule.NONE or run.phase is not RunPhase.COLLECT:
        return
    if rebalancing.due_at is None:
        rebalancing.due_at = now + settings.policy.period_seconds
        rebalancing.losses_seen = run.peers.losses
    elif _has_lost_many(run):
        # The fleet has changed: do not wait for the period, only for peers that are lost together
        # with this one. Each stage still rests for its own period.
        rebalancing.losses_seen = run.peers.losses
        rebalancing.due_at = min(rebalancing.due_at, now + settings.loss_reaction_seconds)
    if now < rebalancing.due_at:
        return
    rebalancing.due_at = now + settings.policy.period_seconds
    if run.peers.unheld():
        rebalancing.reason = "a stage has no peer, which comes first"
        return
    decision = _decide(run, now)
    if decision is None:
        rebalancing.reason = "no peer has reported a rate yet"
        return
    rebalancing.reason = decision.reason
    for move in decision.moves:
        _begin(run, move, now)


def _has_lost_many(run: RunState) -> bool:
    """Whether enough stage holders were lost since the last decision.

    Enough is one per PEERS_PER_LOSS peers, at least one.
    """
    lost = run.peers.losses - run.rebalancing.losses_seen
    return lost >= max(1, len(run.peers) // PEERS_PER_LOSS)


def _decide(run: RunState, now: float) -> MoveDecision | None:
    rebalancing = run.rebalancing
    policy = _within_a_step(run, rebalancing.settings.policy)
    peers = _loads(run, policy)
    if not peers:
        return None
    resting = {
        stage
        for stage, since in rebalancing.last_involved.items()
        if now - since < policy.period_seconds
    }
    return rebalancing.settings.choose(rebalancing.stages, peers, policy, resting)


def _within_a_step(run: RunState, policy: MovePolicy) -> MovePolicy:
    """Bound the allowed download time by the duration of a step.

    State is exact only within one step, whose close is delayed for downloads by `join_hold_seconds`
    at most.
    """
    if run.history.last_applied is None:
        return policy
    longest = run.history.last_applied.seconds + run.manifest.limits.join_hold_seconds
    return replace(policy, longest_download_seconds=min(longest, policy.longest_download_seconds))


def _loads(run: RunState, policy: MovePolicy) -> list[PeerLoad]:
    """The load of every staying peer, at the stage that it holds or moves to.

    Empty if no rate is known. A peer without a reported rate counts with the mean of the other
    peers. A peer without a measured download is assumed to finish one within a step; a first
    attempt shows whether it does.
    """
    rebalancing = run.rebalancing
    largest_bytes = max(stage.state_bytes for stage in rebalancing.stages)
    assumed_download = max(
        ASSUMED_DOWNLOAD_BYTES_PER_SECOND,
        largest_bytes / policy.longest_download_seconds,
    )
    counted = [
        (peer, stage)
        for stage in run.stage_indices
        for peer in run.peers.bound_for(stage)
        if not peer.leaving and not peer.paused
    ]
    rates = [
        min(peer.rates.flops_per_second, peer.rates.uplink_flops_per_second)
        for peer, _ in counted
        if peer.rates.flops_per_second > 0
    ]
    if not rates:
        return []
    mean = sum(rates) / len(rates)
    return [
        PeerLoad(
            peer=peer.peer,
            stage=stage,
            flops_per_second=peer.rates.flops_per_second or mean,
            memory=peer.profile.memory,
            download_bytes_per_second=peer.rates.download_bytes_per_second or assumed_download,
            may_move=_may_move(run, peer),
            queued=peer.rates.queued,
            up_bytes_per_second=peer.rates.up_bytes_per_second,
        )
        for peer, stage in counted
    ]


def _may_move(run: RunState, peer: PeerState) -> bool:
    return (
        run.peers.holds_current(peer)
        and peer.transfer is None
        and peer.profile.wanted_stage is None
    )


def _begin(run: RunState, move: Move, now: float) -> None:
    """Start a decided move."""
    rebalancing = run.rebalancing
    peer = run.peers[move.peer]
    if membership.is_full(run, move.destination):
        return
    # At both ends of a tied model, one peer would join an all-reduce twice.
    at_tied_ends = {move.source, move.destination} == run.tied_stages()
    release_first = move.release_first or at_tied_ends
    if release_first and move.partner is not None:
        return  # the exchange would leave a stage without both of them
    run.peers.begin_transfer(
        peer,
        StageTransfer(move.destination, now, release_first=release_first, partner=move.partner),
    )
    rebalancing.last_involved[move.source] = rebalancing.last_involved[move.destination] = now
    rebalancing.decided += 1
    text = move.sentence(display(peer))
    rebalancing.decisions.append(DecisionNote(now, peer.peer, text))
    run.note(text, peer.peer)


# ---------------------------------------------------------------- carrying it out


def abandon_stale_moves(run: RunState, now: float) -> None:
    """Cancel moves that can no longer happen, or no longer should.

    A move for which the members average already ends with their round.
    """
    for peer_id, moving in list(run.peers.movers.items()):
        peer = run.peers[peer_id]
        round_ = run.steps.round_of(peer.stage)
        if round_ is not None and peer_id in round_.switching:
            continue
        if peer.leaving:
            state_transfer.drop_move(run, peer, "it leaves")
        elif peer_id in run.peers.excluded:
            state_transfer.drop_move(run, peer, "it is excluded from this step")
        elif moving.close_delays > state_transfer.MAX_CLOSE_DELAYS:
            # The failed attempt bounds its rate, so that it is not chosen again.
            tried_bytes = run.rebalancing.stages[moving.stage].state_bytes
            peer.rates.download_bytes_per_second = tried_bytes / max(1.0, now - moving.asked_at)
            state_transfer.drop_move(run, peer, "its downloads take longer than a step")
        elif now - moving.begun_at > MOVE_TIMEOUT_SECONDS:
            state_transfer.drop_move(run, peer, "it took too long")
        elif not run.peers.has_partner(peer_id, moving):
            state_transfer.drop_move(run, peer, "no peer takes its place any more")


def switching(run: RunState) -> dict[PeerId, StageIndex]:
    """The members that change stage with the close about to begin, with their destinations.

    They have the state of the next stage, and their old stage can spare them. A stage that has
    averaged already neither gains nor loses a member.
    """
    ready: dict[PeerId, StageTransfer] = {}
    for peer_id, moving in sorted(run.peers.movers.items(), key=lambda mover: mover[0]):
        peer = run.peers[peer_id]
        averages = run.steps.round_of(peer.stage) or run.steps.round_of(moving.stage)
        current = moving.version == run.history.version and run.peers.holds_current(peer)
        if moving.ready and current and averages is None:
            ready[peer_id] = moving
    destinations: dict[PeerId, StageIndex] = {}
    for peer_id, moving in ready.items():
        peer = run.peers[peer_id]
        if moving.partner is not None:
            if moving.partner in ready and run.peers.has_partner(peer_id, moving):
                destinations[peer_id] = moving.stage
        elif _can_be_spared(run, peer, destinations):
            destinations[peer_id] = moving.stage
        else:
            state_transfer.drop_move(run, peer, f"stage {peer.stage} needs it")
    return destinations


def _can_be_spared(run: RunState, peer: PeerState, going: Iterable[PeerId]) -> bool:
    if peer.stage is None:
        return True
    minimum = run.rebalancing.settings.policy.minimum_replicas
    others = [
        p
        for p in run.peers.ready(peer.stage)
        if not p.leaving and not p.paused and p.peer not in {*going, peer.peer}
    ]
    return len(others) >= minimum


def apply_switches(run: RunState, closing: CloseState) -> None:
    """Let the switching members hold their next stage, once the step is decided."""
    going = [switch for round_ in closing.each_round() for switch in round_.switching.items()]
    for peer_id, stage in going:
        peer = run.peers[peer_id]
        closing.switch_stage(peer_id, stage)
        run.note(f"{display(peer)} switches from stage {peer.stage} to stage {stage}", peer_id)
        run.hold(peer, stage, peer.version)
        if run.steps.ahead is not None:
            # Its gradients of the next step belong to the old stage.
            cells.clear_counted(run, run.steps.ahead, peer_id, run.stage_indices)
        run.rebalancing.made += 1


def move_between_steps(run: RunState, now: float) -> None:
    """Move the peers without memory for two stages, which have counted nothing at this point."""
    for peer_id, moving in list(run.peers.movers.items()):
        peer = run.peers[peer_id]
        if not moving.release_first:
            continue
        if not _can_be_spared(run, peer, ()):
            state_transfer.drop_move(run, peer, f"stage {peer.stage} needs it")
            continue
        run.rebalancing.made += 1
        run.rebalancing.bytes_moved += run.rebalancing.stages[moving.stage].state_bytes
        membership.reassign(run, peer, moving.stage, "it moves there", now)
