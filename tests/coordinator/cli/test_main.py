"""What an organiser types: one sentence per error, documented exit codes, never a traceback."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kits.coordinator.commands import Started, complains, edit
from kits.coordinator.run import one_start
from kits.loaded_modules import loaded
from kits.runs.stage_files import put_model
from swarm_coordinator.cli.main import run
from swarm_coordinator.cli.model import compare_losses
from swarm_coordinator.core.events import (
    AppliedStep,
    EvaluationRecord,
    RunFinished,
)
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import HistoryStep
from swarm_shared.base.types import Step, Version
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import MANIFEST_DOMAIN, MAX_MANIFEST_BYTES
from swarm_shared.identity.signing import open_envelope, seal
from swarm_shared.run.manifest import CodecsConfig


def applied(number: int) -> AppliedStep:
    return AppliedStep(Step(number), 1, 4.0 / number, 128, 0.5, 1.0, 1e-3, ())


def finish(folder: RunFolder) -> None:
    one_start(
        folder, *(applied(number) for number in range(1, 5)),
        EvaluationRecord(Version(4), 1.5, 100), RunFinished(Version(4)),
    )  # fmt: skip


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "swarm-coordinator 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["frobnicate"], "No such command"),
        (["init"], "Missing argument"),
        (["init", "x", "--preset", "huge"], "is not one of"),
        (["start", "x", "--port", "99999"], "is not in the range"),
        (["start", "/nonexistent/run"], "does not exist"),
        (["start", __file__], "is a file; name the folder of a run"),
        (["restore", __file__, "x"], "is not a backup"),
    ],
)
def test_wrong_words_exit_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    code, sentence = complains(capsys, *words)
    assert code == 2
    assert reason in sentence


@pytest.mark.parametrize(
    ("damage", "command", "code", "reason"),
    [
        (lambda f: f.settings.write_text("[run]\nnmae = 1"), "start", 3, "no setting 'nmae'"),
        (lambda f: f.manifest.write_bytes(b"{}"), "start", 7, "is damaged"),
        (lambda f: f.organiser_key.unlink(), "start", 7, "has lost its organiser.key"),
        (lambda f: f.organiser_key.chmod(0o644), "start", 3, "chmod 600"),
        (lambda f: f.settings.unlink(), "start", 7, "names the last good backup"),
        (lambda f: of_another_release(f), "start", 10, "use the release that wrote it"),
        (lambda f: of_another_release(f), "verify", 10, "use the release that wrote it"),
        (lambda f: database_of_another_release(f), "start", 10, "use the release that wrote it"),
        (lambda f: database_of_another_release(f), "verify", 10, "use the release that wrote it"),
        (lambda f: f.database.write_bytes(b"x" * 9000), "start", 7, "is damaged"),
        (lambda f: f.database.write_bytes(b"x" * 9000), "history", 7, "swarm-coordinator verify"),
        (lambda f: None, "history", 7, "starts it"),
        (lambda f: f.database.touch(), "history", 7, "has not been started"),
        (lambda f: announce(f, "example.org:4001"), "start", 3, "[network] announce"),
        (lambda f: announce(f, "example.org:4001"), "invite", 3, "[network] announce"),
        (lambda f: f.port_file.write_text("many"), "invite", 7, "is not a port"),
        (lambda f: f.status.write_text("{"), "status", 7, "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_with_its_exit_code(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], damage, command, code, reason
) -> None:
    damage(folder)
    seen, sentence = complains(capsys, command, folder.path)
    assert (seen, reason in sentence) == (code, True), sentence
    assert "set-aside" not in sentence or code == 7, "only what is damaged is moved away"


def test_a_port_in_use_exits_with_8(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, sentence = complains(capsys, "start", folder.path, "--port", str(port))
    assert code == 8
    assert f"Port {port}" in sentence


def test_a_bug_of_ours_is_one_sentence_that_names_the_log(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise ZeroDivisionError("the bug")

    monkeypatch.setattr("swarm_coordinator.cli.views.history", fail)
    code, sentence = complains(capsys, "history", folder.path)
    log = folder.log / "swarm-coordinator-error.log"
    assert code == 1
    assert "ZeroDivisionError: the bug" in sentence
    assert str(log) in sentence
    assert "Traceback" in log.read_text()


def test_ctrl_c_in_a_command_exits_with_130(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("swarm_coordinator.cli.views.history", interrupt)
    assert run(["history", str(folder.path)]) == 130


def test_history_prints_the_steps_while_the_coordinator_is_down(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    one_start(folder, applied(1), applied(2))
    assert run(["history", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "version": 1,
        "steps": [
            {"step": 1, "loss": 4.0, "tokens": 128, "seconds": 0.5},
            {"step": 2, "loss": 2.0, "tokens": 128, "seconds": 0.5},
        ],
    }
    assert run(["history", str(folder.path)]) == 0
    assert "2.0000" in capsys.readouterr().out


def test_the_reference_writes_the_same_form(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "reference.json"
    words = ["reference", str(folder.path), "--steps", "2", "--json", str(target), "--threads", "1"]
    assert run(words) == 0
    document = json.loads(target.read_text())
    assert document["version"] == 1
    assert [s["step"] for s in document["steps"]] == [1, 2]
    assert set(document["steps"][0]) == {"step", "loss", "tokens", "seconds"}
    assert "step 2 loss" in capsys.readouterr().out


def step_of(number: int, loss: float) -> HistoryStep:
    return HistoryStep(Step(number), loss, 128, 0.5, written_at=0.0)


@pytest.mark.parametrize(
    ("losses", "average", "said"),
    [
        ([4.0, 2.0], "exact", "the same, to the bit, in all 2 steps"),
        ([4.0], "none", "the same, to the bit, in all 1 step"),
        ([], "exact", "has applied none of these steps"),
        ([4.0, 2.0002], "exact", "in 1 of 2 steps, by 1.0e-04 at most (step 2): its machines"),
        ([4.5, 2.0], "exact", "in 1 of 2 steps, by 1.2e-01 at most (step 1)"),
        ([4.0, 2.0002], "int8", 'need [codecs] average = "exact", not "int8"'),
    ],
)
def test_a_person_is_told_whether_the_run_is_its_reference(
    losses: list[float], average: str, said: str, folder: RunFolder
) -> None:
    manifest = load_manifest(folder)
    manifest = manifest.model_copy(update={"codecs": CodecsConfig(average=average)})
    run_steps = [step_of(number, loss) for number, loss in enumerate(losses, 1)]
    assert said in compare_losses(run_steps, [step_of(1, 4.0), step_of(2, 2.0)], manifest)


def test_a_reference_that_could_not_write_its_file_does_not_train_first(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = complains(capsys, "reference", folder.path, "--json", tmp_path / "no" / "file")
    assert code == 7


def test_a_reference_whose_run_cannot_be_read_does_not_train_first(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    database_of_another_release(folder)
    assert run(["reference", str(folder.path), "--steps", "1", "--threads", "1"]) == 10
    assert "step 1 loss" not in capsys.readouterr().out


def test_export_without_a_checkpoint_says_what_to_do(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, sentence = complains(capsys, "export", folder.path, tmp_path / "out")
    assert code == 7
    assert "no usable checkpoint" in sentence
    assert "swarm-coordinator start" in sentence


def test_export_takes_the_newest_checkpoint_that_is_whole(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [put_model(folder, version) for version in (2, 4)]
    one_start(folder, *(applied(number) for number in range(1, 5)), *records)
    with (folder.checkpoints / "step-00000004" / "stage-1.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert run(["export", str(folder.path), str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "after step 2" in captured.out
    assert "step-00000004" in captured.err
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_status_before_the_first_start(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", str(folder.path)]) == 0
    assert "has not been started yet" in capsys.readouterr().out
    assert run(["status", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] is False


def test_a_finished_run_says_so_and_what_can_be_done_until_it_is_stopped(
    folder: RunFolder,
) -> None:
    finish(folder)
    one_start(folder, put_model(folder, 4))
    with Started(folder) as started:
        started.until("serving the model to members at /ip4/127.0.0.1/tcp/")
    assert started.lines[0] == (
        "the run has finished after 4 steps, held-out loss 1.5000; the model is in "
        f"{folder.checkpoints}, as safetensors files\n"
    )
    assert "swarm-coordinator export" in started.lines[1]
    assert "raise [training] steps" in started.lines[2]
    assert "stopping" not in started.lines[-1], "no step is in progress"


def of_another_release(folder: RunFolder) -> None:
    """Sign a manifest of a form that this release does not know, as another one would."""
    identity = Identity.load(folder.organiser_key)
    envelope = folder.manifest.read_bytes()
    manifest = open_envelope(envelope, MANIFEST_DOMAIN, max_bytes=MAX_MANIFEST_BYTES)
    content = manifest.payload.replace(b'{"format":1,', b'{"format":2,')
    assert content != manifest.payload
    folder.manifest.write_bytes(seal(identity, MANIFEST_DOMAIN, manifest.payload_type, content))


def database_of_another_release(folder: RunFolder) -> None:
    one_start(folder, applied(1))
    with contextlib.closing(sqlite3.connect(folder.database)) as connection:
        connection.execute("PRAGMA user_version = 99")


def announce(folder: RunFolder, address: str) -> None:
    edit(folder, ("announce = []", f'announce = ["{address}"]'))


def test_what_decides_the_model_cannot_be_changed_after_the_first_step(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    one_start(folder, applied(1))
    edit(folder, ("seed = 1", "seed = 2"))
    code, sentence = complains(capsys, "start", folder.path)
    assert code == 3
    assert "[run] seed is 2" in sentence
    assert "change it back" in sentence


def test_a_run_whose_steps_were_raised_goes_on_and_keeps_its_invite(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["invite", str(folder.path)])
    before = capsys.readouterr().out.strip()
    finish(folder)
    edit(folder, ("steps = 4", "steps = 6"))
    with Started(folder) as started:
        assert started.invite() == before
    assert "following run.toml: [training] steps" in started.lines[0]
    assert load_manifest(folder).training.steps == 6
    assert json.loads(folder.status.read_text())["phase"] == "stopping"


def test_edits_before_the_first_step_are_followed(folder: RunFolder) -> None:
    text = folder.settings.read_text()
    folder.settings.write_text(re.sub(r"(?m)^learning_rate = .*$", "learning_rate = 0.002", text))
    with Started(folder) as started:
        started.invite()
    assert load_manifest(folder).optimizer.learning_rate == 0.002


HEAVY = ["torch", "hivemind", "libp2p", "matplotlib", "textual", "transformers"]


@pytest.mark.parametrize("command", ["--help", "invite", "status", "token list"])
def test_help_and_what_looks_at_a_run_load_no_heavy_libraries(
    folder: RunFolder, command: str
) -> None:
    """py-libp2p alone takes most of a second."""
    code = "import sys\nfrom swarm_coordinator.cli.main import run\nassert run(sys.argv[1:]) == 0"
    arguments = [*command.split(), *([] if command == "--help" else [folder.path])]
    assert loaded(code, HEAVY, *arguments) == []


_WITHOUT_TORCH = """
import sys
from swarm_coordinator.cli.main import run
code = run(["start", sys.argv[1]])
heavy = {"torch", "hivemind", "matplotlib", "textual", "transformers"} & set(sys.modules)
print("heavy:", sorted(heavy))
sys.exit(code)
"""


def test_the_service_runs_without_heavy_libraries_and_status_follows_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Started(folder, program=_WITHOUT_TORCH) as started:
        invite = started.invite()
        assert Invite.decode(invite).addresses == (
            f"/ip4/127.0.0.1/tcp/{folder.remembered_port()}",
        )  # fmt: skip
        assert run(["invite", str(folder.path)]) == 0
        assert capsys.readouterr().out.strip() == invite
        assert run(["status", str(folder.path)]) == 0
        out = capsys.readouterr().out
        assert "a run: running, waiting for peers" in out
        assert "stage 1: 0 peer(s)" in out
        code, sentence = complains(capsys, "start", folder.path)
        assert (code, "another coordinator" in sentence) == (2, True)
    assert "heavy: []" in started.lines[-1]
    assert "stopping" in started.lines[-1]
    assert run(["status", str(folder.path)]) == 0
    assert "not running" in capsys.readouterr().out
    assert (folder.log / "coordinator.log").exists()


def test_a_pipe_that_closes_early_is_no_error(folder: RunFolder) -> None:
    one_start(folder, *(applied(number) for number in range(1, 400)))
    done = subprocess.run(
        f"'{sys.executable}' -m swarm_coordinator history '{folder.path}' | head -1",
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "loss" in done.stdout
    assert done.stderr == ""


def test_a_database_in_use_by_a_stranger_is_named(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_coordinator.storage.sqlite.BUSY_TIMEOUT_SECONDS", 0.1)
    one_start(folder, applied(1))
    stranger = sqlite3.connect(folder.database)
    stranger.execute("PRAGMA locking_mode = EXCLUSIVE")
    stranger.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    code, sentence = complains(capsys, "history", folder.path)
    stranger.close()
    assert code == 7
    assert "locked by another program" in sentence
    assert time.monotonic() - began < 30
