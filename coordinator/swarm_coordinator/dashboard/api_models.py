"""The HTTP API's responses; `/api/v1/openapi.json` is generated from these models.

Where a response shows a part of the status document it inherits that part (`status.document`), so a
field is defined once. What these models do not inherit or define is never published: public
responses name a peer by the name that it chose and the end of its ID, and never hold an address. A
newer release may add fields; a field's meaning changes only with the version in the path. Times are
Unix seconds, losses nats per token, rates per second.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from swarm_coordinator.status.document import (
    AppliedStepRow,
    NoteRow,
    OwnerSummary,
    PathRow,
    PeerRow,
    PeerSummary,
    RunProgress,
    StageTiming,
    TrustCounts,
    VerdictSummary,
)

API_VERSION = 1
ID_END = 8
"""Characters of a peer ID that the public sees, as in the coordinator's own lines."""


class ApiModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(ApiModel):
    """Every response that reports a failure."""

    error: str = Field(description="What was found, and what is needed.")


class RunStatus(RunProgress):
    api_version: int = API_VERSION
    name: str
    software: str
    tokens: int = Field(description="Tokens of all applied steps.")
    stages: int
    peers: int = Field(description="Attached now.")
    contributors: int = Field(description="Owners with a share in any applied step.")
    bubble_share: float | None = Field(
        description="Share of the time for which peers hold stages while steps are made that they "
        "have nothing to compute, 0 to 1, in the last minute or two."
    )
    rejected: dict[str, int] = Field(
        description="What did not count since the start of the coordinator, by reason."
    )


class StageStatus(StageTiming):
    stage: int
    first_layer: int
    end_layer: int
    work_share: float = Field(description="Share of the model's arithmetic, 0 to 1.")
    ready: int = Field(description="Peers that hold it at the run's version.")
    syncing: int = Field(description="Peers that download its state.")
    microbatches_per_second: float
    relative_rate: float = Field(description="Its rate over the fastest stage's, 0 to 1.")


class Stages(ApiModel):
    stages: tuple[StageStatus, ...]
    rebalancing: tuple[str, ...] = Field(description="The newest decisions, oldest first.")
    no_move_reason: str = Field(description="Why no peer moves now; empty while one does.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPeer(PeerSummary):
    id_end: str
    """The end of its peer ID."""


class Page(ApiModel):
    """A part of a list: of `total` rows those from `offset` on."""

    total: int
    offset: int


class Peers(Page):
    peers: tuple[PublicPeer, ...]


class Steps(ApiModel):
    steps: tuple[AppliedStepRow, ...]
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
    """The contribution of one owner: of all devices that are bound to its key."""

    rank: int
    id_end: str = Field(description="The end of the owner's peer ID.")
    name: str | None
    team: str | None
    devices: int = Field(description="Its peers with a share in any applied step.")
    stages: tuple[int, ...]
    steps: int = Field(
        description="Steps in which it has a share; of several devices, those of the busiest one."
    )
    microbatches: int
    tokens: int = Field(description="Summed over the stages that its devices held.")
    credit: float = Field(description="Tokens times the work share of the stage that they passed.")
    credit_per_day: float = Field(description="Recent average, with a half-life of 7 days.")


class Contributions(Page):
    contributions: tuple[ContributionRow, ...]


class Team(ApiModel):
    rank: int
    team: str
    members: int = Field(description="Owners that are in it now and have a share in a step.")
    tokens: int
    credit: float
    credit_per_day: float


class Teams(Page):
    teams: tuple[Team, ...]


class OwnerStanding(OwnerSummary):
    id_end: str = Field(description="The end of the owner's peer ID.")
    name: str | None


class Verdict(VerdictSummary):
    """A lost audit or check of sums. Its evidence is in the ledger."""

    id_end: str = Field(description="The end of the peer ID that lost.")
    owner_id_end: str


class Trust(TrustCounts):
    owners: tuple[OwnerStanding, ...] = Field(
        description="Those with a lost audit first, then those with the most passed ones."
    )
    verdicts: tuple[Verdict, ...] = Field(description="The newest ones, oldest first.")


class EventRow(NoteRow):
    id: int


class Events(ApiModel):
    events: tuple[EventRow, ...] = Field(description="Oldest first.")
    next_after: int = Field(description="The `after` that returns later events.")


# ---------------------------------------------------------------- for the organiser only


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPeer(PeerRow):
    """All that the coordinator knows of an attached peer."""

    paths: tuple[PathRow, ...]


class FullPeers(Page):
    coordinator: str = Field(description="The coordinator's peer ID, which paths may name.")
    peers: tuple[FullPeer, ...]


class TokenItem(ApiModel):
    """An invite token. Only a hash of its secret is stored."""

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
