"""What the view shows of a run: `status.json`, and the end of its history.

Owns the form in which both are read here. Fields of a newer coordinator are left alone, those of an
older one that lacks them have a default.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import BaseModel, ConfigDict


class StatusModel(BaseModel):
    # Built at the first use, when the screen is there already.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class StageStatusRow(StatusModel):
    stage: int
    peers: int
    microbatches_per_second: float = 0.0


class StageFigures(StatusModel):
    """Of the last minute or two."""

    idle_share: float | None = None
    p50_seconds: float | None = None
    p95_seconds: float | None = None


class FigureRows(StatusModel):
    bubble_share: float | None = None
    stages: tuple[StageFigures, ...] = ()
    rejected: dict[str, int] = {}


class PeerRow(StatusModel):
    peer: str
    name: str | None = None
    stage: int | None = None
    phase: str = ""
    version: int | None = None
    leaving: bool = False
    device: str = ""
    reachability: str = "unknown"
    offers_relay: bool = False
    microbatches_per_second: float = 0.0
    queued: int = 0
    silent_seconds: float = 0.0
    flagged_times: int = 0
    flagged_reason: str = ""


class PathRow(StatusModel):
    reporter: str
    remote: str
    kind: str
    relay: str | None = None
    rtt_seconds: float | None = None
    bytes_per_second: float = 0.0


class BanRow(StatusModel):
    peer: str
    reason: str = ""
    banned_at: float = 0.0


class AdmissionStatus(StatusModel):
    mode: str = "open"
    members: int = 0
    valid_tokens: int = 0
    bans: tuple[BanRow, ...] = ()


class DecisionRow(StatusModel):
    seconds_ago: float
    text: str


class RebalancingStatus(StatusModel):
    rule: str = "none"
    made: int = 0
    dropped: int = 0
    on_the_way: int = 0
    bytes_moved: int = 0
    decisions: tuple[DecisionRow, ...] = ()
    reason: str = ""


class WorkCounts(StatusModel):
    counted: int = 0
    duplicated: int = 0
    cleared: int = 0


class AppliedStepRow(StatusModel):
    step: int
    loss: float | None
    tokens: int
    seconds: float
    written_at: float


class NoteRow(StatusModel):
    text: str
    written_at: float


class ContributorRow(StatusModel):
    """One person."""

    peer: str
    """The key that the devices are bound to."""
    name: str | None
    devices: int = 1
    stages: tuple[int, ...]
    microbatches: int
    tokens: int


class RunDocument(StatusModel):
    """All of it at one moment."""

    run: str
    phase: str
    time: float = 0.0
    """When the coordinator wrote it; 0 when it never has."""
    running: bool = False
    pid: int = 0
    coordinator: str = ""
    addresses: tuple[str, ...] = ()
    waiting_for: str = ""
    generation: int = 0
    version: int = 0
    steps: int = 0
    step: int = 0
    cells_done: int = 0
    cells_total: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    heldout_loss: float | None = None
    checkpoint_version: int | None = None
    uptime_seconds: float = 0.0
    healthy: bool = False
    work: WorkCounts = WorkCounts()
    stages: tuple[StageStatusRow, ...] = ()
    figures: FigureRows = FigureRows()
    rebalancing: RebalancingStatus = RebalancingStatus()
    peers: tuple[PeerRow, ...] = ()
    admission: AdmissionStatus = AdmissionStatus()
    sessions: int = 0
    sessions_ended: dict[str, int] = {}
    paths: tuple[PathRow, ...] = ()
    history: tuple[AppliedStepRow, ...] = ()
    notes: tuple[NoteRow, ...] = ()
    contributors: tuple[ContributorRow, ...] = ()

    @property
    def finished(self) -> bool:
        return self.phase == "finished"


APPLYING = "applying"


def stage_holders(document: RunDocument) -> dict[int, int]:
    """Peers that hold each stage. While a step is applied they turn to the next version one after
    the other, and those that have not yet hold it all the same."""
    if document.phase != APPLYING:
        return {row.stage: row.peers for row in document.stages}
    count = Counter(peer.stage for peer in document.peers if peer.phase == "ready")
    return {row.stage: max(row.peers, count[row.stage]) for row in document.stages}


def health(document: RunDocument) -> tuple[str, str]:
    """One word, and the sentence that says why."""
    if document.finished:
        loss = document.heldout_loss
        told = f", held-out loss {loss:.4f}" if loss is not None else ""
        return "finished", f"The run is finished after {document.version} steps{told}."
    if not document.running:
        return "stopped", "The coordinator does not run."
    lost = [str(stage) for stage, peers in stage_holders(document).items() if peers == 0]
    if lost:
        names = ", ".join(lost)
        return "incomplete", f"Nobody holds stage {names}: nothing can be trained."
    if document.waiting_for:
        return "waiting", f"It waits for {document.waiting_for}."
    if not document.healthy and document.phase != APPLYING:
        return "incomplete", "A stage has no peer that is ready."
    words = {"collecting": "Microbatches of this step are being computed.",
             "closing": "The step is being closed: gradients are averaged.",
             "applying": "The step is being applied.",
             "evaluating": "The held-out loss is being measured."}  # fmt: skip
    return "healthy", words.get(document.phase, f"The run is {document.phase}.")


def parse(told: dict[str, Any], **more: Any) -> RunDocument:
    """ValidationError when it has another form."""
    known = {name: value for name, value in told.items() if value is not None}
    return RunDocument.model_validate({**known, **more})
