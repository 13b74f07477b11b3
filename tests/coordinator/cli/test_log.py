"""`swarm-coordinator log`: a tracker follows a run, across rollbacks, stops and starts."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kits.coordinator import run as run_kit
from kits.coordinator.shell_world import make_run
from swarm_coordinator.cli import log
from swarm_coordinator.cli.main import run
from swarm_coordinator.core.events import EvaluationRecord, RolledBack, RunFinished
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.tracking.follow import follow
from swarm_coordinator.tracking.journal_reader import Batch, Position
from swarm_coordinator.tracking.metrics_reader import Metrics, Rollback, read_metrics
from swarm_coordinator.tracking.targets import JsonLines, TrackedRun
from swarm_shared.base.types import Version

STEPS = 9


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Steps 1 to 5 of 9."""
    return run_kit.with_a_past(make_run(tmp_path / "a run", steps=STEPS))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def finish(folder: RunFolder) -> None:
    run_kit.one_start(
        folder, RolledBack(Version(4), "all were lost"),
        *(run_kit.step(number, attempt=2) for number in range(5, STEPS + 1)),
        EvaluationRecord(Version(STEPS), 2.5, 64), RunFinished(Version(STEPS)),
    )  # fmt: skip


def test_it_continues_where_it_stopped_and_ends_with_the_run(folder: RunFolder) -> None:
    file = folder.path.parent / "metrics.jsonl"
    words = ["log", str(folder.path), "--to", "jsonl", "--output", str(file)]
    assert run([*words, "--once"]) == 0
    assert [one["step"] for one in lines(file)] == [1, 2, 3, 4, 5]
    assert run([*words, "--once"]) == 0
    assert len(lines(file)) == 5
    finish(folder)
    assert run(words) == 0
    after = lines(file)[5:]
    assert [one.get("step") for one in after] == [None, 5, 6, 7, 8, 9, 9]
    assert after[0]["reason"] == "all were lost"
    assert set(after[1]) == {
        "step", "time", "loss", "learning_rate", "tokens", "seconds", "peers",
    }  # fmt: skip
    assert after[-1]["heldout_loss"] == 2.5


def test_a_deleted_output_begins_anew(folder: RunFolder) -> None:
    file = folder.path.parent / "metrics.jsonl"
    for _ in range(2):
        assert run(["log", str(folder.path), "--to", "jsonl", "--output", str(file), "--once"]) == 0
        assert len(lines(file)) == 5
        file.unlink()


def test_steps_that_come_later_are_written_as_they_come(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=STEPS)
    file, waited = tmp_path / "metrics.jsonl", 0

    def grow(seconds: float) -> bool:
        nonlocal waited
        waited += 1
        assert len(lines(file)) == waited - 1
        records = [run_kit.step(waited)] if waited < STEPS else []
        run_kit.one_start(folder, *records, *([] if records else [RunFinished(Version(STEPS))]))
        assert waited <= STEPS, "it did not end with the run"
        return False

    def read(position: Position) -> Batch[Metrics | Rollback]:
        return read_metrics(folder.database, position, STEPS)

    target = JsonLines(TrackedRun("id", "run", file))
    follow(read, target, None, grow)
    target.close()
    assert [one["step"] for one in lines(file)] == list(range(1, STEPS))


def test_a_long_run_is_written_whole_when_it_is_written_once(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swarm_coordinator.tracking.journal_reader.ENTRIES_PER_READ", 2)
    assert run(["log", str(folder.path), "--to", "jsonl", "--once"]) == 0
    written = capsys.readouterr()
    assert [json.loads(line)["step"] for line in written.out.splitlines()] == [1, 2, 3, 4, 5]
    assert written.err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_whole_records(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    file = folder.path.parent / "metrics.jsonl"

    def interrupted(*arguments: Any, **named: Any) -> Batch[Metrics | Rollback]:
        signal.raise_signal(number)
        return read_metrics(*arguments, **named)

    before = signal.getsignal(number)
    monkeypatch.setattr(log, "read_metrics", interrupted)
    assert run(["log", str(folder.path), "--to", "jsonl", "--output", str(file)]) == 0
    assert len(lines(file)) == 5
    assert signal.getsignal(number) is before


def test_tensorboard_reads_what_was_written_of_a_run(folder: RunFolder) -> None:
    words = ["log", str(folder.path), "--to", "tensorboard"]
    assert run([*words, "--once"]) == 0
    finish(folder)
    assert run(words) == 0
    read = EventAccumulator(str(folder.log / "tensorboard"))
    read.Reload()
    assert [one.step for one in read.Scalars("loss")] == list(range(1, STEPS + 1))
    assert read.Scalars("loss")[3].value == pytest.approx(2.25)
    assert [(one.step, one.value) for one in read.Scalars("heldout_loss")] == [(STEPS, 2.5)]
    assert {"learning_rate", "tokens", "seconds", "peers"} <= set(read.Tags()["scalars"])


@pytest.mark.parametrize("target", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    folder: RunFolder,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == target]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, target, None)  # type: ignore[arg-type]
    assert run(["log", str(folder.path), "--to", target]) == 3
    said = capsys.readouterr().err
    assert f"`pip install {target}` installs them" in said
    assert "pip install 'swarmtrain[log]'" in said
    assert said.count("\n") == 1


def test_a_restored_database_is_refused(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder.path.parent / "metrics.jsonl"
    words = ["log", str(folder.path), "--to", "jsonl", "--output", str(file), "--once"]
    assert run(words) == 0
    for path in folder.path.glob("coordinator.sqlite*"):
        path.unlink()
    run_kit.one_start(folder, run_kit.step(1, attempt=8))
    assert run(words) == 7
    assert "name another place with --output" in capsys.readouterr().err
    file.with_name("metrics.jsonl.position").write_text("nonsense")
    assert run(words) == 7
    assert "the whole run is written again" in capsys.readouterr().err
