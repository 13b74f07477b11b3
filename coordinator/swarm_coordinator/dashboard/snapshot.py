"""From the status document and the database to the API's responses: pure functions.

Text that comes from volunteers loses control characters here, and published text loses network
addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from swarm_coordinator.admission.requests import admission_status, token_document
from swarm_coordinator.dashboard.api_models import (
    ID_END,
    EventRow,
    FullPeer,
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
from swarm_coordinator.status.document import (
    SYNCING,
    AdmissionOverview,
    Health,
    PathRow,
    PeerRow,
    PeerSummary,
    RunProgress,
    StageTiming,
    StatusDocument,
    current_health,
)
from swarm_coordinator.status.redact import without_addresses
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
        status, database = self.status, self.database
        published = {name: getattr(status, name) for name in RunProgress.model_fields}
        public = {"health": self.health, "waiting_for": _public_text(status.waiting_for)}
        return RunStatus(
            **{**published, **public},
            name=printable(status.run),
            software=SOFTWARE_VERSION,
            tokens=database.tokens,
            stages=self.manifest.stage_count,
            peers=len(status.peers),
            contributors=len(database.contributions),
            bubble_share=status.figures.bubble_share,
            rejected=status.figures.rejected,
        )

    @cached_property
    def stages(self) -> Stages:
        status, cuts = self.status, self.manifest.stages
        shares = work_shares([stage.work_flops for stage in cuts])
        fastest = max((row.microbatches_per_second for row in status.stages), default=0.0)
        syncing = Counter(peer.stage for peer in status.peers if peer.phase == SYNCING)
        timing = set(StageTiming.model_fields)
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
                    **status.figures.timing(row.stage).model_dump(include=timing),
                )
                for row, layers in zip(status.stages, cuts, strict=True)
            ),
            rebalancing=tuple(_public_text(move.text) for move in status.rebalancing.decisions),
            no_move_reason=_public_text(status.rebalancing.reason),
        )

    @cached_property
    def trust(self) -> Trust:
        trust = self.status.trust
        names = {row.id_end: row.name for row in self.database.contributions}
        owners = [(row, row.owner[-ID_END:]) for row in trust.owners]
        return Trust(
            **trust.model_dump(exclude={"owners", "verdicts"}),
            owners=tuple(
                OwnerStanding(**row.model_dump(exclude={"owner"}), id_end=end, name=names.get(end))
                for row, end in owners
            ),
            verdicts=tuple(
                Verdict(
                    **row.model_dump(exclude={"peer", "owner", "reason"}),
                    id_end=row.peer[-ID_END:],
                    owner_id_end=row.owner[-ID_END:],
                    reason=_public_text(row.reason),
                )
                for row in trust.verdicts
            ),
        )

    @cached_property
    def peers(self) -> tuple[PublicPeer, ...]:
        return tuple(
            PublicPeer(**_shown(peer, PeerSummary), id_end=peer.peer[-ID_END:])
            for peer in self.status.peers
        )

    @cached_property
    def events(self) -> tuple[EventRow, ...]:
        return tuple(
            note.model_copy(update={"text": _public_text(note.text)})
            for note in self.database.notes
        )

    @cached_property
    def full_peers(self) -> tuple[FullPeer, ...]:
        paths: dict[str, list[PathRow]] = {}
        for path in self.status.paths:
            paths.setdefault(path.reporter, []).append(path)
        return tuple(
            FullPeer(**_shown(peer, PeerRow), paths=tuple(paths.get(peer.peer, ())))
            for peer in self.status.peers
        )

    @cached_property
    def admission(self) -> AdmissionOverview:
        mode, attached = self.status.admission.mode, len(self.status.peers)
        status = admission_status(self.database.book, mode, self.taken_at, attached)
        return AdmissionOverview(mode=mode, members=status.members, bans=status.bans)

    @cached_property
    def tokens(self) -> Tokens:
        rows = token_document(self.database.book, self.taken_at)
        items = (TokenItem(**{**row, "admitted": len(row["admitted"])}) for row in rows)
        return Tokens(tokens=tuple(items))


def _shown(peer: PeerRow, part: type[PeerSummary]) -> dict[str, Any]:
    """The fields of a part of a peer's row, without control characters of the peer's own texts."""
    values = {field.name: getattr(peer, field.name) for field in fields(part)}
    return {
        name: printable(value) if name in _TEXTS and value else value
        for name, value in values.items()
    }


_TEXTS = {"name", "device", "flagged_reason"}


def joined_and_left(before: Sequence[PublicPeer], after: Sequence[PublicPeer]) -> tuple[int, int]:
    """Count the peers that joined and left between two snapshots."""
    old, new = {peer.id_end for peer in before}, {peer.id_end for peer in after}
    return len(new - old), len(old - new)


def _public_text(text: str) -> str:
    return without_addresses(printable(text))
