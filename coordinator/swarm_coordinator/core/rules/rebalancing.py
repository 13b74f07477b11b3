"""Peers that move to another stage while the run goes on: deciding it, and carrying it out.

Part of the pure core (design: placement and rebalancing); who moves is
`swarm_shared.scheduling.placement`'s
to say. A move keeps every promise of a step:

    with room for both   the peer gets the new stage's state beside the old one that it serves on.
                         In the first close after that it averages both stages, to the new one it
                         adds nothing, and when the step is applied it holds the new one: nothing
                         that it has counted is lost, and no step goes without it.
    without              between two steps, when it has counted nothing yet, it gives the old stage
                         up and comes to the new one as newcomers do. The old stage can spare it,
                         or it would not have been chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swarm_coordinator.core.rules import membership, microbatches, state_transfer
from swarm_coordinator.core.state.moves import (
    DecisionNote,
    RebalancingRule,
    RebalancingSettings,
    RebalancingState,
    StageMove,
)
from swarm_coordinator.core.state.run import (
    CloseState,
    PeerPhase,
    PeerState,
    RunPhase,
    RunState,
    display,
)
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement import (
    Move,
    MoveDecision,
    MovePolicy,
    PeerLoad,
    StageLoad,
    choose_moves,
    choose_swarm_moves,
)
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

MOVE_TIMEOUT_SECONDS = 900.0
"""A move that has not come about by then is given up; the fleet has changed since."""


PEERS_PER_LOSS = 256
"""Fewer losses than one in so many change the fleet too little to look at it out of turn."""

LOSS_REACTION_SECONDS = 2.0
"""After a loss. Those that go together are noticed within a second or two of each other."""


def rebalancing_of(manifest: Manifest, settings: RebalancingSettings) -> RebalancingState:
    stages = tuple(
        StageLoad(
            stage=StageIndex(index),
            work_flops=stage.work_flops or 1.0,
            memory_bytes=stage.memory_bytes,
            state_bytes=sizes.state_bytes,
            sent_bytes=sizes.sent_bytes,
        )
        for index, (stage, sizes) in enumerate(
            zip(manifest.stages, stage_sizes(manifest), strict=True)
        )
    )
    return RebalancingState(settings, stages)


# ---------------------------------------------------------------- deciding


def consider(run: RunState, now: float) -> None:
    """Every period, while the pipeline runs: whether somebody should move."""
    rebalancing = run.rebalancing
    settings = rebalancing.settings
    if settings.rule is RebalancingRule.NONE or run.phase is not RunPhase.COLLECT:
        return
    if rebalancing.due_at is None:
        rebalancing.due_at = now + settings.policy.period_seconds
        rebalancing.losses_seen = run.peers.losses
    elif settings.rule is RebalancingRule.THROUGHPUT and _has_lost_many(run):
        # The fleet is another one: no reason to wait for the period, only for the others that are
        # lost together with this one. Each stage rests for its period all the same.
        rebalancing.losses_seen = run.peers.losses
        rebalancing.due_at = min(rebalancing.due_at, now + LOSS_REACTION_SECONDS)
    if now < rebalancing.due_at:
        return
    rebalancing.due_at = now + settings.policy.period_seconds
    if run.unheld():
        rebalancing.reason = "a stage has nobody, which comes first"
        return
    decision = _decide(run, now)
    if decision is None:
        rebalancing.reason = "nobody has told a rate yet"
        return
    rebalancing.reason = decision.reason
    for move in decision.moves:
        _begin(run, move, now)


def _has_lost_many(run: RunState) -> bool:
    """One is many in a small run; of ten thousand, forty are."""
    lost = run.peers.losses - run.rebalancing.losses_seen
    return lost >= max(1, len(run.peers) // PEERS_PER_LOSS)


def _decide(run: RunState, now: float) -> MoveDecision | None:
    rebalancing = run.rebalancing
    policy = _within_a_step(run, rebalancing.settings.policy)
    peers = _loads(run, policy)
    if not peers:
        return None
    if rebalancing.settings.rule is RebalancingRule.SWARM:
        return choose_swarm_moves(rebalancing.stages, peers, policy)
    resting = {
        stage
        for stage, since in rebalancing.last_involved.items()
        if now - since < policy.period_seconds
    }
    return choose_moves(rebalancing.stages, peers, policy, resting)


def _within_a_step(run: RunState, policy: MovePolicy) -> MovePolicy:
    """State is exact only within one step, whose close waits a little for who downloads it."""
    if run.last_applied is None:
        return policy
    longest = run.last_applied.seconds + run.manifest.limits.join_hold_seconds
    return replace(policy, longest_download_seconds=min(longest, policy.longest_download_seconds))


def _loads(run: RunState, policy: MovePolicy) -> list[PeerLoad]:
    """All who stay, at the stage that they hold or are on their way to; none if no rate is known.

    Who has told no rate yet counts like the mean of the others. Who has downloaded nothing yet is
    taken to manage it within a step: a try shows whether it does.
    """
    rebalancing = run.rebalancing
    largest_bytes = max(stage.state_bytes for stage in rebalancing.stages)
    unseen_line = max(
        rebalancing.settings.assumed_download_bytes_per_second,
        largest_bytes / policy.longest_download_seconds,
    )
    counted = [
        (peer, StageIndex(stage))
        for stage in run.stage_indices
        for peer in run.peers.bound_for(StageIndex(stage))
        if not peer.leaving and not peer.paused
    ]
    told = [
        min(peer.flops_per_second, peer.uplink_flops_per_second)
        for peer, _ in counted
        if peer.flops_per_second > 0
    ]
    if not told:
        return []
    mean = sum(told) / len(told)
    return [
        PeerLoad(
            peer=peer.peer,
            stage=stage,
            flops_per_second=peer.flops_per_second or mean,
            memory_bytes=peer.memory_bytes,
            download_bytes_per_second=peer.download_bytes_per_second or unseen_line,
            may_move=_may_move(run, peer),
            queued=peer.queued,
            up_bytes_per_second=peer.up_bytes_per_second,
        )
        for peer, stage in counted
    ]


def _may_move(run: RunState, peer: PeerState) -> bool:
    return run.holds_current(peer) and peer.moving is None and peer.wanted_stage is None


def _begin(run: RunState, move: Move, now: float) -> None:
    rebalancing = run.rebalancing
    peer = run.peers[move.peer]
    release_first = move.release_first or _are_tied_ends(run, move.source, move.destination)
    if release_first and move.partner is not None:
        return  # neither stage can be without both of them
    peer.moving = StageMove(move.destination, release_first, now, move.partner)
    rebalancing.last_involved[move.source] = rebalancing.last_involved[move.destination] = now
    rebalancing.decided += 1
    text = move.sentence(display(peer))
    rebalancing.decisions.append(DecisionNote(now, peer.peer, text))
    run.note(text, peer.peer)


def _are_tied_ends(run: RunState, one: StageIndex, other: StageIndex) -> bool:
    """Both ends of a tied model: a peer would take part in the same all-reduce twice."""
    return run.manifest.model.tie_embeddings and {one, other} == {StageIndex(0), run.last_stage}


# ---------------------------------------------------------------- carrying it out


def abandon_stale_moves(run: RunState, now: float) -> None:
    """Give up moves that cannot or should not come about any more."""
    for peer in list(run.peers.movers.values()):
        moving = peer.moving
        assert moving is not None
        if peer.leaving:
            state_transfer.drop_move(run, peer, "it leaves")
        elif peer.phase is not PeerPhase.READY:
            state_transfer.drop_move(run, peer, "it has lost the stage that it held")
        elif run.step is not None and peer.peer in run.step.excluded:
            state_transfer.drop_move(run, peer, "it sits this step out")
        elif moving.close_delays > state_transfer.MAX_CLOSE_DELAYS:
            # Not even so fast, then; it is not asked again before it has shown that it is faster.
            tried_bytes = run.rebalancing.stages[moving.stage].state_bytes
            peer.download_bytes_per_second = tried_bytes / max(1.0, now - moving.asked_at)
            state_transfer.drop_move(run, peer, "its downloads take longer than a step")
        elif now - moving.begun_at > MOVE_TIMEOUT_SECONDS:
            state_transfer.drop_move(run, peer, "it took too long")
        elif moving.partner is not None and not _partner_moves(run, moving.partner, peer):
            state_transfer.drop_move(run, peer, "nobody comes in its place any more")


def _partner_moves(run: RunState, partner: PeerId, peer: PeerState) -> bool:
    """Whether the other one of an exchange is still on its way."""
    other = run.peers.get(partner)
    return other is not None and other.moving is not None and other.moving.partner == peer.peer


def mover_delays_close(run: RunState, now: float) -> bool:
    """A mover that had to start over is waited for like a newcomer, for a bounded time."""
    return any(
        peer.moving is not None
        and not peer.moving.ready
        and now < peer.moving.close_delayed_until
        and run.round_of(peer.stage) is None
        and run.round_of(peer.moving.stage) is None
        for peer in run.peers.movers.values()
    )


def switching(run: RunState) -> dict[PeerId, StageIndex]:
    """Who has the state of its next stage and can be spared where it is, in a close that begins.
    A stage that has averaged already takes nobody, and lets nobody go."""
    ready: dict[PeerId, StageMove] = {}
    for peer in sorted(run.peers.movers.values(), key=lambda mover: mover.peer):
        moving = peer.moving
        assert moving is not None
        averages = run.round_of(peer.stage) or run.round_of(moving.stage)
        current = moving.version == run.version and run.holds_current(peer)
        if moving.ready and current and averages is None:
            ready[peer.peer] = moving
    found: dict[PeerId, StageIndex] = {}
    for peer_id, moving in ready.items():
        peer = run.peers[peer_id]
        if moving.partner is not None:
            if moving.partner in ready and _partner_moves(run, moving.partner, peer):
                found[peer_id] = moving.stage
        elif _can_be_spared(run, peer, found):
            found[peer_id] = moving.stage
        else:
            state_transfer.drop_move(run, peer, f"stage {peer.stage} needs it")
    return found


def _can_be_spared(run: RunState, peer: PeerState, going: Iterable[PeerId]) -> bool:
    assert peer.stage is not None
    minimum = run.rebalancing.settings.policy.minimum_replicas
    others = [
        p
        for p in run.ready_peers(peer.stage)
        if not p.leaving and not p.paused and p.peer not in {*going, peer.peer}
    ]
    return len(others) >= minimum


def apply_switches(run: RunState, closing: CloseState) -> None:
    """The step is decided: with its Apply these hold their next stage."""
    going = [each for found in closing.each_round() for each in found.switching.items()]
    for peer_id, stage in going:
        peer = run.peers[peer_id]
        closing.switch_stage(peer_id, stage)
        run.note(f"{display(peer)} goes over from stage {peer.stage} to stage {stage}", peer_id)
        peer.moving = None
        peer.stage = stage
        if run.ahead is not None:
            # It stays behind with the old stage.
            microbatches.clear_counted(run, run.ahead, peer_id, run.stage_indices)
        run.rebalancing.made += 1


def move_between_steps(run: RunState, now: float) -> None:
    """Those that cannot hold two stages give theirs up now, when they have counted nothing."""
    for peer in list(run.peers.movers.values()):
        moving = peer.moving
        assert moving is not None
        if not moving.release_first or not run.holds_current(peer):
            continue
        if not _can_be_spared(run, peer, ()):
            state_transfer.drop_move(run, peer, f"stage {peer.stage} needs it")
            continue
        run.rebalancing.made += 1
        run.rebalancing.bytes_moved += run.rebalancing.stages[moving.stage].state_bytes
        membership.move(run, peer, moving.stage, "it moves there", now)
