from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_coordinator.run_dir.folder import RunFolder, read_bytes
from swarm_shared.base.errors import StorageError, UsageError


def complete(path: Path) -> RunFolder:
    folder = RunFolder.create(path)
    for file in (folder.settings, folder.manifest, folder.organiser_key):
        file.write_bytes(b"x")
    return folder


def test_a_new_folder_is_private_and_has_its_parts(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "deep" / "my run")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.data.is_dir()
    assert folder.checkpoints.is_dir()
    assert folder.log.is_dir()


def test_an_empty_folder_may_become_a_run(tmp_path: Path):
    (tmp_path / "run").mkdir(mode=0o755)
    folder = RunFolder.create(tmp_path / "run")
    assert folder.data.is_dir()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_run_or_anything_else_is_never_overwritten(tmp_path: Path):
    complete(tmp_path / "run")
    with pytest.raises(UsageError, match="holds a run already"):
        RunFolder.create(tmp_path / "run")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(UsageError, match="is not empty"):
        RunFolder.create(tmp_path / "photos")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a folder"):
        RunFolder.create(tmp_path / "file")


def test_a_file_in_the_way_of_the_folder_is_a_storage_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="part of that path is a file"):
        RunFolder.create(tmp_path / "file" / "run")


def test_a_complete_folder_opens(tmp_path: Path):
    complete(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").path == tmp_path / "run"


def test_a_command_to_copy_is_right_in_a_folder_with_a_space(tmp_path: Path):
    gone = tmp_path / "no such run"
    with pytest.raises(UsageError) as refused:
        RunFolder.open(gone)
    [command] = re.findall("`([^`]*)`", str(refused.value))
    assert shlex.split(command) == ["swarm-coordinator", "init", str(gone)]


def test_what_is_no_run_folder_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        RunFolder.open(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        RunFolder.open(tmp_path / "file")
    with pytest.raises(UsageError, match="not the folder of a run"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["run.toml", "manifest.json", "organiser.key"])
def test_a_lost_part_is_named(tmp_path: Path, name: str):
    folder = complete(tmp_path / "run")
    (folder.path / name).unlink()
    with pytest.raises(StorageError, match=f"has lost its {name}"):
        RunFolder.open(folder.path)


_HOLDER = """
import sys
from pathlib import Path
from swarm_coordinator.run_dir.folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_coordinators_cannot_have_one_folder_and_a_killed_one_frees_it(tmp_path: Path):
    folder = complete(tmp_path / "run")
    assert not folder.in_use()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            assert folder.in_use()
            message = f"another coordinator \\(process {other.pid}\\) is using"
            with pytest.raises(UsageError, match=message), folder.lock():
                pass
        finally:
            other.kill()
            other.wait()
    assert not folder.in_use()
    with folder.lock():
        assert folder.in_use()
    assert not folder.in_use()


def test_the_port_of_the_first_start_is_remembered(tmp_path: Path):
    folder = complete(tmp_path / "run")
    assert folder.remembered_port() is None
    folder.remember_port(41_234)
    assert folder.remembered_port() == 41_234


@pytest.mark.parametrize("content", ["", "x", "70000", "0", "-3"])
def test_a_damaged_port_file_is_named(tmp_path: Path, content: str):
    folder = complete(tmp_path / "run")
    folder.port_file.write_text(content)
    with pytest.raises(StorageError, match="which is not a port"):
        folder.remembered_port()


def test_the_admission_token_is_made_once_and_private(tmp_path: Path):
    folder = complete(tmp_path / "run")
    token = folder.admission_token()
    assert len(token) >= 32
    assert folder.admission_token() == token
    assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600
    folder.token_file.write_text("")
    with pytest.raises(StorageError, match="is empty"):
        folder.admission_token()


def test_a_file_that_is_missing_or_far_too_long_is_named(tmp_path: Path):
    with pytest.raises(StorageError, match="No such file"):
        read_bytes(tmp_path / "gone")
    (tmp_path / "long").write_bytes(bytes(11))
    assert len(read_bytes(tmp_path / "long", 11)) == 11
    with pytest.raises(StorageError, match="longer than 10 bytes"):
        read_bytes(tmp_path / "long", 10)
