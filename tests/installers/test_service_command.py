"""`swarm-client service`, in a home of its own and without any service manager in reach."""

from __future__ import annotations

import json
import os
import plistlib
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_client.cli.main import main
from swarm_client.machine.sd_notify import VARIABLE, Notifier
from swarm_client.service import launchd, systemd
from swarm_client.service.steps import MakeLink, Remove, WriteFile, carry_out
from swarm_client.service.steps import RunCommand as RunStep
from swarm_shared.base.errors import DaemonError, StorageError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd's part")

RunCommand = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> RunCommand:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "SWARM_CLIENT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    # No systemctl: whoever runs the tests may have a manager, and it is none of ours.
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["swarm-client", "service", *words])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        seen = capsys.readouterr()
        return code, seen.out + seen.err

    return call


def unit(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".config" / "systemd" / "user" / systemd.UNIT


def test_a_service_is_installed_seen_and_removed(run: RunCommand, tmp_path: Path) -> None:
    assert "not installed" in run("status")[1]
    code, _ = run("install", "--no-start", "--home", str(tmp_path / "my own"))
    assert code == 0
    assert f'"--home" "{tmp_path / "my own"}"' in unit(tmp_path).read_text()
    link = unit(tmp_path).parent / "default.target.wants" / systemd.UNIT
    assert link.resolve() == unit(tmp_path)
    found = json.loads(run("status", "--json")[1])
    assert (found["installed"], found["enabled"]) == (True, True)
    assert found["path"] == str(unit(tmp_path))
    assert run("install", "--no-start")[0] == 0
    assert "--home" not in unit(tmp_path).read_text()
    assert run("uninstall")[0] == 0
    assert not unit(tmp_path).exists()
    assert not link.is_symlink()
    assert run("uninstall")[0] == 0


def test_a_dry_run_shows_every_file_and_writes_none(run: RunCommand, tmp_path: Path) -> None:
    code, text = run("install", "--no-start", "--dry-run")
    assert code == 0
    assert f"would write {unit(tmp_path)}" in text
    assert "    Type=notify" in text
    assert list((tmp_path / "home").iterdir()) == []
    run("install", "--no-start")
    code, text = run("uninstall", "--dry-run")
    assert code == 0
    assert f"would remove {unit(tmp_path)}" in text
    assert unit(tmp_path).exists()


def test_without_systemd_nothing_is_changed_and_other_ways_are_named(
    run: RunCommand, tmp_path: Path
) -> None:
    code, text = run("install")
    assert code == 13
    assert "nothing was changed" in text
    assert "--detach" in text
    assert list((tmp_path / "home").iterdir()) == []


def test_the_machines_service_takes_root_and_a_program_that_services_can_see(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for words in (("install",), ("uninstall",), ("uninstall", "--purge")):
        code, text = run(*words, "--system", "--no-start")
        assert code == 2
        assert "needs root" in text
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "executable", "/home/bob/.local/share/program/bin/python")
    code, text = run("install", "--system", "--no-start")
    assert code == 2
    assert "system services cannot see" in text
    code, text = run("uninstall", "--purge")
    assert code == 2
    assert "--purge goes with --system" in text


def test_elsewhere_than_on_linux_and_macos_it_says_what_there_is(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    code, text = run("install")
    assert code == 13
    assert "services are not supported on freebsd14" in text


def test_a_dry_run_on_a_mac_makes_nothing_and_an_installation_what_it_has_shown(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    calls = launchctl(tmp_path, "case $1 in bootout) exit 36 ;; esac")
    home = tmp_path / "home"
    own = home / "own"
    agent = home / "Library" / "LaunchAgents" / "org.swarmtrain.client.plist"
    code, text = run("install", "--dry-run", "--home", str(own))
    assert code == 0
    assert f"would make {own}\nwould make {own / 'log'}\n" in text
    assert list(home.iterdir()) == []
    assert run("install", "--home", str(own))[0] == 0
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert plistlib.loads(agent.read_bytes())["StandardOutPath"] == str(own / "log" / "service.log")
    assert run("uninstall", "--dry-run")[0] == 0
    assert agent.exists()
    assert run("uninstall")[0] == 0
    assert not agent.exists()
    assert [call.split()[0] for call in calls()] == ["bootout", "bootstrap", "bootout"]


def launchctl(tmp_path: Path, script: str) -> Callable[[], list[str]]:
    """A launchctl that carries out `script`; returns what reads its calls."""
    program, calls = tmp_path / "bin" / "launchctl", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n{script}\n')
    program.chmod(0o755)
    return lambda: calls.read_text().splitlines()


@pytest.mark.parametrize(("code", "tries"), [(5, 3), (37, 3), (125, 1)])
def test_an_agent_is_loaded_when_the_one_before_it_has_ended(
    run: RunCommand, tmp_path: Path, code: int, tries: int
) -> None:
    calls = launchctl(
        tmp_path, f'[ "$(/usr/bin/wc -l < "{tmp_path / "calls"}")" -gt 2 ] || exit {code}'
    )
    load = launchd.install(tmp_path / "plist", "text", (), 501)[-1]
    pauses: list[float] = []
    failed = False
    try:
        carry_out((load,), lambda line: None, pauses.append)
    except DaemonError:
        failed = True
    assert (len(calls()), len(pauses), failed) == (tries, tries - 1, tries == 1)


def test_steps_are_told_and_end_at_the_first_that_fails(tmp_path: Path) -> None:
    told: list[str] = []
    file, link = tmp_path / "a" / "file", tmp_path / "b" / "link"
    steps = (
        WriteFile(file, "text"), MakeLink(link, file), MakeLink(link, tmp_path),
        RunStep(("false",), may_fail=True), RunStep(("no such program",), may_fail=True),
        RunStep(("sh", "-c", "echo sorry >&2; exit 3")), Remove(file),
    )  # fmt: skip
    with pytest.raises(DaemonError, match="failed: sorry"):
        carry_out(steps, told.append)
    assert file.read_text() == "text"
    assert link.readlink() == tmp_path
    assert told == [str(step) for step in steps[:-1]]
    carry_out((Remove(link), Remove(tmp_path / "a", whole=True), Remove(file)), told.append)
    assert not link.is_symlink()
    assert not (tmp_path / "a").exists()
    assert tmp_path.exists()
    with pytest.raises(StorageError):
        carry_out((WriteFile(tmp_path / "b", "not over a folder"),), told.append)


# ---------------------------------------------------------------- systemd's notifications


@pytest.mark.parametrize("abstract", [False, True], ids=["a file", "an abstract address"])
def test_the_manager_hears_and_no_child_will_speak_to_it(tmp_path: Path, abstract: bool) -> None:
    name = f"@swarmtrain-test-{os.getpid()}" if abstract else str(tmp_path / "manager")
    environment = {VARIABLE: name}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.settimeout(10.0)
        notifier = Notifier.from_environment(environment)
        assert environment == {}
        notifier.ready()
        notifier.status("one line\nREADY=0 and " + "x" * 5000)
        notifier.stopping(80.5)
        assert manager.recv(4096) == b"READY=1"
        status = manager.recv(65_536)
        assert status.startswith(b"STATUS=one line READY=0 and xxx")
        assert len(status) < 600
        assert manager.recv(4096) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=80500000"


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for name in ("", "vsock:2:1234", str(tmp_path / "gone"), "/" + "long" * 100):
        Notifier.from_environment({VARIABLE: name}).ready()
    Notifier().stopping(1.0)
