"""The phases of a run, and which of them may follow which.

The table is data: `swarm_coordinator.core.state.run.enter_phase` refuses what is not in it, and the
docstring of `swarm_coordinator.core.transition` gives the condition of each entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class RunPhase(StrEnum):
    """The phase of the current step (design: the life of a step)."""

    WAITING = "waiting for peers"
    COLLECT = "collecting"
    CLOSING = "closing"
    APPLYING = "applying"
    EVALUATING = "evaluating"
    STOPPING = "stopping"
    FINISHED = "finished"


ALLOWED: Mapping[RunPhase, frozenset[RunPhase]] = MappingProxyType(
    {
        RunPhase.WAITING: frozenset(
            {
                RunPhase.WAITING, RunPhase.COLLECT, RunPhase.EVALUATING, RunPhase.STOPPING,
                RunPhase.FINISHED,
            }
        ),
        RunPhase.COLLECT: frozenset({RunPhase.WAITING, RunPhase.CLOSING, RunPhase.STOPPING}),
        RunPhase.CLOSING: frozenset({RunPhase.COLLECT, RunPhase.APPLYING, RunPhase.STOPPING}),
        RunPhase.APPLYING: frozenset({RunPhase.WAITING, RunPhase.STOPPING}),
        RunPhase.EVALUATING: frozenset({RunPhase.WAITING, RunPhase.STOPPING}),
        RunPhase.STOPPING: frozenset(),
        RunPhase.FINISHED: frozenset(),
    }
)  # fmt: skip
"""The phases that may follow each phase."""
