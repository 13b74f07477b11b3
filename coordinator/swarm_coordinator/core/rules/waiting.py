"""Why no step goes on, in words for people. Reads a RunState, changes nothing."""

from __future__ import annotations

from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState


def waiting_reason(run: RunState) -> str:
    """The reason why no step goes on, for people; empty while one does."""
    if run.phase is RunPhase.WAITING:
        return run.waiting_reason
    if run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING) and run.history.lost_since:
        names = ", ".join(str(stage) for stage in sorted(run.history.lost_since))
        return f"a peer to hold stage {names}, which has lost every peer"
    if run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING):
        return paused_reason(run)
    return ""


def paused_reason(run: RunState) -> str:
    """The reason why no step goes on while whole stages have paused; empty if none has."""
    names = ", ".join(str(stage) for stage in run.peers.paused_stages())
    return f"stage {names}, where every peer has paused" if names else ""
