"""The steps in progress: the current one and, under staleness, the following one.

Values only; the rules are in `swarm_coordinator.core.rules.microbatches` and `step_close`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_coordinator.core.state.close import CloseState, Round
from swarm_coordinator.core.state.leases import LeaseBook, LeaseState
from swarm_coordinator.core.state.step_table import CellKey, StepTable
from swarm_coordinator.core.trust.audits import StepAudits
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step

MAX_FAILED_ROUNDS = 64
"""Number of aborted rounds of a step whose times are kept, the newest ones: members decide how many
there are, and the times become a row of the database."""


@dataclass(frozen=True, slots=True)
class RelayedFailure:
    """A failed attempt that one member reported because another one had aborted it."""

    reporter: PeerId
    aborted_by: PeerId
    since: float
    until: float


@dataclass(slots=True)
class NotFiniteCell:
    """The reports of peers at which the result of a cell was not finite."""

    peers: set[PeerId] = field(default_factory=set)
    senders: set[PeerId] = field(default_factory=set)
    """Peers that sent the input; empty in the first stage."""
    times: int = 0
    """Number of reports."""
    confirmed: bool = False
    """Whether the model is held responsible instead of a peer."""


class FailedRound(NamedTuple):
    """A round that was aborted; kept for the times of the step alone."""

    stages: frozenset[StageIndex]
    began_at: float
    ended_at: float


@dataclass(slots=True)
class StepState:
    """One step in progress: its table, leases and close."""

    step: Step
    began_at: float
    previous_applied_at: float
    """When the previous step was applied. Work done ahead of that does not count in the step's
    duration."""
    attempt: int = 0
    """Number of the latest attempt to close; never reused by another step or generation."""
    attempts: dict[StageIndex, int] = field(default_factory=dict)
    """Number of the latest attempt of each stage."""
    closes: int = 0
    timeouts: int = 0
    failure_counts: dict[PeerId, int] = field(default_factory=dict)
    """Failed attempts of this step attributed to each peer."""
    relayed_failures: dict[int, RelayedFailure] = field(default_factory=dict)
    """Failed attempts that no member has reported as its own observation yet."""
    failed_rounds: deque[FailedRound] = field(
        default_factory=lambda: deque(maxlen=MAX_FAILED_ROUNDS)
    )
    carrier_failures: int = 0
    """Attempts of this step that failed through a carrier and were attributed to no peer."""
    has_disagreed: bool = False
    """Whether an attempt of this step failed because a stage's members averaged to different
    norms."""
    table: StepTable = field(default_factory=StepTable)
    leases: LeaseBook = field(default_factory=LeaseBook)
    tried: dict[MicrobatchIndex, set[PeerId]] = field(default_factory=dict)
    """The trainers whose leases of a microbatch have failed; cleared once all trainers have tried
    it."""
    owing: dict[MicrobatchIndex, set[PeerId]] = field(default_factory=dict)
    """The peers that have answered a delivered microbatch and have yet to count it."""
    speculative_leases: dict[MicrobatchIndex, LeaseState] = field(default_factory=dict)
    """Second leases of microbatches that lag at the end of the step (`core.rules.speculation`)."""
    duplicates: set[tuple[CellKey, PeerId]] = field(default_factory=set)
    """Cells counted by a second peer besides the one that the table names."""
    mostly_done_at: float | None = None
    """When most of the table was first filled."""
    speculation_not_before: float = 0.0
    own_reports: dict[PeerId, set[MicrobatchIndex]] = field(default_factory=dict)
    """Microbatches that each peer itself has reported as counted, since it last lost any."""
    own_reports_only: set[PeerId] = field(default_factory=set)
    """Peers that have lost counted microbatches of this step. Another peer may have kept a receipt
    of these, so that receipts count only for what the peer itself has reported since."""
    unsettled: set[MicrobatchIndex] = field(default_factory=set)
    """Microbatches that may have to be leased; all others are done or being driven."""
    lease_alarms: list[tuple[float, MicrobatchIndex]] = field(default_factory=list)
    """A heap of the times at which a lease may expire or a failed one may be granted again."""
    not_finite: dict[CellKey, NotFiniteCell] = field(default_factory=dict)
    """The cells whose results were not finite somewhere."""
    blamed: set[PeerId] = field(default_factory=set)
    """Peers that were flagged in this step for results that are not finite."""
    audits: StepAudits = field(default_factory=StepAudits)
    closing: CloseState = field(default_factory=CloseState)
    """The close, which begins with the first of its rounds and is over when none is left."""
    close_not_before: float = 0.0
    complete_at: float | None = None
    """When the table was first complete. Joining peers may delay the close for a bounded time from
    then on, because in a large run some peer is always downloading."""

    def finite_nowhere(self) -> tuple[CellKey, NotFiniteCell] | None:
        """A cell whose result is not finite because of the model, so that the step cannot end; None
        if there is none."""
        return next(
            (
                (key, cell)
                for key, cell in self.not_finite.items()
                if cell.confirmed and key not in self.table
            ),
            None,
        )

    def lost_all(self, peer: PeerId) -> None:
        """Record that a peer has lost all that it had counted."""
        self.own_reports_only.add(peer)
        self.own_reports.pop(peer, None)

    def lost(self, peer: PeerId, microbatches: Collection[MicrobatchIndex]) -> None:
        """Record that a peer has lost some of what it had counted."""
        self.own_reports_only.add(peer)
        self.own_reports.setdefault(peer, set()).difference_update(microbatches)


@dataclass(slots=True)
class PendingMask:
    """A mask request that awaits its answer."""

    due_at: float
    peer: PeerId
    request: int
    step: Step
    microbatch: MicrobatchIndex


@dataclass(slots=True)
class StepsInProgress:
    """The steps that peers work on, and the numbers that no later step may use again."""

    last_lease: int
    """Number of the latest lease."""
    last_attempt: int
    """Number of the latest attempt to close a step."""
    current: StepState | None = None
    ahead: StepState | None = None
    """The following step, if the manifest's staleness lets it start before this one is applied."""
    began: bool = False
    """Whether this start of the coordinator has begun a step."""
    masks: list[PendingMask] = field(default_factory=list)

    def open(self) -> tuple[StepState, ...]:
        """The steps in progress, the current one first."""
        return tuple(step for step in (self.current, self.ahead) if step is not None)

    def numbered(self, number: int) -> StepState | None:
        """The step in progress with this number."""
        for step in (self.current, self.ahead):
            if step is not None and step.step == number:
                return step
        return None

    def round_of(self, stage: StageIndex | None) -> Round | None:
        """The stage's round in the current step; until it ends, no cell of the stage is cleared and
        no peer joins the stage."""
        if self.current is None or stage is None:
            return None
        return self.current.closing.rounds.get(stage)
