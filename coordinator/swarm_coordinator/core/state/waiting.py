"""Why no step goes on, in words for people. Reads a RunState, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState


def waiting_reason(run: RunState) -> str:
    """The reason why no step goes on, for people; empty while one does."""
    if run.phase is RunPhase.WAITING:
        return run.waiting_reason
    if run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING) and run.history.lost_since:
        lost = run.history.lost_since
        peers, have = ("a peer", "has") if len(lost) == 1 else ("peers", "have")
        return f"{peers} to hold {stage_names(lost)}, which {have} lost every peer"
    if run.phase in (RunPhase.COLLECT, RunPhase.EVALUATING):
        return paused_reason(run)
    return ""


def paused_reason(run: RunState) -> str:
    """The reason why no step goes on while whole stages have paused; empty if none has."""
    paused = run.peers.paused_stages()
    return f"{stage_names(paused)}, where every peer has paused" if paused else ""


def stage_names(stages: Iterable[int]) -> str:
    """Stages as part of a sentence: `stage 0`, `stages 0, 1 and 2`."""
    *others, last = map(str, sorted(stages))
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
