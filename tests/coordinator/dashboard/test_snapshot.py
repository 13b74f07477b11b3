"""The run's health, and what is public of its peers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kits.coordinator.http_server import ANNA, BERT, HOSTILE, LEAKED, peer, run_with_pages, status
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.dashboard.api_models import EventRow, HealthState, PublicPeer
from swarm_coordinator.dashboard.database_reader import DatabaseReader
from swarm_coordinator.dashboard.snapshot import Snapshot, joined_and_left
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status import document
from swarm_coordinator.status.document import STALE_SECONDS, current_health
from swarm_shared.run.manifest import Manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run_with_pages(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture(scope="module")
def manifest(folder: RunFolder) -> Manifest:
    return load_manifest(folder)


def shown(manifest: Manifest, **changes: Any) -> Snapshot:
    nowhere = DatabaseReader(Path("nowhere"), ())
    return Snapshot(status(**changes), nowhere.refresh(0.0), manifest, time.time())


def word(later_seconds: float = 0.0, **changes: Any) -> tuple[HealthState, str]:
    health = current_health(status(**changes), time.time() + later_seconds)
    return health.state, health.sentence


def test_a_run_is_healthy_while_every_stage_has_a_reachable_peer() -> None:
    assert word()[0] is HealthState.HEALTHY


@pytest.mark.parametrize(
    "one",
    [
        peer(BERT, 0),
        peer(BERT, 1, phase="syncing"),
        peer(BERT, 1, version=4),
        peer(BERT, 1, silent_seconds=1000.0),
        peer(BERT, None, phase="admitted"),
    ],
    ids=["elsewhere", "downloading", "an-older-version", "silent", "without-a-stage"],
)
def test_a_stage_without_a_reachable_peer_makes_it_degraded(one: dict[str, Any]) -> None:
    found, sentence = word(peers=[peer(ANNA, 0), one])
    assert found is HealthState.DEGRADED
    assert "stage 1" in sentence
    health = status(peers=[peer(ANNA, 0), one]).health
    assert health.unreachable_stages == (1,)


def test_while_a_step_is_applied_peers_at_either_version_count() -> None:
    peers = [peer(ANNA, 0), peer(BERT, 1, version=4)]
    assert word(peers=peers, phase="applying")[0] is HealthState.HEALTHY


def test_an_overdue_status_makes_it_degraded() -> None:
    found, sentence = word(later_seconds=STALE_SECONDS + 5)
    assert found is HealthState.DEGRADED
    assert "has written no status" in sentence
    assert word(running=False)[0] is HealthState.STOPPED


def test_a_loss_that_is_no_number_makes_it_degraded() -> None:
    assert word(loss=None, diverged=True)[0] is HealthState.DEGRADED
    assert word(loss=None)[0] is HealthState.HEALTHY, "after a rollback no step has been applied"
    assert status(loss=float("nan")).loss is None


def test_a_run_without_peers_waits_with_a_reason() -> None:
    found = word(phase="waiting for peers", waiting_for="stage 1 needs 1", peers=[])
    assert found == (HealthState.WAITING, "Waiting for stage 1 needs 1.")


def test_a_finished_run_is_finished_however_old_its_status() -> None:
    assert word(later_seconds=1e6, phase="finished", peers=[])[0] is HealthState.FINISHED


def test_the_phases_have_the_names_that_the_coordinator_gives_them() -> None:
    assert {document.FINISHED, document.WAITING, document.APPLYING} <= {
        phase.value for phase in RunPhase
    }
    assert {document.READY, document.SYNCING} <= {phase.value for phase in PeerPhase}


def test_a_stages_rate_stands_beside_the_fastest_ones(manifest: Manifest) -> None:
    first, second = shown(manifest).stages.stages
    assert (first.relative_rate, second.relative_rate) == (0.5, 1.0)
    assert first.work_share + second.work_share == pytest.approx(1.0)
    idle = [
        {"stage": stage, "peers": 0, "microbatches_per_second": 0.0}
        for stage in range(manifest.stage_count)
    ]
    assert [s.relative_rate for s in shown(manifest, stages=idle).stages.stages] == [0, 0]


def test_events_lose_addresses_and_what_steers_a_terminal(manifest: Manifest) -> None:
    before = shown(manifest)
    event = EventRow(id=1, written_at=0.0, text=f"cannot reach {LEAKED[0]} of {HOSTILE}")
    [after] = replace(before, database=replace(before.database, notes=(event,))).events
    assert LEAKED[0] not in after.text
    assert "\x1b" not in after.text
    assert "\u202e" not in after.text


def test_the_organiser_sees_paths_and_marks(manifest: Manifest) -> None:
    anna, bert = shown(manifest).full_peers
    assert [path.remote for path in anna.paths] == [BERT]
    assert bert.flagged_times == 1
    assert bert.arithmetic == "5e0f1a2b"
    assert LEAKED[0] in bert.flagged_reason


def test_a_verdict_on_sums_is_of_no_microbatch(manifest: Manifest) -> None:
    row = {"step": 3, "microbatch": None, "stage": 0, "peer": BERT, "owner": BERT, "reason": "no"}
    [verdict] = shown(manifest, trust={"verdicts": [row]}).trust.verdicts
    assert (verdict.microbatch, verdict.id_end) == (None, BERT[-8:])


def test_joined_and_left_peers_are_counted_between_two_snapshots() -> None:
    def named(*ends: str) -> list[PublicPeer]:
        return [
            PublicPeer(id_end=end, name=None, stage=0, phase="ready", leaving=False,
                 microbatches_per_second=1.0)
            for end in ends
        ]  # fmt: skip

    assert joined_and_left(named("a", "b"), named("b", "c", "d")) == (2, 1)


def test_the_secret_of_the_organisers_page_is_private(folder: RunFolder) -> None:
    token = folder.dashboard_token()
    assert Path(folder.dashboard_token_file).stat().st_mode & 0o777 == 0o600
    assert folder.dashboard_token() == token
    assert len(token) >= 32
