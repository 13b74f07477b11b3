"""`swarm-client update` runs the tool that installed the program, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swarm_client.cli import update as module
from swarm_client.cli.main import PROGRAM, swarm_client
from swarm_client.service import systemd
from swarm_shared.base.command_line import run_command_line
from swarm_shared.base.errors import ConfigurationError, DaemonError

RECEIPTS = {"uv": "uv-receipt.toml", "pipx": "pipx_metadata.json"}
COMMANDS = {"uv": "tool upgrade swarmtrain", "pipx": "upgrade swarmtrain"}


class Machine:
    """A home, an environment and a PATH with programs that record their arguments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefix, self.programs, self.calls = folder / "env", folder / "bin", folder / "calls"
        self.home = folder / "home"
        for made in (self.prefix / "bin", self.programs, self.home):
            made.mkdir(parents=True)
        monkeypatch.setenv("PATH", f"{self.programs}:/usr/bin:/bin")
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.setenv("SWARM_CLIENT_HOME", str(self.home / "client"))
        monkeypatch.setattr(sys, "prefix", str(self.prefix))
        monkeypatch.setattr(sys, "executable", str(self.prefix / "bin" / "python"))
        # The one of these tests is a checkout in place.
        monkeypatch.setattr(module.importlib.metadata, "distribution", lambda name: NoOrigin())
        self.program("systemctl", 'echo ActiveState=active; [ "$2" != fail ]')

    def program(self, name: str, then: str = "") -> None:
        script = self.programs / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.calls}"\n{then}\n')
        script.chmod(0o755)

    def installed_by(self, tool: str, then: str = "") -> None:
        (self.prefix / RECEIPTS[tool]).touch()
        self.program(tool, then)

    def service(self, program: str) -> None:
        unit = systemd.user_place().unit
        unit.parent.mkdir(parents=True)
        unit.write_text(systemd.unit_text((program, "daemon"), system=False))

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


class NoOrigin:
    def read_text(self, name: str) -> None:
        assert name == "direct_url.json"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def run(*words: str) -> int:
    return run_command_line(swarm_client, PROGRAM, ["update", *words])


@pytest.mark.parametrize("tool", RECEIPTS)
def test_the_tool_that_installed_it_is_run(machine: Machine, tool: str) -> None:
    machine.installed_by(tool)
    assert run() == 0
    assert machine.called() == [f"{tool} {COMMANDS[tool]}"]


@pytest.mark.parametrize("tool", RECEIPTS)
def test_a_dry_run_prints_the_command_and_runs_nothing(
    machine: Machine, tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.installed_by(tool)
    assert run("--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"would run {tool} {COMMANDS[tool]}"
    assert machine.called() == []


def test_a_service_of_this_program_is_restarted_after_the_upgrade(machine: Machine) -> None:
    machine.installed_by("uv")
    machine.service(str(machine.prefix / "bin" / "swarm-client"))
    assert run() == 0
    asked, upgraded, restarted = machine.called()
    assert asked.startswith("systemctl --user show")
    assert upgraded == "uv tool upgrade swarmtrain"
    assert restarted == f"systemctl --user restart {systemd.UNIT}"


def test_a_service_of_another_program_is_left_alone(machine: Machine) -> None:
    machine.installed_by("uv")
    machine.service("/opt/other/bin/swarm-client")
    assert run() == 0
    assert machine.called() == ["uv tool upgrade swarmtrain"]


def test_after_a_failed_upgrade_nothing_is_restarted(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.installed_by("uv", "exit 7")
    machine.service(str(machine.prefix / "bin" / "swarm-client"))
    assert run() == DaemonError.exit_code
    assert "failed with exit code 7" in capsys.readouterr().err
    assert [call for call in machine.called() if "restart" in call] == []


def test_a_daemon_that_runs_is_named_with_the_commands_that_replace_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.installed_by("pipx")
    monkeypatch.setattr("swarm_client.control.client.is_running", lambda socket: True)
    assert run() == 0
    said = capsys.readouterr().out
    assert "swarm-client shutdown" in said
    assert "swarm-client daemon --detach" in said


def test_an_installation_by_hand_says_what_to_do(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == ConfigurationError.exit_code
    assert f"pip, in {machine.prefix}" in capsys.readouterr().err
    assert machine.called() == []


def test_a_tool_that_is_not_on_the_path_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.installed_by("pipx")
    (machine.programs / "pipx").unlink()
    assert run() == ConfigurationError.exit_code
    assert "`pipx upgrade swarmtrain`" in capsys.readouterr().err
