"""Taking, moving and giving up a stage: the tenures of one volunteer.

A tenure is one stage in one worker, from the worker's start to its end. A volunteer has at most two:

    held        idle -> waiting -> loading -> holding -> idle     (holding -> loading: assigned
                                                                  again at another version)
    prepared    nothing -> waiting -> loading -> prepared -> nothing, or -> holding by a switch

An assignment makes a tenure beside the held one (`prepare`) or in its place. It waits until the
tenures before it have ended: their workers occupy the device's memory.

Invariants:

1. At most one tenure is held and one is prepared; no more than two workers live at any time.
2. A tenure that was started ends exactly once: on request, by a failure, or by its worker's death.
   No decision about it follows its end.
3. Ready is sent once for each assignment that was loaded, and only while it is the latest of its
   tenure. The result of an earlier load is ignored.
4. The end of one tenure costs no other: a prepared stage that is lost leaves the held one as it is,
   and only the death of the held stage's worker makes the volunteer attach again.
5. Whatever is prepared ends with the next assignment, the next Apply without it, and the session.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NewType

from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import AssignStage, Ready, SyncFailed

WORKER_BACKOFF_SECONDS = 2.0
"""Pause before a stage is asked for again after its worker died; doubled each time."""

MAX_WORKER_BACKOFF_SECONDS = 60.0
"""Longest of these pauses."""

TenureNumber = NewType("TenureNumber", int)
"""Identifies one tenure; never reused."""


@dataclass(frozen=True, slots=True)
class Load:
    """One assignment to one tenure. `number` is never reused."""

    tenure: TenureNumber
    number: int
    assignment: AssignStage


# ---- decisions


@dataclass(frozen=True, slots=True)
class StartTenure:
    """Start a worker for the assigned stage and bring it to the version. Answer: `loaded`; and in
    the end one of `ended`, `load_failed` and `worker_died`."""

    load: Load
    replaces_held: bool
    """Whether another stage was given up for it."""


@dataclass(frozen=True, slots=True)
class Reload:
    """The held stage is assigned again: stop serving it, and bring its worker to the version.
    Starting another worker takes seconds in which the run may wait. Answer: `loaded`."""

    load: Load


@dataclass(frozen=True, slots=True)
class EndTenure:
    """End the tenure with its worker. Answer: `ended`, after the worker's end."""

    tenure: TenureNumber


@dataclass(frozen=True, slots=True)
class Install:
    """Serve this tenure's stage: it is the held one from now on."""

    tenure: TenureNumber
    switched: bool
    """Whether it was prepared beside another one, which ends."""


@dataclass(frozen=True, slots=True)
class PreparedReady:
    """This tenure's stage can be averaged beside the held one."""

    tenure: TenureNumber


@dataclass(frozen=True, slots=True)
class PreparedLost:
    """The stage that could be averaged beside the held one is gone."""


@dataclass(frozen=True, slots=True)
class ForgetSnapshots:
    """Drop all snapshots: after a roll-back the same version number can mean another state."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator."""

    message: Ready | SyncFailed


@dataclass(frozen=True, slots=True)
class RejoinAfter:
    """The held stage is lost with its worker: attach again after a pause."""

    seconds: float


Action = (
    StartTenure | Reload | EndTenure | Install | PreparedReady | PreparedLost | ForgetSnapshots
    | Send | RejoinAfter
)  # fmt: skip


# ---- state


class _State(Enum):
    WAITING = auto()
    """Not started: the tenures before it are ending."""
    LOADING = auto()
    READY = auto()
    """Held, or prepared: the stage is at the assigned version."""


@dataclass(slots=True, eq=False)
class _Tenure:
    load: Load
    state: _State = _State.WAITING
    replaces_held: bool = False


class StageTenures:
    """The tenures of one volunteer, from its first assignment on."""

    def __init__(self) -> None: ...

    @property
    def loading_stage(self) -> StageIndex | None:
        """The stage that is being loaded while none is held."""

    @property
    def all_ended(self) -> bool:
        """Whether no tenure lives or waits."""

    def take_actions(self) -> list[Action]:
        """Return the decisions made since the previous call, in order."""

    # ---- the coordinator and the volunteer

    def assigned(self, assignment: AssignStage) -> None:
        """Take a stage, beside the held one or in its place."""

    def session_lost(self) -> None:
        """Drop the prepared stage, because a coordinator that returns has no record of the move;
        keep the held one."""

    def drop(self) -> None:
        """End all tenures."""

    # ---- the step close

    def step_applied(self) -> None:
        """A step was applied: the worker is not the kind that dies at once."""

    def switched(self) -> None:
        """A step was applied in the prepared stage: it is the held one from now on."""

    def prepared_outdated(self) -> None:
        """A step was applied without the prepared stage, if there is one."""

    # ---- the tenures themselves

    def loaded(self, load: Load, digest: str) -> None:
        """The worker is at the assigned version; `digest` is of the stage's parameters."""

    def ended(self, tenure: TenureNumber) -> None:
        """The tenure is over as requested."""

    def load_failed(self, tenure: TenureNumber, reason: str) -> None:
        """The tenure is over, because its stage could not be loaded."""

    def worker_died(self, tenure: TenureNumber) -> None:
        """The tenure is over, because its worker died."""
