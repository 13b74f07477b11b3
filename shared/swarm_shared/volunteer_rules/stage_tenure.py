"""Taking, moving and giving up a stage: the tenures of one volunteer.

A tenure is one stage in one worker, from the worker's start to its end. A volunteer has at
most two:

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

import itertools
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NewType

from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.types import MAX_SENTENCE_CHARACTERS, StageIndex
from swarm_shared.protocol import AssignStage, Ready, SyncFailed

WORKER_BACKOFF_SECONDS = 2.0
"""Pause before a stage is asked for again after its worker died; doubled each time."""

MAX_WORKER_BACKOFF_SECONDS = 60.0
"""Longest pause before a stage is asked for again after its worker died."""

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
    """Whether the held stage was given up for this one."""


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
    """Whether the tenure was prepared beside another one, which ends."""


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
    reason: str


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
    """The latest assignment."""
    replaces_held: bool
    state: _State = _State.WAITING


class StageTenures:
    """The tenures of one volunteer, from its first assignment on."""

    def __init__(self) -> None:
        self._held: _Tenure | None = None
        self._prepared: _Tenure | None = None
        self._ending: set[TenureNumber] = set()
        self._deaths = 0
        """Deaths of held stages' workers since a step was applied."""
        self._numbers = itertools.count(1)
        self._actions: list[Action] = []

    @property
    def loading_stage(self) -> StageIndex | None:
        """The stage that is being loaded while none is held."""
        held = self._held
        return None if held is None or held.state is _State.READY else held.load.assignment.stage

    @property
    def all_ended(self) -> bool:
        """Whether no tenure lives or waits."""
        return self._held is None and self._prepared is None and not self._ending

    def take_actions(self) -> list[Action]:
        """Return the decisions made since the previous call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # ---- the coordinator and the volunteer

    def assigned(self, assignment: AssignStage) -> None:
        """Take a stage, beside the held one or in its place."""
        self._end_prepared()
        number, held = next(self._numbers), self._held
        load = Load(TenureNumber(number), number, assignment)
        if assignment.prepare:
            self._prepared = _Tenure(load, replaces_held=False)
        elif held is not None and held.load.assignment.stage == assignment.stage:
            self._actions.append(ForgetSnapshots())
            held.load = replace(load, tenure=held.load.tenure)
            if held.state is not _State.WAITING:
                held.state = _State.LOADING
                self._actions.append(Reload(held.load))
        else:
            self._actions.append(ForgetSnapshots())
            self._end_held()
            self._held = _Tenure(load, replaces_held=held is not None)
        self._start_waiting()

    def session_lost(self) -> None:
        """Drop the prepared stage, because a coordinator that returns has no record of the move;
        keep the held one."""
        self._end_prepared()

    def drop(self) -> None:
        """End all tenures."""
        self._end_prepared()
        self._end_held()

    # ---- the step close

    def step_applied(self) -> None:
        """Record that a step was applied: the workers do not die at once, so that the pause after a
        death is short again."""
        self._deaths = 0

    def switched(self) -> None:
        """Make the prepared stage the held one, after a step was applied in it."""
        prepared = self._prepared
        if prepared is None or prepared.state is not _State.READY:
            raise ValueError("no stage is prepared")
        replaced, self._held, self._prepared = self._held, prepared, None
        self._actions.append(Install(prepared.load.tenure, switched=True))
        if replaced is not None:
            self._end(replaced)

    def prepared_outdated(self) -> None:
        """End the prepared stage, if there is one: a step was applied without it."""
        self._end_prepared()

    # ---- the tenures themselves

    def loaded(self, load: Load, digest: str) -> None:
        """Report that the worker is at the assigned version; `digest` is that of the stage's
        parameters."""
        held, prepared = self._held, self._prepared
        ready = Ready(stage=load.assignment.stage, version=load.assignment.version, digest=digest)
        if held is not None and held.load == load:
            held.state = _State.READY
            self._actions += [Install(load.tenure, switched=False), Send(ready)]
            if prepared is not None and prepared.state is _State.READY:
                self._actions.append(PreparedReady(prepared.load.tenure))
        elif prepared is not None and prepared.load == load:
            prepared.state = _State.READY
            self._actions += [PreparedReady(load.tenure), Send(ready)]

    def ended(self, tenure: TenureNumber) -> None:
        """Report that the tenure has ended as requested."""
        self._take_lost(tenure)
        self._ending.discard(tenure)
        self._start_waiting()

    def load_failed(self, tenure: TenureNumber, reason: str) -> None:
        """Report that the tenure has ended because its stage could not be loaded."""
        lost = self._take_lost(tenure)
        if lost is not None:
            assignment = lost.load.assignment
            self._actions.append(
                Send(
                    SyncFailed(
                        stage=assignment.stage, version=assignment.version,
                        reason=reason[:MAX_SENTENCE_CHARACTERS],
                    )
                )
            )  # fmt: skip
        self.ended(tenure)

    def worker_died(self, tenure: TenureNumber, reason: str) -> None:
        """Report that the tenure has ended because its worker died."""
        held, lost = self._held, self._take_lost(tenure)
        if lost is not None and lost is held:
            self._deaths += 1
            seconds = backoff_seconds(
                self._deaths - 1, WORKER_BACKOFF_SECONDS, MAX_WORKER_BACKOFF_SECONDS
            )
            self._actions.append(RejoinAfter(seconds, reason))
        self.ended(tenure)

    # ---- tenures

    def _start_waiting(self) -> None:
        for tenure in (self._held, self._prepared):
            if tenure is not None and tenure.state is _State.WAITING and not self._ending:
                tenure.state = _State.LOADING
                self._actions.append(StartTenure(tenure.load, tenure.replaces_held))

    def _take_lost(self, number: TenureNumber) -> _Tenure | None:
        """Remove the tenure that has ended; return it unless it was asked to end."""
        held, prepared = self._held, self._prepared
        if held is not None and held.load.tenure == number:
            self._held = None
            return held
        if prepared is not None and prepared.load.tenure == number:
            self._prepared = None
            if prepared.state is _State.READY:
                self._actions.append(PreparedLost())
            return prepared
        return None

    def _end_held(self) -> None:
        if self._held is not None:
            self._end(self._held)
            self._held = None

    def _end_prepared(self) -> None:
        prepared = self._prepared
        if prepared is not None:
            self._prepared = None
            if prepared.state is _State.READY:
                self._actions.append(PreparedLost())
            self._end(prepared)

    def _end(self, tenure: _Tenure) -> None:
        if tenure.state is not _State.WAITING:
            self._ending.add(tenure.load.tenure)
            self._actions.append(EndTenure(tenure.load.tenure))
