"""What the install script lets uv take, by where it comes from, what it does not run,
and what an end in the middle leaves."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.installers.tree import LINUX

WHEEL = "swarmtrain-0.1.0-py3-none-any.whl"
CONTENT = b"the wheel"
EVIL = "numpy @ http://192.0.2.66/runs-at-installation.tar.gz\n"
PINS = "# measured together\nnumpy==2.3.5\n"

NO_CONSTRAINTS = ""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "a source"
    folder.mkdir()
    (folder / WHEEL).write_bytes(CONTENT)
    return folder


class InstallRefused(Exception):
    """The script ended with an error."""


def settled(wheel: str | Path, hash_by_hand: str = "") -> tuple[str, str]:
    """The hash and the constraints that the script's own `settle_source` passes to uv."""
    functions = (LINUX / "install.sh").read_text().removesuffix('main "$@"\n')
    head = f"from='{wheel}' sha256={hash_by_hand}\n"
    code = functions + 'settle_source\necho "$sha256"\ncat "$constraints"\n'
    done = subprocess.run(["sh"], input=head + code, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise InstallRefused(done.stderr)
    told, _, constraints = done.stdout.partition("\n")
    return told, constraints


def test_constraints_that_the_hashes_list_are_taken(source: Path) -> None:
    (source / "constraints.txt").write_text(PINS)
    (source / "SHA256SUMS").write_text(
        f"{sha256(CONTENT)}  {WHEEL}\n{sha256(PINS.encode())} *constraints.txt\n"
    )
    assert settled(source / WHEEL) == (sha256(CONTENT), PINS)


def test_constraints_that_were_changed_end_the_installation(source: Path) -> None:
    (source / "constraints.txt").write_text(PINS + "torch==1.0\n")
    (source / "SHA256SUMS").write_text(
        f"{sha256(CONTENT)}  {WHEEL}\n{sha256(PINS.encode())}  constraints.txt\n"
    )
    with pytest.raises(InstallRefused, match=r"constraints\.txt is damaged"):
        settled(source / WHEEL)


def test_constraints_that_no_hash_vouches_for_are_not_taken(source: Path) -> None:
    """A line `name @ URL` in them would run code of its own at the installation."""
    (source / "constraints.txt").write_text(EVIL)
    assert settled(source / WHEEL) == ("", NO_CONSTRAINTS)
    assert settled(source / WHEEL, sha256(CONTENT)) == (sha256(CONTENT), NO_CONSTRAINTS)
    (source / "SHA256SUMS").write_text(f"{sha256(CONTENT)}  {WHEEL}\n")
    assert settled(source / WHEEL) == (sha256(CONTENT), NO_CONSTRAINTS)
    (source / "SHA256SUMS").write_text(f"{sha256(EVIL.encode())}  constraints.txt\n")
    by_hand = settled("http://192.0.2.66/" + WHEEL, sha256(CONTENT))
    assert by_hand == (sha256(CONTENT), NO_CONSTRAINTS)


def test_a_wheel_that_the_hashes_do_not_list_ends_the_installation(source: Path) -> None:
    (source / "SHA256SUMS").write_text(f"{sha256(CONTENT)}  another.whl\n")
    with pytest.raises(InstallRefused, match="does not list it"):
        settled(source / WHEEL)


def test_the_constraints_of_the_checkout_are_taken(source: Path) -> None:
    shutil.copy(LINUX.parents[1] / "constraints.txt", source)
    (source / "pyproject.toml").touch()
    assert settled(source) == ("", (source / "constraints.txt").read_text())


def test_no_module_is_taken_from_the_folder_in_which_the_script_is_called(tmp_path: Path) -> None:
    programs = tmp_path / "data" / "swarmtrain-program" / "bin"
    programs.mkdir(parents=True)
    (programs / "swarm-client").write_text('#!/bin/sh\necho \'{"state": "stopped"}\'\n')
    (programs / "swarm-client").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "json.py").write_text("raise SystemExit('of another user')\n")
    places = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    done = subprocess.run(
        ["sh", LINUX / "install.sh", "--uninstall", "--dry-run"], cwd=shared, capture_output=True,
        env={**places, "PATH": "/usr/bin:/bin"}, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "would end the client that runs, in order" in done.stdout


def test_every_python_of_the_scripts_is_isolated() -> None:
    for script in ("install.sh", "build_deb.sh"):
        started = re.findall(r'(?:python|getter)"((?: -I)?) -[cm] ', (LINUX / script).read_text())
        assert started
        assert set(started) == {" -I"}


MV = """#!/bin/sh
echo mv >>"$LOG"
/bin/mv "$@"
[ "$SIGNAL" = 0 ] || kill -"$SIGNAL" "$PPID"
"""


@pytest.fixture
def upgrade(tmp_path: Path) -> Callable[..., list[str]]:
    """Put a new environment in the old one's place, with a signal after the first rename; return
    what was done to the disk."""
    for name, content in (("mv", MV), ("sync", '#!/bin/sh\necho sync >>"$LOG"\n')):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    for name, content in (("program", "old"), ("program.new/env", "new")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "content").write_text(content)
    functions = (LINUX / "install.sh").read_text().removesuffix('main "$@"\n')

    def run(signal: str, last: str = "put_in_place") -> list[str]:
        code = f"environment={tmp_path}/program links={tmp_path}/bin ended=no\n"
        code += f"work=$environment.new\ntrap end EXIT\ntrap 'exit 130' INT\n{last}\n"
        places = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log")}
        subprocess.run(
            ["sh"], input=functions + code, env={**places, "SIGNAL": signal}, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        return (tmp_path / "log").read_text().split()

    return run


def test_the_files_of_a_new_environment_are_on_the_disk_before_it_takes_the_place(
    tmp_path: Path, upgrade: Callable[..., list[str]]
) -> None:
    assert upgrade("0") == ["sync", "mv", "mv"]
    assert (tmp_path / "program" / "content").read_text() == "new"
    assert not (tmp_path / "program.old").exists()


def test_an_installation_that_is_ended_between_two_names_leaves_the_old_environment(
    tmp_path: Path, upgrade: Callable[..., list[str]]
) -> None:
    upgrade("INT")
    assert (tmp_path / "program" / "content").read_text() == "old"


def test_the_next_installation_takes_back_what_a_killed_one_has_moved_away(
    tmp_path: Path, upgrade: Callable[..., list[str]]
) -> None:
    upgrade("KILL")
    assert not (tmp_path / "program").exists()
    upgrade("0", last="take_back")
    assert (tmp_path / "program" / "content").read_text() == "old"


UV = """#!/bin/sh
case $1 in venv) ;; *) exit 0 ;; esac
for place; do :; done
mkdir -p "$place/bin"
echo "echo 0.1.0" >"$place/bin/swarm-client"
chmod +x "$place/bin/swarm-client"
"""


@pytest.mark.parametrize("mask", [0, 0o077])
def test_the_program_can_be_run_by_all_and_changed_by_its_owner(tmp_path: Path, mask: int) -> None:
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    subprocess.run(
        ["sh", LINUX / "install.sh", "--prefix", tmp_path / "opt"], umask=mask, timeout=60,
        env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True,
        capture_output=True,
    )  # fmt: skip
    environment = tmp_path / "opt" / "share" / "swarmtrain-program"
    for path in (
        tmp_path / "opt",
        tmp_path / "opt" / "bin",
        environment,
        environment / "bin",
        environment / "bin" / "swarm-client",
    ):
        assert path.stat().st_mode & 0o777 == 0o755


def test_what_a_home_that_is_a_link_leads_to_stays_and_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "large disk"
    disk.mkdir()
    (disk / "identity.key").touch()
    (tmp_path / "swarmtrain").symlink_to(disk)
    done = subprocess.run(
        ["sh", LINUX / "install.sh", "--uninstall", "--purge"], capture_output=True, text=True,
        env={"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        timeout=60, check=True,
    )  # fmt: skip
    assert f"what it leads to stays: {disk}" in done.stdout
    assert (disk / "identity.key").exists()
    assert not (tmp_path / "swarmtrain").is_symlink()
