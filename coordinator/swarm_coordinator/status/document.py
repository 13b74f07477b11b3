"""The status document: a run at one moment, as the coordinator writes it to `status.json`.

Owns the form of the document and the rules of the run's health. `status.builder` makes it from the
core's state, `status.status_file` writes and reads it; `swarm-coordinator status`, the terminal
view, the dashboard and the metrics only read it. The HTTP API publishes parts of these models, so
their fields have descriptions. Imports nothing of the core: a view must start quickly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from swarm_shared.base.types import PeerId

FINISHED, WAITING, APPLYING = "finished", "waiting for peers", "applying"
"""Values of `core.state.phases.RunPhase`, which a view does not import."""
READY, SYNCING = "ready", "syncing"
"""Values of `core.state.peers.PeerPhase`."""

STALE_SECONDS = 15.0
"""Age at which a document of a running coordinator is overdue. With ten thousand peers it is
written every ten seconds."""

ReportedNumber = Annotated[
    float | None, AfterValidator(lambda x: x if x is not None and math.isfinite(x) else None)
]
"""A measurement; None where there is none or it is not finite, which JSON cannot express."""


MAX_SAMPLE_CHARACTERS = 20_000


class StatusModel(BaseModel):
    """Base of the document's models. They are built at first use, after a view has drawn."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        defer_build=True,
        json_schema_serialization_defaults_required=True,
    )


# ---------------------------------------------------------------- health


class HealthState(StrEnum):
    """State of a run's health."""

    HEALTHY = "healthy"
    """Every stage has a reachable peer, so steps can be made."""
    DEGRADED = "degraded"
    """A stage has no reachable peer, training has diverged, or the document is overdue."""
    WAITING = "waiting"
    """Training has not begun, or cannot go on."""
    STOPPED = "stopped"
    """No coordinator runs."""
    FINISHED = "finished"


class Health(StatusModel):
    """The run's health and its reason."""

    state: HealthState
    sentence: str = Field(description="Why the run is in this state.")
    unreachable_stages: tuple[int, ...] = Field(
        default=(), description="Stages without a reachable peer."
    )


STOPPED = Health(state=HealthState.STOPPED, sentence="The coordinator does not run.")


# ---------------------------------------------------------------- stages


class StageStatusRow(StatusModel):
    """A stage and the peers that hold it at the run's version."""

    stage: int
    peers: int
    microbatches_per_second: float = 0.0


class StageTiming(StatusModel):
    """How busy a stage was in the last minute or two, and how long its microbatches took."""

    idle_share: float | None = Field(
        default=None, description="Share of its peers' time without anything to compute, 0 to 1."
    )
    p50_seconds: float | None = Field(
        default=None, description="Median computing time of a microbatch."
    )
    p95_seconds: float | None = Field(
        default=None, description="95th percentile of the computing time of a microbatch."
    )


class StageFigures(StageTiming):
    """A stage's timing, and its sums since the start of the coordinator."""

    held_seconds: float = 0.0
    """Time for which peers held the stage while steps were made."""
    busy_seconds: float = 0.0
    """Part of it in which they computed."""
    microbatches: tuple[int, ...] = ()
    """Counts by computing time; the bounds are `core.state.utilisation.BOUNDS`."""


class RunFigures(StatusModel):
    """Utilisation of the stages, and work that did not count."""

    bubble_share: float | None = None
    """`idle_share` over all stages."""
    stages: tuple[StageFigures, ...] = ()
    rejected: dict[str, int] = {}
    """Rejected gradients, states and receipts since the start of the coordinator, by reason."""

    def timing(self, stage: int) -> StageFigures:
        return self.stages[stage] if stage < len(self.stages) else StageFigures()


class WorkCounts(StatusModel):
    """Cells since the start of the coordinator."""

    counted: int = 0
    duplicated: int = 0
    """Counted by a second peer too and taken out."""
    cleared: int = 0
    """Lost with their peer, to be computed again."""


class MoveDecisionRow(StatusModel):
    seconds_ago: float
    peer: str = ""
    text: str


class RebalancingStatus(StatusModel):
    """Moves between stages since the start of the coordinator."""

    rule: str = "none"
    period_seconds: float = 0.0
    decided: int = 0
    made: int = 0
    dropped: int = 0
    on_the_way: int = 0
    bytes_moved: int = 0
    decisions: tuple[MoveDecisionRow, ...] = ()
    """The newest, oldest first."""
    reason: str = ""
    """Why no peer moves now; empty while one does."""


# ---------------------------------------------------------------- peers and links


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSummary:
    """The public part of a peer. A dataclass, because there may be ten thousand rows."""

    name: str | None = None
    stage: int | None = None
    phase: str = ""
    leaving: bool = False
    microbatches_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow(PeerSummary):
    """An attached peer."""

    peer: str
    version: int | None = None
    paused: bool = False
    device: str = ""
    arithmetic: str = ""
    """The class of arithmetic that it claims; empty before it has one."""
    reachability: str = "unknown"
    offers_relay: bool = False
    queued: int = 0
    silent_seconds: float = 0.0
    """Seconds since its last heartbeat."""
    flagged_times: int = 0
    """Times that it was flagged for wrong results."""
    flagged_reason: str = ""


@dataclass(frozen=True, slots=True)
class PathRow:
    """The best connection of one peer to another, as the reporter measures it."""

    reporter: str
    remote: str
    kind: str
    relay: str | None = None
    rtt_seconds: float | None = None
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Bytes over one link, as the reporter counts them."""

    reporter: PeerId
    remote: PeerId
    protocol: str
    sent: int
    received: int


# ---------------------------------------------------------------- admission and dashboard


class BanRow(StatusModel):
    peer: str
    reason: str = ""
    banned_at: float = 0.0


class AdmissionOverview(StatusModel):
    mode: Literal["open", "token", "allow-list"] = "open"
    members: int = 0
    bans: tuple[BanRow, ...] = ()


class AdmissionStatus(AdmissionOverview):
    valid_tokens: int = 0


class DashboardStatus(StatusModel):
    """The dashboard's process, as the coordinator supervises it."""

    url: str | None = None
    """For a browser on this machine; None where no dashboard is served."""
    restarts: int = 0
    failures: int = 0


# ---------------------------------------------------------------- trust


class VerdictSummary(StatusModel):
    """The public part of a lost audit or check of sums."""

    step: int
    microbatch: int | None = Field(description="Null for a check of sums.")
    stage: int
    reason: str


class VerdictRow(VerdictSummary):
    peer: str
    owner: str


class OwnerSummary(StatusModel):
    """The public part of the standing of an owner."""

    passed: int = Field(description="Audits passed since its last lost one.")
    lost: int
    made: int = Field(description="Microbatches of others that it has computed again.")
    established: bool = Field(description="Whether it has passed its probation.")


class OwnerRow(OwnerSummary):
    owner: str


class TrustCounts(StatusModel):
    """Audits since the start of the coordinator, and the standing of owners."""

    audit_share: float = Field(
        default=0.0, description="Share of an established owner's cells, 0 to 1."
    )
    passed: int = 0
    lost: int = Field(default=0, description="Of the whole run.")
    under_way: int = 0
    unanswered: int = Field(default=0, description="Audits that found no auditor in time.")
    established: int = Field(default=0, description="Owners that have passed their probation.")
    on_probation: int = 0
    probation_cells: int = Field(default=0, description="Audits that an owner must pass for that.")


class TrustStatus(TrustCounts):
    owners: tuple[OwnerRow, ...] = ()
    """Those with a lost audit first, then those with the most passed ones; not all of a large
    run."""
    verdicts: tuple[VerdictRow, ...] = ()
    """The newest ones of this start, oldest first."""


# ---------------------------------------------------------------- the document


class Evaluation(StatusModel):
    """A checkpoint's evaluation by the organiser's machine."""

    version: int = Field(description="Applied steps of the checkpoint.")
    heldout_loss: ReportedNumber
    tokens: int = Field(description="Held-out tokens.")
    sample: str = Field(max_length=MAX_SAMPLE_CHARACTERS, description="A text by the model.")


class RunProgress(StatusModel):
    """The public part of the run as a whole."""

    time: float = Field(
        default=0.0, description="When the coordinator wrote this; 0 if it never has."
    )
    phase: str
    waiting_for: str = Field(
        default="", description="What the run waits for; empty while it goes on."
    )
    version: int = Field(default=0, description="Applied optimizer steps.")
    steps: int = Field(default=0, description="Optimizer steps of the whole run.")
    cells_done: int = Field(
        default=0, description="Microbatches times stages done of the step in progress."
    )
    cells_total: int = 0
    loss: ReportedNumber = Field(default=None, description="Of the last applied step.")
    heldout_loss: ReportedNumber = Field(default=None, description="At the end of the run.")
    evaluation: Evaluation | None = Field(
        default=None, description="Of the newest checkpoint that was evaluated."
    )
    tokens_per_second: ReportedNumber = Field(default=None, description="In the last applied step.")
    checkpoint_version: int | None = None
    uptime_seconds: float = Field(default=0.0, description="Of this start of the coordinator.")
    health: Health = STOPPED


class StatusDocument(RunProgress):
    """All of `status.json`. The defaults are those of a run that was never started."""

    format: int = 1
    run: str
    running: bool = False
    pid: int = 0
    coordinator: str = ""
    """The coordinator's own peer ID."""
    addresses: tuple[str, ...] = ()
    generation: int = 0
    step: int = 0
    diverged: str = ""
    """Why no peer can compute what is left of the step, as a sentence."""
    work: WorkCounts = WorkCounts()
    stages: tuple[StageStatusRow, ...] = ()
    figures: RunFigures = RunFigures()
    rebalancing: RebalancingStatus = RebalancingStatus()
    peers: tuple[PeerRow, ...] = ()
    admission: AdmissionStatus = AdmissionStatus()
    sessions: int = 0
    sessions_ended: dict[str, int] = {}
    trust: TrustStatus = TrustStatus()
    http: DashboardStatus = DashboardStatus()
    paths: tuple[PathRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
    """The ones with the most bytes."""

    @property
    def finished(self) -> bool:
        return self.phase == FINISHED


# ---------------------------------------------------------------- the run's health


def health_of(document: StatusDocument, dead_after_seconds: float) -> Health:
    """The health of the run as the coordinator sees it; it writes the result into the document."""
    unreachable = tuple(_unreachable_stages(document, dead_after_seconds))

    def health(state: HealthState, sentence: str) -> Health:
        return Health(state=state, sentence=sentence, unreachable_stages=unreachable)

    if document.finished:
        loss = document.heldout_loss
        suffix = f", held-out loss {loss:.4f}" if loss is not None else ""
        return health(HealthState.FINISHED, f"All {document.steps} steps are applied{suffix}.")
    if document.phase == WAITING:
        reason = document.waiting_for
        return health(
            HealthState.WAITING,
            f"Waiting for {reason}." if reason else "Training has not begun.",
        )
    if unreachable:
        return health(HealthState.DEGRADED, f"No reachable peer holds {_named(unreachable)}.")
    if document.waiting_for:
        return health(HealthState.WAITING, f"Waiting for {document.waiting_for}.")
    if document.diverged:
        return health(HealthState.DEGRADED, document.diverged)
    single = [row.stage for row in document.stages if row.peers == 1]
    if single:
        have = "has only one" if len(single) == 1 else "have only one each"
        return health(
            HealthState.HEALTHY, f"Every stage has a reachable peer; {_named(single)} {have}."
        )
    return health(HealthState.HEALTHY, "Every stage has reachable peers.")


def current_health(document: StatusDocument, now: float) -> Health:
    """The health at `now`, in Unix seconds: the document's, unless the coordinator has stopped or
    its document is overdue."""
    if document.finished:
        return document.health
    if not document.running:
        return STOPPED
    age_seconds = now - document.time
    if age_seconds > STALE_SECONDS:
        return Health(
            state=HealthState.DEGRADED,
            sentence=f"The coordinator has written no status for {age_seconds:.0f} seconds.",
            unreachable_stages=document.health.unreachable_stages,
        )
    return document.health


def _unreachable_stages(document: StatusDocument, dead_after_seconds: float) -> Iterator[int]:
    """Stages without a ready peer that has sent a heartbeat lately.

    While a step is applied its members change to the next version one after the other.
    """
    oldest = document.version - (document.phase == APPLYING)
    reachable: set[int | None] = set()
    for peer in document.peers:
        if len(reachable) == len(document.stages):
            break
        if (
            peer.phase == READY
            and (peer.version or 0) >= oldest
            and peer.silent_seconds <= dead_after_seconds
        ):
            reachable.add(peer.stage)
    return (row.stage for row in document.stages if row.stage not in reachable)


def stage_holders(document: StatusDocument) -> dict[int, int]:
    """Peers that hold each stage. While a step is applied, members that have not changed to the
    next version yet are counted too."""
    if document.phase != APPLYING:
        return {row.stage: row.peers for row in document.stages}
    count = Counter(peer.stage for peer in document.peers if peer.phase == READY)
    return {row.stage: max(row.peers, count[row.stage]) for row in document.stages}


def _named(stages: Sequence[int]) -> str:
    """Format stages for a sentence: `stage 0`, `stages 0, 2`."""
    numbers = ", ".join(str(stage) for stage in stages)
    return f"stage {numbers}" if len(stages) == 1 else f"stages {numbers}"


# ---------------------------------------------------------------- with the database


class AppliedStepRow(StatusModel):
    step: int
    loss: float | None
    tokens: int
    seconds: float
    written_at: float


class NoteRow(StatusModel):
    written_at: float
    text: str


class ContributorRow(StatusModel):
    """The contribution of one owner."""

    peer: str
    """The key that the devices are bound to."""
    name: str | None
    devices: int = 1
    stages: tuple[int, ...]
    microbatches: int
    tokens: int


class RunDocument(StatusDocument):
    """What the terminal view draws: the status, and the end of the run's history."""

    history: tuple[AppliedStepRow, ...] = ()
    notes: tuple[NoteRow, ...] = ()
    contributors: tuple[ContributorRow, ...] = ()
