"""From the status document and the database to the API's responses: pure functions.

Text that comes from volunteers loses control characters here, and published text loses network
addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from swarm_coordinator.admission.book import AdmissionBook
from swarm_coordinator.admission.requests import admission_status, token_document
from swarm_coordinator.dashboard.api_models import (
    ID_END,
    AdmissionOverview,
    EventRow,
    FullPeer,
    Health,
    OwnerStanding,
    PublicPeer,
    RunStatus,
    Stages,
    StageStatus,
    TokenItem,
    Tokens,
    Trust,
    Verdict,
)
from swarm_coordinator.dashboard.database_reader import DatabaseView
from swarm_coordinator.dashboard.redact import without_addresses
from swarm_coordinator.status.document import (
    SYNCING,
    PathRow,
    PeerRow,
    PeerSummary,
    RunProgress,
    StageTiming,
    StatusDocument,
    current_health,
)
from swarm_shared.base.text import printable
from swarm_shared.credit.credit import work_shares
from swarm_shared.protocol import SOFTWARE_VERSION
from swarm_shared.run.manifest import Manifest


@dataclass(frozen=True)
class Snapshot:
    """One moment of the run, from which every request is answered until the next one."""

    status: StatusDocument
    database: DatabaseView
    manifest: Manifest
    taken_at: float
    """Unix seconds."""

    @cached_property
    def health(self) -> Health:
        health = current_health(self.status, self.taken_at)
        return health.model_copy(update={"sentence": _public_text(health.sentence)})

    @cached_property
    def run(self) -> RunStatus:
        return run_of(self)

    @cached_property
    def stages(self) -> Stages:
        return stages_of(self.status, self.manifest)

    @cached_property
    def trust(self) -> Trust:
        return trust_of(self)

    @cached_property
    def peers(self) -> tuple[PublicPeer, ...]:
        return tuple(public_peer(peer) for peer in self.status.peers)

    @cached_property
    def events(self) -> tuple[EventRow, ...]:
        return tuple(public_event(note) for note in self.database.notes)

    @cached_property
    def full_peers(self) -> tuple[FullPeer, ...]:
        return full_peers(self.status)

    @cached_property
    def admission(self) -> AdmissionOverview:
        mode, attached = self.status.admission.mode, len(self.status.peers)
        status = admission_status(self.database.book, mode, self.taken_at, attached)
        return AdmissionOverview(mode=mode, members=status.members, bans=status.bans)

    @cached_property
    def tokens(self) -> Tokens:
        return tokens_of(self.database.book, self.taken_at)


def run_of(snapshot: Snapshot) -> RunStatus:
    status, database = snapshot.status, snapshot.database
    published = {name: getattr(status, name) for name in RunProgress.model_fields}
    return RunStatus(
        **{**published, "health": snapshot.health, "waiting_for": _public_text(status.waiting_for)},
        name=printable(status.run),
        software=SOFTWARE_VERSION,
        tokens=database.tokens,
        stages=snapshot.manifest.stage_count,
        peers=len(status.peers),
        contributors=len(database.contributions),
        bubble_share=status.figures.bubble_share,
        rejected=status.figures.rejected,
    )


def stages_of(status: StatusDocument, manifest: Manifest) -> Stages:
    shares = work_shares([stage.work_flops for stage in manifest.stages])
    fastest = max((row.microbatches_per_second for row in status.stages), default=0.0)
    syncing = Counter(peer.stage for peer in status.peers if peer.phase == SYNCING)
    return Stages(
        stages=tuple(
            StageStatus(
                stage=row.stage,
                first_layer=layers.first_layer,
                end_layer=layers.end_layer,
                work_share=shares[row.stage],
                ready=row.peers,
                syncing=syncing[row.stage],
                microbatches_per_second=row.microbatches_per_second,
                relative_rate=row.microbatches_per_second / fastest if fastest > 0 else 0.0,
                **status.figures.timing(row.stage).model_dump(include=set(_TIMING_FIELDS)),
            )
            for row, layers in zip(status.stages, manifest.stages, strict=True)
        ),
        rebalancing=tuple(_public_text(decision.text) for decision in status.rebalancing.decisions),
        no_move_reason=_public_text(status.rebalancing.reason),
    )


def trust_of(snapshot: Snapshot) -> Trust:
    trust = snapshot.status.trust
    names = {row.id_end: row.name for row in snapshot.database.contributions}
    shown = trust.model_dump(exclude={"owners", "verdicts"})
    return Trust(
        **shown,
        owners=tuple(
            OwnerStanding(
                **row.model_dump(exclude={"owner"}), id_end=row.owner[-ID_END:],
                name=names.get(row.owner[-ID_END:]),
            )
            for row in trust.owners
        ),
        verdicts=tuple(
            Verdict(
                step=row.step, microbatch=row.microbatch, stage=row.stage,
                id_end=row.peer[-ID_END:], owner_id_end=row.owner[-ID_END:],
                reason=_public_text(row.reason),
            )
            for row in trust.verdicts
        ),
    )  # fmt: skip


def public_peer(peer: PeerRow) -> PublicPeer:
    shown = {name: getattr(peer, name) for name in _SUMMARY_FIELDS}
    return PublicPeer(**{**shown, "name": _printable_name(peer.name)}, id_end=peer.peer[-ID_END:])


_TIMING_FIELDS = tuple(StageTiming.model_fields)
_SUMMARY_FIELDS = tuple(field.name for field in fields(PeerSummary))
_PEER_FIELDS = tuple(field.name for field in fields(PeerRow))


def public_event(note: EventRow) -> EventRow:
    return note.model_copy(update={"text": _public_text(note.text)})


def full_peers(status: StatusDocument) -> tuple[FullPeer, ...]:
    paths: dict[str, list[PathRow]] = {}
    for path in status.paths:
        paths.setdefault(path.reporter, []).append(path)
    return tuple(
        FullPeer(
            **{
                **{name: getattr(peer, name) for name in _PEER_FIELDS},
                "name": _printable_name(peer.name),
                "device": printable(peer.device),
                "flagged_reason": printable(peer.flagged_reason),
            },
            paths=tuple(paths.get(peer.peer, ())),
        )
        for peer in status.peers
    )


def tokens_of(book: AdmissionBook, now: float) -> Tokens:
    return Tokens(
        tokens=tuple(
            TokenItem(**{**row, "admitted": len(row["admitted"])})
            for row in token_document(book, now)
        )
    )


def joined_and_left(before: Sequence[PublicPeer], after: Sequence[PublicPeer]) -> tuple[int, int]:
    """Count the peers that joined and left between two snapshots."""
    old, new = {peer.id_end for peer in before}, {peer.id_end for peer in after}
    return len(new - old), len(old - new)


def _printable_name(name: str | None) -> str | None:
    return None if name is None else printable(name)


def _public_text(text: str) -> str:
    return without_addresses(printable(text))
