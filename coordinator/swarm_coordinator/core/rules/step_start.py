"""What a run lacks before its next step can begin, and which peers can be moved to provide it.

Part of the pure core: changes a RunState and queues commands, does no I/O. The organiser sets the
number of peers that every stage needs when training begins. Once it has begun, one each is enough;
after a restart the run waits for the full number only as long as its earlier peers take to
re-attach, because some of them may never return.
"""

from __future__ import annotations

from swarm_coordinator.core.rules import membership
from swarm_coordinator.core.rules.stage_recovery import REATTACH_GRACE_SECONDS
from swarm_coordinator.core.state.peers import PeerState
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.waiting import paused_reason, stage_names
from swarm_shared.base.types import PeerId, StageIndex


def unmet_requirement(run: RunState, now: float) -> str:
    """Return what the run lacks before a step can begin, as text; empty if nothing."""
    wanted = peers_wanted(run, now)
    short_of = sorted(run.peers.unheld()) if wanted == 1 else _stages_below(run, wanted)
    if not short_of and run.peers.has_complete_pipeline():
        return ""
    if paused := paused_reason(run):
        return paused
    if not short_of:
        return "a peer that stays"
    need = "needs" if len(short_of) == 1 else "each need"
    needs = f"{stage_names(short_of)} {need} {wanted} {'peer' if wanted == 1 else 'peers'}"
    if wanted > 1 and _is_resumed(run):
        return f"{needs}; it goes on with fewer in {_grace_left(run, now):.0f} s"
    return needs


def peers_wanted(run: RunState, now: float) -> int:
    """Number of peers that every stage needs before a step begins."""
    if run.steps.began or (_is_resumed(run) and _grace_left(run, now) <= 0):
        return 1
    fullest = min(membership.stage_limit(run, stage) for stage in run.stage_indices)
    return min(run.manifest.limits.starting_peers_per_stage, fullest)


def _is_resumed(run: RunState) -> bool:
    """Whether an earlier start of the coordinator has trained already."""
    return run.history.version > 0 or run.history.rolled_back


def _grace_left(run: RunState, now: float) -> float:
    return run.start.at + REATTACH_GRACE_SECONDS - now


def _stages_below(run: RunState, wanted: int) -> list[StageIndex]:
    return [stage for stage in run.stage_indices if len(run.peers.working(stage)) < wanted]


def balance_stages(run: RunState, now: float) -> None:
    """Before the first step, move surplus peers to stages that lack some.

    Joining peers choose well, but a peer that returns with a stage it held may find its place
    taken. Nothing has been trained, so a move costs only the creation of fresh parameters.
    """
    wanted = peers_wanted(run, now)
    if wanted == 1 or run.history.version > 0:
        return
    # Evaluated after every message while a large run gathers: the cheap test first.
    if all(len(run.peers.working(stage)) <= wanted for stage in run.stage_indices):
        return
    for stage in _stages_below(run, wanted):
        bound = sum(not p.leaving and not p.paused for p in run.peers.bound_for(stage))
        for _ in range(wanted - bound):
            peer = _surplus_peer(run, stage, wanted)
            if peer is None:
                break  # no spare peer fits here; another stage may need less memory
            membership.reassign(run, peer, stage, "the run cannot begin without it there", now)


def _surplus_peer(run: RunState, stage: StageIndex, wanted: int) -> PeerState | None:
    """A peer that can be spared, from the stage with the most of them."""
    needed = run.manifest.stages[stage].memory
    spare: list[tuple[int, PeerId]] = []
    for other in run.stage_indices:
        staying = [p for p in run.peers.working(other) if not p.leaving]
        spare.extend(
            (len(staying), peer.peer)
            for peer in staying
            if len(staying) > wanted
            and peer.profile.wanted_stage is None
            and peer.profile.memory.holds(needed)
        )
    return run.peers[max(spare)[1]] if spare else None
