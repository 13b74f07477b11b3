"""What each tracker has of a run, read back with the tracker's own reader."""

from __future__ import annotations

import json
import math
import platform
import sqlite3
import sys
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kits.loaded_modules import loaded
from swarm_coordinator.tracking.metrics_reader import Metrics, Rollback
from swarm_coordinator.tracking.targets import (
    JsonLines,
    MetricsTarget,
    TensorBoard,
    TrackedRun,
    Trackio,
    WeightsAndBiases,
)
from swarm_shared.base.errors import StorageError


def tracked(output: Path) -> TrackedRun:
    return TrackedRun("0123456789ab", "my-run", output)


def write_all(target: MetricsTarget) -> None:
    """Steps 1 to 3, of which the last is lost and computed again; its loss is then no number."""
    for step, loss in ((1, 4.0), (2, 3.0), (3, 9.0)):
        target.write(Metrics(step, 100.0 + step, {"loss": loss, "peers": 2}))
    target.roll_back(Rollback(2, 110.0, "all were lost"))
    target.write(Metrics(3, 111.0, {"loss": math.nan, "peers": 3}))
    target.write(Metrics(3, 112.0, {"heldout_loss": 2.5}))
    target.flush()


def test_json_lines_are_appended_and_have_no_number_where_there_is_none(tmp_path: Path) -> None:
    for _ in range(2):
        target = JsonLines(tracked(tmp_path / "metrics.jsonl"))
        write_all(target)
        target.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[:6] == lines[6:]
    assert lines[0] == {"step": 1, "time": 101.0, "loss": 4.0, "peers": 2}
    assert lines[3] == {"rollback_to": 2, "time": 110.0, "reason": "all were lost"}
    assert lines[4] == {"step": 3, "time": 111.0, "loss": None, "peers": 3}
    assert lines[5] == {"step": 3, "time": 112.0, "heldout_loss": 2.5}


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="that folder does not exist"):
        JsonLines(tracked(tmp_path / "missing" / "metrics.jsonl"))


def test_tensorboard_shows_the_steps_that_count_with_their_times(tmp_path: Path) -> None:
    target = TensorBoard(tracked(tmp_path))
    write_all(target)
    target.close()
    later = TensorBoard(tracked(tmp_path))  # another start, another file
    later.write(Metrics(4, 120.0, {"loss": 1.5, "peers": 3}))
    later.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    losses = [(one.step, one.wall_time, one.value) for one in read.Scalars("loss")]
    assert losses[:2] == [(1, 101.0, 4.0), (2, 102.0, 3.0)]
    assert losses[2][:2] == (3, 111.0)
    assert math.isnan(losses[2][2])
    assert losses[3:] == [(4, 120.0, 1.5)]
    assert [(one.step, one.value) for one in read.Scalars("heldout_loss")] == [(3, 2.5)]
    assert [one.value for one in read.Scalars("peers")] == [2, 2, 3, 3]


def test_writing_for_tensorboard_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from swarm_coordinator.tracking.targets import TensorBoard, TrackedRun\n"
        "TensorBoard(TrackedRun('id', 'name', Path(sys.argv[1]))).close()"
    )
    assert loaded(code, ["torch", "wandb", "trackio"], tmp_path) == []


def test_trackio_has_every_record_after_two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # before it is imported
    target = Trackio(tracked(tmp_path))
    write_all(target)
    target.close()
    later = Trackio(tracked(tmp_path))
    later.write(Metrics(4, 120.0, {"loss": 1.5}))
    later.close()
    (database,) = tmp_path.glob("*.db")
    connection = sqlite3.connect(database)
    rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    connection.close()
    assert {name for name, _, _ in rows} == {"my-run-0123456789ab"}
    assert [step for _, step, _ in rows] == [1, 2, 3, 3, 3, 4]
    assert json.loads(rows[0][2]) == {"loss": 4.0, "peers": 2}
    assert json.loads(rows[5][2]) == {"loss": 1.5}


def test_wandb_writes_every_record_to_its_offline_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    losses = {1: 0.7310586, 4: 0.2689414}  # of digits that no other number in a file has
    for step, loss in losses.items():
        target = WeightsAndBiases(tracked(tmp_path))
        target.write(Metrics(step, 100.0, {"loss": loss, "peers": 2}))
        target.close()
    wandb.teardown()  # its process writes the end of a file after the run's own end
    written = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert len(written) == 2
    assert all(part in content for content in written for part in (b"loss", b"peers", b"my-run"))
    for loss in losses.values():
        assert sorted(str(loss).encode() in content for content in written) == [False, True]


def test_wandb_gets_nothing_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project may be public, and a command line may have secrets."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["swarm-coordinator", "log", "argument-of-the-command"])
    target = WeightsAndBiases(tracked(tmp_path))
    target.write(Metrics(1, 100.0, {"loss": 1.0}))
    target.close()
    wandb.teardown()
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    (records,) = folder.glob("*.wandb")
    content = records.read_bytes()
    assert b"loss" in content
    of_this_machine = (
        "argument-of-the-command",
        sys.executable,
        str(tmp_path),
        platform.platform(),
    )
    assert [text for text in of_this_machine if text.encode() in content] == []
    assert [path for path in folder.glob("files/**/*") if path.is_file()] == []
