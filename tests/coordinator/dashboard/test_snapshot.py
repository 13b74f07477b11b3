"""What a snapshot makes of status and database, and what is public of its peers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kits.coordinator.http_server import BERT, HOSTILE, LEAKED, run_with_pages, status
from swarm_coordinator.dashboard.api_models import EventRow, PublicPeer
from swarm_coordinator.dashboard.database_reader import DatabaseReader
from swarm_coordinator.dashboard.snapshot import Snapshot, joined_and_left
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
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
