"""What goes wrong around a daemon, at the command line: a clear sentence, the documented exit code,
nothing lost. A table; parts of it are looked at more closely where they are at home (preferences,
the control socket, the views)."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.cli.test_main import invite
from swarm_client.control.client import ask, is_running
from swarm_client.control.messages import API_VERSION, Refusal, version_mismatch
from swarm_client.machine.home import Home
from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.errors import (
    ConfigurationError,
    DaemonError,
    StorageError,
    SwarmError,
    UsageError,
    VersionError,
)
from swarm_shared.identity.keys import Identity

pytestmark = pytest.mark.process

GOOD = "# mine\ncpu_percent = 50\n"
FULL_DISK = "ulimit -f 0"
"""Files can be made and cannot grow, in this shell and what it starts."""

PROGRAM = (sys.executable, "-m", "swarm_client")


def types(
    home: Path, *words: str, shell: str = ":", more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A person types it, after a line of their shell."""
    command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *PROGRAM, *words, "--home", str(home)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **(more or {})}, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def sentence(done: subprocess.CompletedProcess[str], kind: type[SwarmError]) -> str:
    """The one that it ended with."""
    assert done.returncode == kind.exit_code, done
    assert "Traceback" not in done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    return line


def kept(home: Path) -> dict[str, bytes]:
    """Everything but logs and sockets."""
    files = (path for path in home.rglob("*") if path.is_file() and path.parent.name != "log")
    return {str(path.relative_to(home)): path.read_bytes() for path in files}


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("file", "words", "more", "kind", "told"),
    [
        ("cpu_procent = 5", ("join", "INVITE"), {}, ConfigurationError, "'cpu_percent'?"),
        ("cpu_percent = 500", ("join", "INVITE"), {}, ConfigurationError, "cpu_percent"),
        ("version = 99", ("join", "INVITE"), {}, VersionError, "newer swarm-client"),
        (GOOD, ("join", "INVITE", "--set", "nice=-5"), {}, ConfigurationError, "nice=-5"),
        (GOOD, ("join", "INVITE"), {"SWARM_NICE": "20"}, ConfigurationError, "SWARM_NICE"),
        (GOOD, ("config", "set", "gpu.0.fan", "5"), {}, ConfigurationError, "'fan'"),
        (GOOD, ("config", "set", "nice", "20"), {}, ConfigurationError, "nice"),
        ("version = 99", ("config", "set", "nice", "5"), {}, VersionError, "not changed"),
        ("version = 99", ("config", "get"), {}, VersionError, "update this one"),
        (GOOD, ("pause", "--for", "a while"), {}, UsageError, "write 30m"),
        (GOOD, ("join", "INVITE", "--device", "cpu", "--device", "gpu"), {}, UsageError, "'gpu'"),
    ],
)
def test_a_setting_that_cannot_be_is_reported_and_the_file_stays_as_it_was(
    tmp_path: Path,
    file: str,
    words: tuple[str, ...],
    more: dict[str, str],
    kind: type[SwarmError],
    told: str,
) -> None:
    (tmp_path / "preferences.toml").write_text(file)
    words = tuple(invite() if word == "INVITE" else word for word in words)
    assert told in sentence(types(tmp_path, *words, more=more), kind)
    assert (tmp_path / "preferences.toml").read_text() == file


# ---------------------------------------------------------------- the daemon's socket and lock


@pytest.mark.parametrize("words", [("status",), ("pause",), ("leave",), ("runs", "choose", "x")])
def test_a_socket_without_a_server_is_no_daemon(tmp_path: Path, words: tuple[str, ...]) -> None:
    home = Home.create(tmp_path / "h")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(home.socket_path))
    assert "no daemon is running in" in sentence(types(home.path, *words), DaemonError)


def test_a_second_daemon_is_refused_and_the_first_ones_home_is_as_it_was(tmp_path: Path) -> None:
    home = Home.create(tmp_path / "h")
    home.runs_path.write_text('{"format": 1}')
    before = kept(home.path)
    with home.locked():
        told = sentence(types(home.path, "daemon"), StorageError)
    assert "another swarm-client is running in" in told
    assert "--home" in told
    assert kept(home.path).items() >= before.items()


@contextmanager
def daemon_that_answers(path: Path, answer: object) -> Iterator[None]:
    """One of another version: whatever it is asked, it says this."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    if connection.recv(65_536):
                        connection.sendall(json.dumps(answer).encode() + b"\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)


REFUSES = Refusal(error=version_mismatch(API_VERSION)).model_dump()


@pytest.mark.parametrize("words", [("status",), ("resume",), ("credit",), ("finish", "--no-wait")])
@pytest.mark.parametrize("answer", [REFUSES, {"result": {}}], ids=["refuses", "speaks otherwise"])
def test_a_daemon_of_another_version_is_reported_with_its_remedy(
    tmp_path: Path, words: tuple[str, ...], answer: object
) -> None:
    home = Home.create(tmp_path / "h")
    with daemon_that_answers(home.socket_path, answer):
        told = sentence(types(home.path, *words), VersionError)
    assert "swarm-client shutdown" in told
    assert "same installation" in told


def test_a_daemon_of_another_version_that_can_be_understood_is_reported_as_one(
    tmp_path: Path,
) -> None:
    home = Home.create(tmp_path / "h")
    status = {
        "software": "99.0", "pid": 1, "time": 1.0, "started_at": 0.0, "state": "stopped",
        "sentence": "nothing", "peer": "p", "of a newer version": True,
    }  # fmt: skip
    with daemon_that_answers(home.socket_path, {"ok": status}):
        done = types(home.path, "status")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "stopped: nothing")
    assert f"the daemon is version 99.0 and this command {SOFTWARE_VERSION}" in done.stderr


# ---------------------------------------------------------------- a full disk


def test_settings_are_kept_when_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "preferences.toml").write_text(GOOD)
    told = sentence(types(tmp_path, "config", "set", "nice", "5", shell=FULL_DISK), StorageError)
    assert "preferences.toml" in told
    assert kept(tmp_path) == {"preferences.toml": GOOD.encode()}


def test_a_first_start_on_a_full_disk_reports_it_and_leaves_no_half_a_key(tmp_path: Path) -> None:
    done = types(tmp_path / "h", "daemon", shell=FULL_DISK)
    assert done.returncode == StorageError.exit_code, done
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("swarm-client: error: ")
    assert not (tmp_path / "h" / "identity.key").exists()


def test_a_daemon_continues_when_the_disk_is_full_and_what_it_knew_of_runs_stays(
    tmp_path: Path,
) -> None:
    home = Home.create(tmp_path / "h")
    Identity.load_or_create(home.identity_path)
    home.runs_path.write_text('{"format": 1}')
    before = kept(home.path)
    daemon = subprocess.Popen(
        ["sh", "-c", f'{FULL_DISK}; exec "$@"', "sh", *PROGRAM, "daemon", "--home", home.path],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        while not is_running(home.socket_path):
            assert daemon.poll() is None, daemon.communicate()
        assert ask(home.socket_path, "pause")["message"].startswith("paused")
        lines = [line["text"] for line in ask(home.socket_path, "log")["lines"]]
        assert any("could not be saved" in line for line in lines)
        with socket.socket(socket.AF_UNIX) as nonsense:
            nonsense.connect(str(home.socket_path))
            nonsense.sendall(b"which is logged\n")
            assert nonsense.recv(100) == b""
        ask(home.socket_path, "shutdown")
        said, _ = daemon.communicate(timeout=60)
    finally:
        daemon.kill()
        daemon.wait()
    assert daemon.returncode == 0
    assert "Traceback" not in said
    assert kept(home.path).items() >= before.items()


# ---------------------------------------------------------------- a terminal of 20 columns


@pytest.mark.parametrize(
    ("words", "code"), [(("status",), 13), (("--help",), 0), (("join", "x"), 4), ((), 0)]
)
def test_commands_work_in_a_terminal_of_twenty_columns(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    screen, terminal = os.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 20, 0, 0))
        home = ("--home", str(tmp_path)) if words and words[0] != "--help" else ()
        done = subprocess.run(
            [*PROGRAM, *words, *home], stdin=terminal, stdout=terminal, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(terminal)
        os.close(screen)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
