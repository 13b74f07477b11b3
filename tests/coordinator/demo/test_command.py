"""The demo itself, in small: real processes, a real run of a few steps."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarm_coordinator.cli.main import run
from swarm_coordinator.demo import command as demo
from swarm_coordinator.demo.reference_check import steps_to_compare
from swarm_coordinator.demo.subprocesses import (
    COORDINATOR_MODULE,
    Subprocess,
    Subprocesses,
    wait_until,
)
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import history
from swarm_shared.host.python_modules import module_command

PATIENCE_SECONDS = 240.0

pytestmark = pytest.mark.timeout(PATIENCE_SECONDS + 60)


def start_demo(children: Subprocesses, tmp_path: Path, *words: str) -> Subprocess:
    command = module_command(COORDINATOR_MODULE, "demo", *words)
    return children.start("demo", command, tmp_path / "demo.out", {"OMP_NUM_THREADS": "1"})


def processes_naming(text: str) -> list[str]:
    """Command lines of processes of this machine that mention `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


def wait_for_output(child: Subprocess, wanted: str) -> None:
    """Wait for a line that matches the expression; lines come every few seconds at most."""

    def ready() -> bool:
        assert child.exit_code() is None, f"the demo ended without it: {child.last_lines()}"
        return re.search(wanted, child.log.read_text()) is not None

    wait_until(ready, Subprocesses(), PATIENCE_SECONDS, wanted)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_demo_kills_a_volunteer_replaces_it_and_has_the_losses_of_one_process(
    tmp_path: Path,
) -> None:
    """One volunteer at each stage, so that the run needs the newcomer to go on at all."""
    run_dir, json_file = tmp_path / "a run", tmp_path / "the result.json"
    with Subprocesses() as children:
        child = start_demo(
            children, tmp_path, "--volunteers", "2", "--stages", "2", "--steps", "3", "--seed", "7",
            "--run-dir", str(run_dir), "--json", str(json_file),
        )  # fmt: skip
        # At once: the demo kills one of them soon after the first step.
        homes = {
            name: str(run_dir / "volunteers" / name) for name in ("volunteer-1", "volunteer-2")
        }

        def started() -> bool:
            assert child.exit_code() is None, child.last_lines()
            return all(processes_naming(home) for home in homes.values())

        wait_until(started, Subprocesses(), PATIENCE_SECONDS, "the volunteers")
        pids = {name: volunteer_pid(run_dir, name) for name in homes}
        wait_for_output(child, r"volunteer-\d was ended by SIGKILL")
        [victim] = re.findall(r"(volunteer-\d) was ended", child.log.read_text())
        home = str(run_dir / "volunteers" / victim)
        wait_until(lambda: not processes_naming(home), children, 30.0, f"the end of {victim}")
        assert child.exit_code() is None
        assert child.wait(PATIENCE_SECONDS) == 0, child.last_lines()

    output = child.log.read_text()
    for part in (
        "step 3/3", "held-out loss", "tokens/s", "Who contributed", "Bytes per link",
        "activations, gradients", str(run_dir / "loss.png"),
        "after step 1 one of them will be killed", f"{victim} (process {pids[victim]})",
        f"All 3 losses are the same, to the bit, although {victim} was killed after step",
    ):  # fmt: skip
        assert part in output
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")

    document = json.loads(json_file.read_text())
    losses = [step["loss"] for step in document["steps"]]
    assert [step["step"] for step in document["steps"]] == [1, 2, 3]
    assert losses[2] < losses[0] < 7.5
    assert document["reference"] == {"losses": losses, "equal": True}
    kill = document["kill"]
    assert (kill["victim"], kill["pid"]) == (victim, pids[victim])
    assert (kill["exit"], kill["newcomer"]) == ("was ended by SIGKILL", "volunteer-3")
    # The stage was lost with the victim and no checkpoint was stored: every step is repeated.
    assert kill["joined_step"] == 1
    survivor = next(name for name in pids if name != victim)
    assert {(peer["name"], peer["microbatches"]) for peer in document["peers"]} == {
        ("volunteer-3", 3 * 4), (survivor, 3 * 4)
    }  # fmt: skip
    assert {peer["stage"] for peer in document["peers"]} == {0, 1}
    assert document["heldout_loss"] > 0
    assert 1 < document["heldout_loss"] / document["heldout_nats_per_byte"] < 8
    assert document["sample"].startswith("def ")
    recorded = [note.text for note in history(RunFolder(run_dir).database).notes]
    assert any(text.startswith(f"{victim} ") and "is gone" in text for text in recorded)
    assert processes_naming(str(run_dir)) == []


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE_SECONDS + 60)
def test_a_newcomer_joins_while_the_others_go_on(tmp_path: Path) -> None:
    run_dir, json_file = tmp_path / "run", tmp_path / "result.json"
    with Subprocesses() as children:
        child = start_demo(
            children, tmp_path, "--volunteers", "3", "--steps", "96", "--run-dir", str(run_dir),
            "--json", str(json_file),
        )  # fmt: skip
        assert child.wait(2 * PATIENCE_SECONDS) == 0, child.last_lines()
    assert "the run goes back" not in child.log.read_text()
    document = json.loads(json_file.read_text())
    kill = document["kill"]
    assert kill["exit"] == "was ended by SIGKILL"
    assert kill["after_step"] < kill["joined_step"] <= 96
    counted = Counter[str]()
    for peer in document["peers"]:  # one that has moved has a row for each stage
        counted[peer["name"]] += peer["microbatches"]
    assert counted[kill["newcomer"]] > 0
    assert counted.total() == 2 * 96 * 4
    losses = [step["loss"] for step in document["steps"]]
    alone = document["reference"]["losses"]
    assert len(alone) == steps_to_compare(96, kill["joined_step"])
    assert document["reference"] == {"losses": losses[: len(alone)], "equal": True}


@pytest.mark.process
@pytest.mark.nightly
def test_a_recorded_loss_that_differs_in_its_last_bit_fails_the_demo(tmp_path: Path) -> None:
    run_dir, json_file = tmp_path / "run", tmp_path / "result.json"
    database = RunFolder(run_dir).database
    with Subprocesses() as children:
        child = start_demo(
            children, tmp_path, "--volunteers", "1", "--stages", "1", "--steps", "24", "--no-kill",
            "--no-keep", "--run-dir", str(run_dir), "--json", str(json_file),
        )  # fmt: skip
        wait_for_output(child, r"step ([1-9]|1\d)/24")
        loss = history(database).steps[0].loss
        with contextlib.closing(sqlite3.connect(database, timeout=30.0)) as connection:
            connection.execute(
                "UPDATE applied_steps SET loss = ? WHERE step = 1", (math.nextafter(loss, 9.0),)
            )
            connection.commit()
        assert child.wait(PATIENCE_SECONDS) == 1, child.last_lines()
    output = child.log.read_text()
    assert output.count("DIFFERENT") == 1
    assert "1 of 24 losses differ from those of one process, first at step 1" in output
    assert "to the bit, although" not in output
    assert "Traceback" not in output
    assert not json.loads(json_file.read_text())["reference"]["equal"]
    assert database.exists(), "the evidence is kept"


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "volunteer-3 is started"), (signal.SIGTERM, r"step [1-9][0-9]*/60")],
    ids=["ctrl-c", "terminate"],
)
def test_stopping_the_demo_ends_every_process_and_says_where_the_run_is(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    run_dir = tmp_path / "run"
    with Subprocesses() as children:
        child = start_demo(
            children, tmp_path, "--volunteers", "2", "--steps", "60", "--run-dir", str(run_dir)
        )
        wait_for_output(child, moment)
        assert processes_naming(str(run_dir))
        os.kill(child.pid, number)
        assert child.wait(PATIENCE_SECONDS) == 130
    assert f"swarm-coordinator start {run_dir}" in child.log.read_text()
    assert processes_naming(str(run_dir)) == []


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_volunteer_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Subprocesses() as children:
        child = start_demo(
            children, tmp_path, "--volunteers", "2", "--steps", "1000", "--run-dir", str(run_dir)
        )
        wait_for_output(child, "started 2 volunteers")
        log = run_dir / "log" / "volunteer-2.out"
        wait_until(lambda: "device" in log.read_text(), Subprocesses(), PATIENCE_SECONDS, "a peer")
        os.kill(volunteer_pid(run_dir, "volunteer-2"), signal.SIGKILL)
        assert child.wait(PATIENCE_SECONDS) == 1
    output = child.log.read_text()
    assert "volunteer-2 was ended by SIGKILL" in output
    assert "device: CPU" in output
    assert "Traceback" not in output
    assert processes_naming(str(run_dir)) == []


def volunteer_pid(run_dir: Path, name: str) -> int:
    """The client that was started with this home, not one of its own workers."""
    home = str(run_dir / "volunteers" / name)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode(errors="replace").split("\0")
        if "join" in words and home in words:
            return int(path.parent.name)
    raise AssertionError(f"there is no process of {name}")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_length_of_tokens_is_that_of_the_text_that_is_measured(
    tmp_path: Path, tokenizer: str
) -> None:
    text = "".join(f"a grüner Baum, {number} leaves\n" for number in range(3000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    manifest = initialise_run(
        tmp_path / "run", "tiny", str(tmp_path / "text.txt"),
        overrides={"data.tokenizer": tokenizer, "model.vocabulary_size": 300},
    )  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    found = demo.bytes_per_token(folder, manifest)
    if tokenizer == "bytes":
        assert found == 1
    else:
        heldout_tokens = sum(shard.tokens for shard in manifest.data.split("heldout"))
        assert found == pytest.approx(0.05 * len(text.encode()) / heldout_tokens, rel=0.05)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--volunteers", "2", "--stages", "3"], "2 volunteer(s) cannot hold 3 stages"),
        (["--json", "no/such/folder/result.json"], "does not exist; make it first"),
        (["--preset", "huge"], "'huge' is not one of"),
        (["--steps", "1"], "has no middle in which a volunteer could be killed"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_made(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["demo", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("work of years")
    assert run(["demo", "--run-dir", str(tmp_path)]) != 0
    assert str(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "work of years"


def test_each_demo_gets_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("demo-run", "demo-run-2", "demo-run-3"):
        folder = demo.free_folder(Path("demo-run"))
        assert folder == tmp_path / expected
        folder.mkdir()


def test_peers_are_counted_by_the_stage_they_hold() -> None:
    def peer(stage: int | None, phase: str) -> dict[str, Any]:
        return {"stage": stage, "phase": phase}

    status = {
        "stages": [{"stage": 0, "peers": 0}, {"stage": 1, "peers": 0}],
        "peers": [
            peer(0, "ready"), peer(1, "ready"), peer(1, "ready"), peer(1, "syncing"),
            peer(None, "admitted"),
        ],
    }  # fmt: skip
    assert demo.peers_per_stage(status) == [1, 2]
    assert demo.peers_per_stage({}) == []
