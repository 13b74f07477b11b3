"""What the HTTP API answers, in full: `/api/v1/openapi.json` is made from these.

Public documents name a peer by its own choice of name and the end of its ID; they never hold an
address. A newer release may add fields; a field's meaning changes only with the path's version.
Times are Unix seconds, losses nats per token, rates per second.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

API_VERSION = 1


class HealthState(StrEnum):
    """The run's health, in one word."""

    HEALTHY = "healthy"
    """Every stage has a peer that can be reached, and steps can be made."""
    DEGRADED = "degraded"
    WAITING = "waiting"
    """For peers: training has not begun, or cannot go on."""
    FINISHED = "finished"


class ApiModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(ApiModel):
    """Every answer that is no success."""

    error: str = Field(description="What was seen, and what is needed.")


class Health(ApiModel):
    state: HealthState
    sentence: str
    unreachable_stages: tuple[int, ...] = Field(description="Stages without a reachable peer.")


class RunStatus(ApiModel):
    api_version: int = API_VERSION
    name: str
    software: str
    time: float = Field(description="When the coordinator said all this.")
    health: Health
    phase: str
    waiting_for: str
    version: int = Field(description="Applied optimizer steps.")
    steps: int = Field(description="Optimizer steps of the whole run.")
    cells_done: int = Field(description="Microbatches times stages of the step under way.")
    cells_total: int
    loss: float | None = Field(description="Of the last applied step.")
    heldout_loss: float | None
    tokens: int = Field(description="Of all applied steps.")
    tokens_per_second: float | None = Field(description="In the last applied step.")
    checkpoint_version: int | None
    uptime_seconds: float
    stages: int
    peers: int = Field(description="Attached now.")
    contributors: int = Field(description="People who have counted in any applied step.")
    bubble_share: float | None = Field(
        description="Of the time for which peers hold stages while steps are made: how much of it "
        "they have nothing to compute, 0 to 1, in the last minute or two."
    )
    rejected: dict[str, int] = Field(
        description="What did not count since the start of the coordinator, by reason."
    )


class StageStatus(ApiModel):
    stage: int
    first_layer: int
    end_layer: int
    work_share: float = Field(description="Of the model's arithmetic, 0 to 1.")
    ready: int = Field(description="Peers that hold it at the run's version.")
    syncing: int = Field(description="Peers on their way to it.")
    microbatches_per_second: float
    relative_rate: float = Field(description="Its rate over the fastest stage's, 0 to 1.")
    idle_share: float | None = Field(description="Like the run's `bubble_share`.")
    p50_seconds: float | None = Field(
        description="Half of the microbatches of the last minute or two took no longer to compute."
    )
    p95_seconds: float | None


class Stages(ApiModel):
    stages: tuple[StageStatus, ...]
    rebalancing: tuple[str, ...] = Field(description="The newest decisions, oldest first.")
    no_move_reason: str = Field(description="Why nobody moves now; empty if somebody does.")


class PublicPeer(ApiModel):
    id_end: str = Field(description="The end of its peer ID.")
    name: str | None
    stage: int | None
    phase: str
    leaving: bool
    microbatches_per_second: float


class Peers(ApiModel):
    total: int
    offset: int
    peers: tuple[PublicPeer, ...]


class StepRow(ApiModel):
    step: int
    loss: float | None
    tokens: int
    seconds: float
    written_at: float


class Steps(ApiModel):
    steps: tuple[StepRow, ...]
    next_after: int | None = Field(description="The next page's `after`; null at the end.")


class CurvePoint(ApiModel):
    """Several consecutive steps as one point."""

    first_step: int
    last_step: int
    loss: float | None = Field(description="Their mean.")
    lowest_loss: float | None
    highest_loss: float | None
    tokens_per_second: float | None


class Curve(ApiModel):
    steps_per_point: int
    points: tuple[CurvePoint, ...]


class ContributionRow(ApiModel):
    """What one person gave: of all devices that prove to be the same owner's."""

    rank: int
    id_end: str = Field(description="The end of the owner's peer ID.")
    name: str | None
    team: str | None
    devices: int = Field(description="Peers that have counted, and count in this row.")
    stages: tuple[int, ...]
    steps: int = Field(
        description="Steps in which it counted; of several devices, those of the busiest one."
    )
    microbatches: int
    tokens: int = Field(description="Summed over the stages that it held.")
    credit: float = Field(description="Tokens times the work share of the stage they passed.")
    credit_per_day: float = Field(description="Recent average, with a half-life of 7 days.")


class Contributions(ApiModel):
    total: int
    offset: int
    contributions: tuple[ContributionRow, ...]


class Team(ApiModel):
    rank: int
    team: str
    members: int = Field(description="People who are in it now and have counted in a step.")
    tokens: int
    credit: float
    credit_per_day: float


class Teams(ApiModel):
    total: int
    offset: int
    teams: tuple[Team, ...]


class EventRow(ApiModel):
    id: int
    written_at: float
    text: str


class Events(ApiModel):
    events: tuple[EventRow, ...] = Field(description="Oldest first.")
    next_after: int = Field(description="The `after` that gives what comes later.")


# ---------------------------------------------------------------- the organiser's


class PeerPath(ApiModel):
    """The best connection of one peer to another, as the peer reports it."""

    remote: str
    kind: str
    relay: str | None
    rtt_seconds: float
    bytes_per_second: float


class FullPeer(ApiModel):
    peer: str
    name: str | None
    stage: int | None
    phase: str
    version: int
    leaving: bool
    device: str
    reachability: str
    offers_relay: bool
    microbatches_per_second: float
    queued: int
    silent_seconds: float
    flagged_times: int = Field(description="How often it has computed something wrong.")
    flagged_reason: str
    paths: tuple[PeerPath, ...]


class FullPeers(ApiModel):
    coordinator: str = Field(description="Its own peer ID, which paths may name.")
    total: int
    offset: int
    peers: tuple[FullPeer, ...]


class BanItem(ApiModel):
    peer: str
    reason: str
    banned_at: float


class AdmissionOverview(ApiModel):
    mode: str
    members: int
    bans: tuple[BanItem, ...]


class TokenItem(ApiModel):
    """Of its secret there is only a hash anywhere."""

    token: int
    note: str
    state: str
    uses: int | None
    uses_left: int | None
    admitted: int
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class Tokens(ApiModel):
    tokens: tuple[TokenItem, ...]
