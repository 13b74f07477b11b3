"""From what the coordinator wrote to what the API answers: pure functions, once a second.

`status.json` is the coordinator's own word and is trusted for what it says, not for being there:
`Told` takes what it needs and leaves the rest. Everything in it that comes from volunteers is text
to be shown, and loses what steers a terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swarm_coordinator.admission.book import AdmissionBook
from swarm_coordinator.admission.requests import admission_document, token_document
from swarm_coordinator.dashboard.api_models import (
    AdmissionOverview,
    EventRow,
    FullPeer,
    Health,
    HealthState,
    PeerPath,
    PublicPeer,
    RunStatus,
    Stages,
    StageStatus,
    TokenItem,
    Tokens,
)
from swarm_coordinator.dashboard.database_reader import ID_END, DatabaseView, StoredNote
from swarm_coordinator.dashboard.redact import without_addresses
from swarm_shared.base.text import printable
from swarm_shared.credit.credit import work_shares
from swarm_shared.protocol import SOFTWARE_VERSION
from swarm_shared.run.manifest import Manifest

STALE_SECONDS = 15.0
"""A coordinator that has said nothing for so long has trouble. In a run of ten thousand it writes
its status every ten seconds."""

FINISHED, WAITING, APPLYING = "finished", "waiting for peers", "applying"
"""Phases as `status.json` spells them."""
READY, SYNCING = "ready", "syncing"


@dataclass(frozen=True)
class Snapshot:
    """One moment of the run, from which every request is answered until the next one."""

    status: Mapping[str, Any]
    database: DatabaseView
    manifest: Manifest
    taken_at: float
    """Unix seconds."""

    @cached_property
    def health(self) -> Health:
        return health_of(self.status, self.manifest, self.taken_at)

    @cached_property
    def run(self) -> RunStatus:
        return run_of(self)

    @cached_property
    def stages(self) -> Stages:
        return stages_of(self.status, self.manifest)

    @cached_property
    def peers(self) -> tuple[PublicPeer, ...]:
        return tuple(
            PublicPeer(
                id_end=peer["peer"][-ID_END:],
                name=_printable_name(peer["name"]),
                stage=peer["stage"],
                phase=peer["phase"],
                leaving=peer["leaving"],
                microbatches_per_second=peer["microbatches_per_second"],
            )
            for peer in self.status["peers"]
        )

    @cached_property
    def events(self) -> tuple[EventRow, ...]:
        return tuple(public_event(noted) for noted in self.database.notes)

    @cached_property
    def full_peers(self) -> tuple[FullPeer, ...]:
        return full_peers(self.status)

    @cached_property
    def admission(self) -> AdmissionOverview:
        mode = self.status.get("admission", {}).get("mode", "open")
        told = admission_document(
            self.database.book, mode, self.taken_at, attached=len(self.status["peers"])
        )
        return AdmissionOverview(mode=told["mode"], members=told["members"], bans=told["bans"])

    @cached_property
    def tokens(self) -> Tokens:
        return tokens_of(self.database.book, self.taken_at)


def parse_status(content: bytes) -> Mapping[str, Any]:
    """ValueError for what is no status; it is rewritten as a whole, so that is a fault."""
    status = json.loads(content)
    if not isinstance(status, dict) or not isinstance(status.get("peers"), list):
        raise ValueError("status.json does not hold a status")
    return status


def health_of(status: Mapping[str, Any], manifest: Manifest, now: float) -> Health:
    """Healthy only if every stage has a reachable peer."""
    alone = unreachable_stages(status, manifest)

    def say(state: HealthState, sentence: str) -> Health:
        return Health(state=state, sentence=sentence, unreachable_stages=alone)

    if status["phase"] == FINISHED:
        return say(HealthState.FINISHED, f"all {status['steps']} steps are made")
    age_seconds = now - status["time"]
    if age_seconds > STALE_SECONDS:
        return say(
            HealthState.DEGRADED, f"the coordinator has said nothing for {age_seconds:.0f} seconds"
        )
    if status["phase"] == WAITING:
        return say(
            HealthState.WAITING, printable(status["waiting_for"]) or "training has not begun"
        )
    if alone:
        names = ", ".join(str(stage) for stage in alone)
        return say(HealthState.DEGRADED, f"nobody who can be reached holds stage {names}")
    if status["version"] > 0 and _number(status["loss"]) is None:
        return say(
            HealthState.DEGRADED, "the loss is not a number any more: the training has diverged"
        )
    thin = [row["stage"] for row in status["stages"] if row["peers"] == 1]
    if thin:
        names = ", ".join(str(stage) for stage in thin)
        return say(
            HealthState.HEALTHY,
            f"every stage has a peer that can be reached, stage {names} only one",
        )
    return say(HealthState.HEALTHY, "every stage has peers that can be reached")


def unreachable_stages(status: Mapping[str, Any], manifest: Manifest) -> tuple[int, ...]:
    """Stages of which no peer that is ready has been heard of lately.

    While a step is applied its members turn to the next version one after the other.
    """
    version, silent = status["version"], manifest.limits.dead_after_seconds
    oldest = version - 1 if status["phase"] == APPLYING else version
    reachable = {
        peer["stage"]
        for peer in status["peers"]
        if peer["phase"] == READY and peer["version"] >= oldest and peer["silent_seconds"] <= silent
    }
    return tuple(stage for stage in range(manifest.stage_count) if stage not in reachable)


def run_of(snapshot: Snapshot) -> RunStatus:
    status, read = snapshot.status, snapshot.database
    return RunStatus(
        name=printable(status["run"]),
        software=SOFTWARE_VERSION,
        time=status["time"],
        health=snapshot.health,
        phase=status["phase"],
        waiting_for=printable(status["waiting_for"]),
        version=status["version"],
        steps=status["steps"],
        cells_done=status["cells_done"],
        cells_total=status["cells_total"],
        loss=_number(status["loss"]),
        heldout_loss=_number(status["heldout_loss"]),
        tokens=read.tokens,
        tokens_per_second=_number(status["tokens_per_second"]),
        checkpoint_version=status["checkpoint_version"],
        uptime_seconds=status["uptime_seconds"],
        stages=snapshot.manifest.stage_count,
        peers=len(status["peers"]),
        contributors=len(read.contributions),
        bubble_share=figures_of(status).get("bubble_share"),
        rejected=figures_of(status).get("rejected", {}),
    )


def figures_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Empty in what an older coordinator wrote."""
    told: Mapping[str, Any] = status.get("figures", {})
    return told


def stage_figures(status: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    told: Sequence[Mapping[str, Any]] = figures_of(status).get("stages", ())
    return told[stage] if stage < len(told) else {}


def stages_of(status: Mapping[str, Any], manifest: Manifest) -> Stages:
    shares = work_shares([stage.work_flops for stage in manifest.stages])
    fastest = max((row["microbatches_per_second"] for row in status["stages"]), default=0.0)
    syncing: dict[int, int] = {}
    for peer in status["peers"]:
        if peer["phase"] == SYNCING and peer["stage"] is not None:
            syncing[peer["stage"]] = syncing.get(peer["stage"], 0) + 1
    told = status.get("rebalancing") or {}
    return Stages(
        stages=tuple(
            StageStatus(
                stage=row["stage"],
                first_layer=layers.first_layer,
                end_layer=layers.end_layer,
                work_share=shares[row["stage"]],
                ready=row["peers"],
                syncing=syncing.get(row["stage"], 0),
                microbatches_per_second=row["microbatches_per_second"],
                relative_rate=row["microbatches_per_second"] / fastest if fastest > 0 else 0.0,
                **{
                    key: stage_figures(status, row["stage"]).get(key)
                    for key in ("idle_share", "p50_seconds", "p95_seconds")
                },
            )
            for row, layers in zip(status["stages"], manifest.stages, strict=True)
        ),
        rebalancing=tuple(
            without_addresses(printable(decision["text"])) for decision in told.get("decisions", [])
        ),
        no_move_reason=printable(told.get("reason", "")),
    )


def public_event(noted: StoredNote) -> EventRow:
    return EventRow(
        id=noted.id, written_at=noted.written_at, text=without_addresses(printable(noted.text))
    )


def full_peers(status: Mapping[str, Any]) -> tuple[FullPeer, ...]:
    paths: dict[str, list[PeerPath]] = {}
    for path in status.get("paths", []):
        paths.setdefault(path["reporter"], []).append(
            PeerPath(
                remote=path["remote"],
                kind=path["kind"],
                relay=path["relay"],
                rtt_seconds=path["rtt_seconds"],
                bytes_per_second=path["bytes_per_second"],
            )
        )
    return tuple(
        FullPeer(
            **{
                key: peer[key]
                for key in (
                    "peer", "stage", "phase", "version", "leaving", "reachability",
                    "offers_relay", "microbatches_per_second", "queued", "silent_seconds",
                )
            },
            name=_printable_name(peer["name"]),
            device=printable(peer["device"]),
            flagged_times=peer.get("flagged_times", 0),
            flagged_reason=printable(peer.get("flagged_reason", "")),
            paths=tuple(paths.get(peer["peer"], ())),
        )
        for peer in status["peers"]
    )  # fmt: skip


def tokens_of(book: AdmissionBook, now: float) -> Tokens:
    return Tokens(
        tokens=tuple(
            TokenItem(**{**row, "admitted": len(row["admitted"])})
            for row in token_document(book, now)
        )
    )


def joined_and_left(before: Sequence[PublicPeer], after: Sequence[PublicPeer]) -> tuple[int, int]:
    """Between two moments: how many came and how many went."""
    old, new = {peer.id_end for peer in before}, {peer.id_end for peer in after}
    return len(new - old), len(old - new)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _printable_name(name: str | None) -> str | None:
    return None if name is None else printable(name)
